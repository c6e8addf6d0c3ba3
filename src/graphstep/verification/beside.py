"""``graphstep.shadow``: beside a run by graphs, some of its calls run eagerly as well, and differences are logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from graphstep.errors import ConfigError, Problem
from graphstep.strategies.full_iteration import FullCudaGraphWrapper
from graphstep.strategies.graphed_step import GraphedStep
from graphstep.strategies.local import LocalGraphs
from graphstep.strategies.manager import CudaGraphManager
from graphstep.verification.compare import Tolerance, Tolerances
from graphstep.verification.report import VerifyReport
from graphstep.verification.shadow_calls import CallShadow
from graphstep.verification.shadow_steps import ShadowedStep, StepShadow
from graphstep.verification.targets import graphs_of, target_of


def shadow(
    target: Any,
    *,
    interval: int,
    on_report: Callable[[VerifyReport], None] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> Any:
    """Have every ``interval``-th call run eagerly as well, and report by module what differs; the run stays as it is.

    What ``attach`` returned: calls of the model, which are microbatches, are compared when their backward has run: at
    the next call, or before an optimizer of torch steps. Modules of ``make_graphed_callables``: the same for calls of
    each of them. Whole steps of ``graph_step`` and ``FullCudaGraphWrapper``: the step runs by its graph, is undone,
    runs eagerly, and what the graph has done is put back; call what is returned in place of the step.

    The run is the one without a shadow, bit for bit: state, gradients, generators and attributes of modules are put
    back. What Python keeps elsewhere sees one call more.

    Args:
        target: what ``attach``, ``graph_step``, ``FullCudaGraphWrapper`` or ``LocalGraphs`` has returned, or modules of
            ``make_graphed_callables``.
        interval: calls between two comparisons, 1 or more. Calls that come before a capture are not compared.
        on_report: is given a :class:`VerifyReport` of each comparison; by default it is logged by ``logging``, as a
            warning if something differs.
        rtol: see :func:`graphstep.verify`.
        atol: the same.
        tolerances: the same.

    Returns:
        For whole steps what to call in place of the step; else an object with ``close()``.

    Raises:
        ConfigError: the target has no calls that can be watched.

    Cost: see :class:`CallShadow` and :class:`StepShadow`.
    """
    if interval < 1:
        raise ConfigError(Problem("shadow-interval", f"interval is {interval}", "shadow", "use 1 or more"))
    allowed = Tolerances(Tolerance(rtol, atol), tolerances or {})
    told = log_report if on_report is None else on_report
    if isinstance(target, GraphedStep):
        return _of_step(target, interval, told, allowed)
    if isinstance(target, FullCudaGraphWrapper):
        return _of_iteration(target, interval, told, allowed)
    if isinstance(target, LocalGraphs):
        target = target.manager
    if isinstance(target, CudaGraphManager):
        return CallShadow(
            target.model,
            eagerly=target.eagerly,
            report=target.report,
            device=target.session.device,
            interval=interval,
            on_report=told,
            tolerances=allowed,
        )
    members = list(target) if isinstance(target, tuple | list) else [target]
    owners = [graphs_of(member) for member in members]
    functions = [type(member).__name__ for member in members if not isinstance(member, nn.Module)]
    if functions:
        what = f"calls of functions cannot be watched: {', '.join(functions)}"
        raise ConfigError(Problem("shadow-target", what, "shadow", "give the modules among them"))
    return Shadows(
        CallShadow(
            member,
            eagerly=graphs.eagerly,
            report=graphs.report,
            device=graphs.session.device,
            interval=interval,
            on_report=told,
            tolerances=allowed,
        )
        for member, graphs in zip(members, owners, strict=True)
    )


class Shadows:
    """Several of them."""

    def __init__(self, shadows: Iterator[CallShadow]) -> None:
        self._shadows = tuple(shadows)

    def close(self) -> None:
        """Compare what waits for it, and take the hooks off. May be called twice."""
        for each in self._shadows:
            each.close()


def log_report(report: VerifyReport) -> None:
    """Log what a comparison has found; a difference with its table, as a warning."""
    log = logging.getLogger("graphstep.shadow")
    if report.equal:
        log.info("%s: %s", report.target, report.summary())
    else:
        log.warning("%s: %s\n%s", report.target, report.summary(), report)


def _of_step(
    step: GraphedStep[..., Any], interval: int, told: Callable[[VerifyReport], None], allowed: Tolerances
) -> ShadowedStep[..., Any]:
    target = replace(
        target_of(step, None),
        graphed=lambda given: step(*given[0], **given[1]),
        eager=lambda given: step.eager(*given[0], **given[1]),
    )
    steps = StepShadow(target, interval=interval, on_report=told, tolerances=allowed)
    return ShadowedStep(lambda *args, **kwargs: steps.run((args, kwargs)), steps)


def _of_iteration(
    wrapper: FullCudaGraphWrapper, interval: int, told: Callable[[VerifyReport], None], allowed: Tolerances
) -> ShadowedStep[..., Any]:
    steps = StepShadow(target_of(wrapper, None), interval=interval, on_report=told, tolerances=allowed)

    def run(*, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False) -> Any:
        if forward_only:
            return wrapper(data_iterator=data_iterator, num_microbatches=num_microbatches, forward_only=True)
        return steps.run([next(data_iterator) for _ in range(num_microbatches)])

    return ShadowedStep(run, steps)
