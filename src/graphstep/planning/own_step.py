"""A plan for a training step of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphstep.errors import Problem, UserInputError
from graphstep.planning.calibration import Costs, calibrate
from graphstep.planning.candidates import candidates_of, parts_of
from graphstep.planning.measure import measure_step
from graphstep.planning.plan import Plan
from graphstep.strategies.local_forward import has_graphs


def plan_step(
    step: Callable[[], Any],
    model: nn.Module,
    *,
    budget_bytes: int | None = None,
    costs: Costs | None = None,
    num_warmup: int = 3,
    num_timed: int = 9,
) -> Plan:
    """Measure a step of a training loop eagerly, and predict what capture would gain and need. Captures nothing of it.

    Args:
        step: a whole step: zeroed gradients, forward, backward, optimizer. It is run for real, about fifteen times.
        model: what it trains, without graphs of its own.
        budget_bytes: memory that graphs may add to the peak of a step; None: what is free on a GPU, no limit without.
        costs: of this machine, where they are known from an earlier plan; None: they are measured.
        num_warmup: steps before the timed ones.
        num_timed: steps whose median is the time of a step.

    Raises:
        UserInputError: the step does not call the model, the model has graphs, or the budget is negative.
    """
    _require_plannable(model, budget_bytes)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    parts = parts_of(model)
    candidates = candidates_of(model)
    costs = calibrate(device) if costs is None else costs
    measured = measure_step(
        step,
        model,
        costs,
        device=device,
        paths=[part.path for part in parts],
        num_warmup=num_warmup,
        num_timed=num_timed,
    )
    if measured.log.num_microbatches == 0:
        raise UserInputError(
            Problem(
                "plan-model-not-called",
                f"the step did not call {type(model).__name__}",
                "plan_step, argument model",
                "give the module that the step calls, not a part or a copy of it",
            )
        )
    return Plan.of(measured, candidates, costs, budget_bytes=budget_bytes)


def _require_plannable(model: nn.Module, budget_bytes: int | None) -> None:
    problems = []
    if budget_bytes is not None and budget_bytes < 0:
        problems.append(
            Problem(
                "memory-budget",
                f"{budget_bytes} is no size of memory",
                "plan_step, argument budget_bytes",
                "give a number of bytes, or None for what is free on the device",
            )
        )
    captured = [path for path, module in model.named_modules() if has_graphs(module)]
    if captured:
        problems.append(
            Problem(
                "plan-model-has-graphs",
                f"{len(captured)} modules of {type(model).__name__} have graphs, such as {captured[0] or 'itself'}: "
                "their steps are not eager",
                "plan_step, argument model",
                "plan before graphs are attached, or close what has attached them",
            )
        )
    if problems:
        raise UserInputError(problems)
