"""``local``: layers, or chosen parts of them, own graphs that are captured after the first step and replayed later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.capture.manifest import Watched, verify
from graphstep.capture.plan import PlanGuard, PlanObserver
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.static_inputs import to_device
from graphstep.config import CudaGraphModule
from graphstep.errors import CaptureError, ConfigError, Problem
from graphstep.models.segments import SegmentedModule
from graphstep.strategies.local_capture import capture_plan, gradients_through_autograd
from graphstep.strategies.local_layers import graphed_layers
from graphstep.strategies.protocol import ForwardBackward


class LocalGraphs:
    """Captures a model's layers. The first training step runs eagerly and is observed; :meth:`end_step` captures.

    While this object is open, the ``forward`` of each captured layer is replaced on the instance; :meth:`close` puts it
    back. Evaluation (grad mode off) runs eagerly and is counted as such: a graph captured in training is never used for
    it. So does a call whose signature differs from the captured one, and one after a plain attribute or the hooks of a
    module in the region have changed. Hooks on a layer and on parameters run as always; hooks on modules inside a
    captured region run when it is captured and not when it is replayed: what they compute is in the graph.

    Args:
        forward_backward_func: runs the step; called with batches on the session's device.
        model: contains at least one :class:`SegmentedModule` with a segment that is to be captured.
        session: owner of the graphs.
        modules: what to capture; empty for whole layers. Adjacent captured segments share one graph pair.
        warmup_steps: eager runs of each region just before its capture. They leave no trace.

    Raises:
        ConfigError: nothing in the model can be captured, or a layer's forward is not the list of its segments.
    """

    def __init__(
        self,
        forward_backward_func: ForwardBackward,
        *,
        model: nn.Module,
        session: GraphSession,
        modules: Sequence[CudaGraphModule] = (),
        warmup_steps: int = 3,
    ) -> None:
        self._function = forward_backward_func
        self._model = model
        self._session = session
        self._warmup_steps = warmup_steps
        self._layers = graphed_layers(model, session, frozenset(modules))
        if not self._layers:
            raise ConfigError(_nothing_to_capture(model, modules))
        self._watched: Watched | None = None
        self._observer: PlanObserver | None = PlanObserver()
        for layer in self._layers:
            layer.start_observing(self._observer)
            layer.install()

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Run the step: eager code with replays in it. Returns losses [num_microbatches].

        Raises:
            StaleAddressError: a parameter, buffer or gradient has moved since the capture, or a module was replaced.
            PlanError: forwards and backwards came in another order than in the first step.
            LifecycleError: this object is closed, or a second backward was asked for.
        """
        self._session.require_open()
        if self._watched is not None:
            verify(self._watched, "local, before the step")
            for layer in self._layers:
                layer.start_step()
        batches = (to_device(batch, self._session.device) for batch in islice(data_iterator, num_microbatches))
        return self._function(
            data_iterator=batches, model=self._model, num_microbatches=num_microbatches, forward_only=forward_only
        )

    def end_step(self) -> None:
        """After the first step with a backward pass: capture what was observed.

        Raises:
            CaptureError: names the region that cannot be captured. Layers run eagerly as before.
            LifecycleError: this object is closed.
        """
        self._session.require_open()
        if self._observer is None or not self._observer.plan.trained():
            return
        plan, self._observer = self._observer.plan, None
        for layer in self._layers:
            layer.start_capture()
        regions = [calls.region for layer in self._layers for calls in layer.regions]
        watched = self._session.watch([("", self._model)])
        try:
            with torch.inference_mode(False):
                pairs = capture_plan(
                    plan,
                    self._session,
                    num_warmup_runs=self._warmup_steps,
                    through_autograd=gradients_through_autograd(self._model, regions, plan),
                )
        finally:
            replaced = watched.put_back()
        if replaced:
            self._session.release_all()
            raise CaptureError(
                f"the captured layers replace {', '.join(replaced)} by new tensors; a graph works on the tensors that "
                "it has seen",
                where="local, after the capture",
                fix="write into the tensors (copy_, add_, mul_)",
            )
        self._watched = watched
        guard = PlanGuard(plan)
        for layer in self._layers:
            layer.use(pairs, guard)

    def report(self) -> CaptureReport:
        """What has been captured so far."""
        return self._session.report()

    def close(self) -> None:
        """Put the layers' own ``forward`` back and free the graphs."""
        for layer in self._layers:
            layer.remove()
        self._session.close()


def _nothing_to_capture(model: nn.Module, modules: Sequence[CudaGraphModule]) -> Problem:
    layers = [module for module in model.modules() if isinstance(module, SegmentedModule)]
    kinds = sorted({segment.kind for layer in layers for segment in layer.segments() if segment.kind})
    wanted = ", ".join(module.value for module in modules) or "whole layers"
    return Problem(
        code="nothing-to-capture",
        what=f"local graphs of {wanted} were asked for, but {type(model).__name__} has {len(layers)} layers "
        f"with the parts: {', '.join(kinds) or 'none'}",
        where="--cuda-graph-modules",
        fix=f"name some of: {', '.join(kinds)}" if kinds else "use --cuda-graph-impl full_iteration or none",
    )
