"""``full_iteration``: forward and backward of all microbatches of a step in one graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from graphstep.capture.gradients import GradientHomes
from graphstep.capture.manifest import verify
from graphstep.capture.observe import Observation
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import StaticInputs
from graphstep.engine import Recording
from graphstep.errors import CaptureError
from graphstep.strategies.protocol import ForwardBackward


@dataclass(slots=True)
class _Iteration:
    """State of one key: eager until warm, then one recording."""

    static: StaticInputs
    homes: GradientHomes = field(default_factory=GradientHomes)
    observation: Observation | None = None
    num_eager: int = 0
    recording: Recording | None = None


class FullCudaGraphWrapper:
    """Wraps a forward-backward function: eager for the first calls, one graph launch for each later call.

    There is one graph for each key: training or forward-only, number of microbatches, layout and non-tensor values of
    the batches, training flags, grad and autocast modes. A key that was not seen warms up and is captured anew; it is
    never served by the graph of another key. Past ``max_graphs`` keys, further ones run eagerly and are counted.

    Gradients accumulate inside the graph into ``main_grad`` or ``.grad``; the optimizer, gradient clipping and logging
    stay outside. The order of microbatches and of random draws is that of the wrapped function, so results equal eager
    execution bit for bit where the kernels are deterministic.

    Args:
        forward_backward_func: see :class:`ForwardBackward`; called with batches on the session's device.
        model: its parameters and buffers are watched: replay is refused when one has moved.
        session: owner of the graphs.
        cuda_graph_warmup_steps: eager calls of each key before its capture. They are real steps of training. With 0,
            the capture is preceded by one observed run that leaves no trace.
        max_graphs: most keys that are captured.
    """

    def __init__(
        self,
        forward_backward_func: ForwardBackward,
        *,
        model: nn.Module,
        session: GraphSession,
        cuda_graph_warmup_steps: int = 3,
        max_graphs: int = 16,
    ) -> None:
        self._function = forward_backward_func
        self._model = model
        self._modules = tuple(model.modules())
        self._session = session
        self._warmup_steps = cuda_graph_warmup_steps
        self._max_graphs = max_graphs
        self._iterations: dict[tuple[Any, ...], _Iteration] = {}
        self._watched = session.watch([("", model)])

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Read the microbatches, then run the step.

        Returns:
            [num_microbatches] fp32 losses, a copy that later steps do not change.

        Raises:
            CaptureError: the step cannot be captured. Gradients, buffers and generators are as before the call; the
                batches of this call are consumed.
            StaleAddressError: a parameter or buffer has moved since the capture.

        Cost of a replay: one copy an input tensor, one launch, one copy of the losses; no wait for the device.
        """
        batches = [next(data_iterator) for _ in range(num_microbatches)]
        signature = Signature.of(batches, device_type=self._session.device.type, modules=self._modules)
        iteration = self._iteration((forward_only, signature), batches)
        stats = self._session.stats("validation" if forward_only else "training", "iteration")
        if iteration is None:
            stats.eager_calls["too many keys"] += 1
            return self._eager(_Iteration(StaticInputs(batches, self._session.device)), batches, forward_only)
        if iteration.recording is None:
            if iteration.num_eager < self._warmup_steps:
                stats.eager_calls["warmup"] += 1
                return self._eager(iteration, batches, forward_only)
            with self._session.timed(stats):
                iteration.static.load(batches)
                iteration.recording = self._capture(iteration, forward_only)
        verify(self._watched, "full_iteration, before replay")
        iteration.homes.settle()
        iteration.static.load(batches)
        iteration.recording.replay()
        stats.num_replays += 1
        losses: Tensor = iteration.recording.result
        return losses.clone()

    def reset_cuda_graph(self, stage: str | None = None) -> None:
        """Drop the graphs of ``training`` or ``validation``, or all; they warm up and are captured again when used."""
        for key in [key for key in self._iterations if stage in (None, "validation" if key[0] else "training")]:
            iteration = self._iterations.pop(key)
            if iteration.recording is not None:
                stats = self._session.stats("validation" if key[0] else "training", "iteration")
                self._session.release([iteration.recording], stats)

    def end_step(self) -> None:
        """Nothing to do: the step is one call."""

    def report(self) -> CaptureReport:
        """What has been captured so far."""
        return self._session.report()

    def close(self) -> None:
        """Close the session and forget the graphs."""
        self._iterations.clear()
        self._session.close()

    def _iteration(self, key: tuple[Any, ...], batches: list[Any]) -> _Iteration | None:
        iteration = self._iterations.get(key)
        if iteration is None and len(self._iterations) < self._max_graphs:
            iteration = self._iterations[key] = _Iteration(StaticInputs(batches, self._session.device))
            stats = self._session.stats("validation" if key[0] else "training", "iteration")
            stats.static_bytes += iteration.static.nbytes
        return iteration

    def _eager(self, iteration: _Iteration, batches: list[Any], forward_only: bool) -> Tensor:
        # On the capture stream and from the static inputs, so that what the libraries set up per stream and per
        # address is what the capture will find. The last one is watched: it is what the capture will repeat.
        iteration.num_eager += 1
        with self._session.engine.capture_stream():
            iteration.static.load(batches)
            if iteration.num_eager != self._warmup_steps:
                return self._run(iteration, forward_only)
            losses, iteration.observation = self._session.watch_run(lambda: self._run(iteration, forward_only))
            return losses

    def _run(self, iteration: _Iteration, forward_only: bool) -> Tensor:
        batches: list[Any] = iteration.static.arguments
        return self._function(
            data_iterator=iter(batches), model=self._model, num_microbatches=len(batches), forward_only=forward_only
        )

    def _capture(self, iteration: _Iteration, forward_only: bool) -> Recording:
        stats = self._session.stats("validation" if forward_only else "training", "iteration")

        def step() -> Tensor:
            return self._run(iteration, forward_only)

        observation = iteration.observation or self._session.observe(step)
        if not forward_only:
            iteration.homes.add(observation.leaves)
        recording = self._session.capture(stats, step, generators=observation.generators)
        if not isinstance(recording.result, Tensor):
            self._session.release([recording], stats)
            raise CaptureError(
                f"the forward-backward function returned {type(recording.result).__name__}, not a tensor of losses",
                where="full_iteration",
                fix="return one tensor [num_microbatches]",
            )
        return recording
