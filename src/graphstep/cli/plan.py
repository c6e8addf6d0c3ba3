"""``graphstep plan``: what capture would gain and need, from eager steps, before anything is captured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console

from graphstep.cli.plan_options import PlanOptions
from graphstep.errors import CaptureError, Problem, UserInputError

if TYPE_CHECKING:
    from graphstep.config import RunConfig
    from graphstep.planning import Plan

EXIT_OK = 0


def run(options: PlanOptions, config: RunConfig | None, *, console: Console | None = None) -> int:
    """Run the command.

    Args:
        options: see :mod:`graphstep.cli.plan_options`.
        config: what the options of ``graphstep train`` describe; None with a target.
        console: where output goes; standard output if None.

    Returns:
        Exit code 0.

    Raises:
        UserInputError: bad options, data or target.
        CaptureError: with ``--measure``, what was recommended cannot be captured.
    """
    console = console or Console()
    if config is None:
        plan = _plan_target(options)
    else:
        from graphstep.planning.plan_training import plan_training

        plan = plan_training(config, budget_bytes=options.budget_bytes)
        if options.measures or options.measures_all:
            plan = _measured(plan, config, options, console)
    if options.is_json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        console.print(plan.render())
        # On lines of its own, however long: it is there to be copied.
        console.print(f"\n{plan.advice()}", style="bold", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK


def _measured(plan: Plan, config: RunConfig, options: PlanOptions, console: Console) -> Plan:
    from graphstep.planning.plan_training import measure_candidate

    recommended = plan.recommended
    for each in plan.predictions:
        if not each.is_possible or not (options.measures_all or each is recommended):
            continue
        try:
            plan = plan.with_measured(each.candidate.name, measure_candidate(config, each.candidate))
        except CaptureError as error:
            if not options.measures_all:
                raise
            if not options.is_json:
                console.print(f"{each.candidate.name}: {error.what}", markup=False, highlight=False)
    return plan


def _plan_target(options: PlanOptions) -> Plan:
    from graphstep.planning import plan_step
    from graphstep.planning.load_target import blamed_on_target, load_target

    if options.measures or options.measures_all:
        raise UserInputError(
            Problem(
                "plan-measure-target",
                "a step of your own is captured by your own code",
                "--measure",
                "leave it out, capture as recommended, and give Plan.with_measured what you find",
            )
        )
    step, model = load_target(options.target or "")
    return plan_step(blamed_on_target(options.target or "", step), model, budget_bytes=options.budget_bytes)
