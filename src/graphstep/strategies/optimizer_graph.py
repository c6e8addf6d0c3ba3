"""The optimizer step as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.optim import Optimizer

from graphstep.capture.places import Place
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.config.switches import CapturePolicy
from graphstep.strategies.iteration_graphs import IterationGraphs
from graphstep.strategies.iteration_state import Step
from graphstep.strategies.optimizers_inside import OptimizersInside
from graphstep.strategies.step_options import checked
from graphstep.strategies.step_reads import StepReads

STAGE = "optimizer"


class OptimizerGraph:
    """Runs an optimizer's step eagerly for the first calls, and as one graph launch from then on.

    Learning rates, and weight decays of torch's optimizers, are read from ``param_groups`` before each replay; another
    number that changes has the step captured anew. State that is loaded, parameters that are added, and gradients that
    are there or not are noticed. The graph reads gradients where they were at its capture: one that lies elsewhere is
    copied there, which costs a pass over it, and does not happen with ``zero_grad(set_to_none=False)`` or with
    gradients that graphs of this library fill.

    Args:
        optimizer: needs ``fused=True`` or ``capturable=True``, since a graph reads nothing back.
        update: what to run instead of ``optimizer.step()``: clipping as well, say. Takes nothing.
        session: owner of the graph; by default a new one, on the device of the parameters. Where other graphs fill the
            gradients, give it theirs (``manager.session``).
        cuda_graph_warmup_steps: eager steps before the capture; 0 counts as 1, since the first one makes the state.
        policy: what becomes of a step that cannot be captured, see :class:`CapturePolicy`.

    Raises:
        ConfigError: a number or policy that there is not.
    """

    launches_graphs: Final = True
    """Not to be used inside of another captured step."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        update: Callable[[], Any] | None = None,
        session: GraphSession | None = None,
        cuda_graph_warmup_steps: int = 3,
        policy: CapturePolicy | str = CapturePolicy.required,
    ) -> None:
        policy, _ = checked("OptimizerGraph", warmup_steps=cuda_graph_warmup_steps, policy=policy)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.session = session if session is not None else GraphSession(_device_of(parameters))
        self._is_own = session is None
        run = update if update is not None else _StepOf(optimizer)
        self._optimizers = OptimizersInside([optimizer], self.session.device)
        self._step = Step(
            stage=STAGE,
            kind=STAGE,
            function=lambda _: run(),
            modules=(),
            optimizers=self._optimizers,
            reads=lambda _: _read_by(run, optimizer),
        )
        self._graphs = IterationGraphs(
            self.session, warmup_steps=max(1, cuda_graph_warmup_steps), max_graphs=4, policy=policy
        )

    def step(self) -> Any:
        """Make one step. Returns what ``update`` returns, as copies.

        Raises:
            CaptureError: the step cannot be captured; weights and state are as before the call.
            StaleAddressError: a gradient has moved where it cannot be followed.
            LifecycleError: the graph is closed.
        """
        # A parameter without a gradient is left out of a step: another set of these is another graph.
        has_gradient = bytes(parameter.grad is not None for parameter in self._optimizers.parameters())
        return self._graphs.run(self._step, has_gradient)

    __call__ = step

    def report(self) -> CaptureReport:
        """What has been captured so far."""
        return self.session.report()

    def reset_cuda_graph(self) -> None:
        """Drop the graph; it warms up and is captured again."""
        self._graphs.reset([STAGE])

    def close(self) -> None:
        """Free the graph, and the session if it was made here. May be called twice."""
        if self._is_own:
            self._graphs.close()
        elif not self.session.is_closed:
            self._graphs.reset([STAGE])


class _StepOf:
    """The step of an optimizer, looked up each time: a scheduler puts another in its place, to see it called."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self) -> None:
        self._optimizer.step()


def _read_by(run: Callable[[], Any], optimizer: Optimizer) -> list[Place]:
    found = StepReads()
    found.add_function(run)
    found.add_optimizers([optimizer])
    return found.places


def _device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
