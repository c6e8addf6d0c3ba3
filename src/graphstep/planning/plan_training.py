"""A plan for what a command line of ``graphstep train`` trains, and what a choice of switches turns out to do."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.capture.report import CaptureReport
from graphstep.config import CudaGraphConfig, RunConfig, from_argv
from graphstep.coverage import measure_steps, start_profiler
from graphstep.errors import ConfigError
from graphstep.planning.calibration import Costs, calibrate
from graphstep.planning.candidates import Candidate, candidates_of, parts_of
from graphstep.planning.measure import measure_step
from graphstep.planning.plan import Measured, Plan
from graphstep.planning.scopes import Scopes
from graphstep.strategies import ForwardBackward
from graphstep.strategies.build import EagerStrategy
from graphstep.training.compare import silent_eager
from graphstep.training.determinism import deterministic_algorithms, preserved_random_state
from graphstep.training.loop import Trainer

_MANY_STEPS: Final = 10**6
"""No run ends before it has been measured."""
_NUM_SETTLING, _NUM_WARMUP, _NUM_TIMED, _NUM_PROFILED = 6, 2, 9, 3


class _FollowedStrategy(EagerStrategy):
    """Eager, and tells where forward and backward of a step begin and end."""

    def __init__(self, forward_backward_func: ForwardBackward, *, model: nn.Module, device: torch.device) -> None:
        super().__init__(forward_backward_func, model=model, device=device)
        self.scopes: Scopes | None = None

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        given: dict[str, Any] = {
            "data_iterator": data_iterator,
            "num_microbatches": num_microbatches,
            "forward_only": forward_only,
        }
        if self.scopes is None:
            return super().forward_backward(**given)
        with self.scopes.iteration():
            return super().forward_backward(**given)

    @contextmanager
    def followed(self, scopes: Scopes) -> Iterator[None]:
        """Tell these scopes."""
        self.scopes = scopes
        try:
            yield
        finally:
            self.scopes = None


def plan_training(config: RunConfig, *, budget_bytes: int | None = None, costs: Costs | None = None) -> Plan:
    """Measure eager steps of a run, and predict what each choice of switches would gain and need.

    Nothing is written. Choices that the other options rule out are listed with the reason.

    Args:
        config: the run; what it says about graphs is left aside.
        budget_bytes: memory that graphs may add to the peak of a step; None: what is free on a GPU, no limit without.
        costs: of this machine, where they are known from an earlier plan; None: they are measured.

    Raises:
        UserInputError: anything wrong with options, data or device.
    """
    eager = _without_end(silent_eager(config))
    strategies: list[_FollowedStrategy] = []

    def make_strategy(
        graphs: CudaGraphConfig,
        *,
        model: nn.Module,
        forward_backward_func: ForwardBackward,
        device: torch.device,
        optimizers: Sequence[Optimizer] = (),
    ) -> _FollowedStrategy:
        del graphs, optimizers
        strategies.append(_FollowedStrategy(forward_backward_func, model=model, device=device))
        return strategies[-1]

    with Trainer(eager, strategy_factory=make_strategy) as trainer:
        costs = calibrate(trainer.device) if costs is None else costs
        parts = parts_of(trainer.model)
        found = [_checked(candidate, config) for candidate in candidates_of(trainer.model)]
        with deterministic_algorithms(config.training.deterministic_mode), preserved_random_state(trainer.device):
            measured = measure_step(
                trainer.make_step,
                trainer.model,
                costs,
                device=trainer.device,
                paths=[part.path for part in parts],
                follow=strategies[-1].followed,
            )
        return Plan.of(measured, tuple(found), costs, budget_bytes=budget_bytes)


def measure_candidate(config: RunConfig, candidate: Candidate) -> Measured:
    """Train some steps with a candidate captured, with nothing written; they are measured as the eager ones were.

    Raises:
        CaptureError: it cannot be captured.
    """
    captured = config_of(candidate, config)
    with Trainer(_without_end(_silent(captured))) as trainer:
        start_profiler(trainer.device)
        trainer.train(_NUM_SETTLING)
        before = trainer.report()
        with deterministic_algorithms(config.training.deterministic_mode), preserved_random_state(trainer.device):
            measured = measure_steps(
                trainer.make_step,
                trainer.device,
                num_warmup=_NUM_WARMUP,
                num_timed=_NUM_TIMED,
                num_profiled=_NUM_PROFILED,
            )
        after = trainer.report()
    del trainer
    gc.collect()
    num_steps = _NUM_WARMUP + _NUM_TIMED + _NUM_PROFILED
    return Measured.of(after, measured, num_graphs=(_num_graphs(after) - _num_graphs(before)) / num_steps)


def config_of(candidate: Candidate, config: RunConfig) -> RunConfig:
    """The run with the switches of a candidate.

    Raises:
        ConfigError: the other options rule them out.
    """
    plain = dataclasses.replace(config, graphs=CudaGraphConfig())
    return from_argv([*plain.to_argv(), *candidate.switches], for_training=True)


def _checked(candidate: Candidate, config: RunConfig) -> Candidate:
    try:
        config_of(candidate, config)
    except ConfigError as error:
        return dataclasses.replace(candidate, problem=error.problems[0].what)
    return candidate


def _num_graphs(report: CaptureReport) -> int:
    """Graphs launched so far: whole steps count replays, regions launches."""
    return sum(row.num_launches or row.num_replays for row in report.rows)


def _silent(config: RunConfig) -> RunConfig:
    return dataclasses.replace(silent_eager(config), graphs=config.graphs)


def _without_end(config: RunConfig) -> RunConfig:
    training = dataclasses.replace(config.training, train_iters=_MANY_STEPS, compare_with_eager=0)
    return dataclasses.replace(config, training=training)
