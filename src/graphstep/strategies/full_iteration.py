"""``full_iteration``: forward and backward of all microbatches of a step in one graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphstep.capture.attributes import Attributes
from graphstep.capture.gradients import GradientHomes
from graphstep.capture.manifest import Watched, verify
from graphstep.capture.observe import Observation
from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import StaticInputs, to_device
from graphstep.capture.tree import flatten
from graphstep.engine import Recording
from graphstep.errors import CaptureError, ConfigError, Problem
from graphstep.strategies.baked_rates import optimizers_refused
from graphstep.strategies.protocol import ForwardBackward

STAGES = ("training", "validation")

_WHERE = "full_iteration, the forward-backward function"


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recording, and what must still be as it was for it to be replayed."""

    recording: Recording
    watched: Watched
    attributes: Attributes


@dataclass(slots=True)
class _Iteration:
    """State of one key: eager until warm, then one recording."""

    static: StaticInputs
    homes: GradientHomes
    observation: Observation | None = None
    num_eager: int = 0
    why_eager: str = "warmup"
    graph: _Graph | None = None


class FullCudaGraphWrapper:
    """Wraps a forward-backward function: eager for the first calls, one graph launch for each later call.

    There is one graph for each key: training or forward-only, number of microbatches, layout and non-tensor values of
    the batches, training flags, grad and autocast modes. A key that was not seen warms up and is captured anew; it is
    never served by the graph of another key. Past ``max_graphs`` keys, further ones run eagerly and are counted.
    When a plain attribute of a module (a dropout probability, say) or the hooks on a module or parameter have changed
    since a capture, its graph is dropped and captured again after a new warmup; attributes that the step itself sets
    do not count. Hooks run when the step is captured and not when it is replayed: what they compute is in the graph.

    Gradients accumulate inside the graph into ``main_grad`` or ``.grad``; the optimizer, gradient clipping and logging
    stay outside. The order of microbatches and of random draws is that of the wrapped function, so results equal eager
    execution bit for bit where the kernels are deterministic. Batches that want a gradient run eagerly: it could not
    reach them.

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
        self._iterations: dict[tuple[bool, Signature], _Iteration] = {}

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Read the microbatches, then run the step.

        Returns:
            [num_microbatches] fp32 losses, a copy that later steps do not change.

        Raises:
            CaptureError: the step cannot be captured. Gradients, buffers and generators are as before the call; the
                batches of this call are consumed. A function that returns no tensor is refused after its first eager
                step, which has run.
            StaleAddressError: a parameter, buffer or gradient has moved since the capture, or a module was replaced.
            LifecycleError: the wrapper is closed.

        Cost of a replay: one copy an input tensor, one launch, one copy of the losses; no wait for the device.
        """
        self._session.require_open()
        batches = [next(data_iterator) for _ in range(num_microbatches)]
        stats = self._stats(forward_only)
        tensors, _ = flatten(batches)
        if any(tensor.requires_grad for tensor in tensors):
            return self._plainly(batches, forward_only, "a batch wants a gradient")
        iteration = self._iteration(batches, forward_only)
        if iteration is None:
            return self._plainly(batches, forward_only, "too many keys")
        if iteration.graph is not None:
            changed = iteration.graph.attributes.changed()
            if changed:
                self._drop(iteration, stats)
                iteration.why_eager = f"warmup after a change of {changed[0]}"
        if iteration.graph is None:
            if iteration.num_eager < self._warmup_steps:
                stats.eager_calls[iteration.why_eager] += 1
                return self._warm_up(iteration, batches, forward_only)
            with self._session.timed(stats):
                iteration.static.load(batches)
                iteration.graph = self._capture(iteration, forward_only)
        # The copies run while the host checks; should it refuse, they have changed nothing but the graph's own inputs.
        iteration.static.load_tensors(tensors)
        verify(iteration.graph.watched, "full_iteration, before replay")
        guests = iteration.homes.settle()
        iteration.graph.recording.replay()
        iteration.homes.hand_out(guests)
        stats.num_replays += 1
        losses: Tensor = iteration.graph.recording.result
        return losses.detach().clone()

    def __call__(self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False) -> Tensor:
        """The same as :meth:`forward_backward`."""
        return self.forward_backward(
            data_iterator=data_iterator, num_microbatches=num_microbatches, forward_only=forward_only
        )

    def reset_cuda_graph(self, stage: str | None = None) -> None:
        """Drop the graphs of ``training`` or ``validation``, or all; they warm up and are captured again when used.

        Raises:
            ConfigError: there is no such stage.
        """
        if stage is not None and stage not in STAGES:
            raise ConfigError(
                Problem("unknown-stage", f"there is no stage {stage!r}", "reset_cuda_graph", f"one of {STAGES} or None")
            )
        for key in [key for key in self._iterations if stage in (None, _stage(key[0]))]:
            iteration, stats = self._iterations.pop(key), self._stats(key[0])
            stats.static_bytes -= iteration.static.nbytes
            self._drop(iteration, stats)

    def end_step(self) -> None:
        """Nothing to do: the step is one call."""

    def report(self) -> CaptureReport:
        """What has been captured so far."""
        return self._session.report()

    def close(self) -> None:
        """Close the session and forget the graphs."""
        self._iterations.clear()
        self._session.close()

    # ----- keys

    def _stats(self, forward_only: bool) -> RegionStats:
        return self._session.stats(_stage(forward_only), "iteration")

    def _iteration(self, batches: list[Any], forward_only: bool) -> _Iteration | None:
        iteration = self._iterations.get((forward_only, self._signature(batches)))
        if iteration is None:
            self._modules = tuple(self._model.modules())  # Some may have been added or replaced.
            if len(self._iterations) >= self._max_graphs:
                return None
            key = (forward_only, self._signature(batches))
            static = StaticInputs(batches, self._session.device)
            iteration = self._iterations[key] = _Iteration(static, GradientHomes(self._session.gradient_homes))
            self._stats(forward_only).static_bytes += iteration.static.nbytes
        return iteration

    def _signature(self, batches: list[Any]) -> Signature:
        return Signature.of(batches, device_type=self._session.device.type, modules=self._modules, are_copied=True)

    def _drop(self, iteration: _Iteration, stats: RegionStats) -> None:
        if iteration.graph is not None:
            self._session.release([iteration.graph.recording], stats)
        iteration.graph, iteration.observation, iteration.num_eager = None, None, 0
        if all(other.graph is None for other in self._iterations.values()):
            # Nothing writes them any more: gradients may live elsewhere from now on.
            self._session.gradient_homes.clear()
        iteration.homes = GradientHomes(self._session.gradient_homes)

    # ----- eager

    def _plainly(self, batches: list[Any], forward_only: bool, reason: str) -> Tensor:
        self._stats(forward_only).eager_calls[reason] += 1
        with self._session.engine.capture_stream():
            return self._run(to_device(batches, self._session.device), forward_only)

    def _warm_up(self, iteration: _Iteration, batches: list[Any], forward_only: bool) -> Tensor:
        # On the capture stream and from the static inputs, so that what the libraries set up per stream and per
        # address is what the capture will find. The last one is watched: it is what the capture will repeat.
        iteration.num_eager += 1
        with self._session.engine.capture_stream():
            iteration.static.load(batches)
            if iteration.num_eager != self._warmup_steps:
                return self._run(iteration.static.arguments, forward_only)
            losses, iteration.observation = self._session.watch_run(
                lambda: self._run(iteration.static.arguments, forward_only)
            )
            return losses

    def _run(self, batches: list[Any], forward_only: bool) -> Tensor:
        losses: Any = self._function(
            data_iterator=iter(batches), model=self._model, num_microbatches=len(batches), forward_only=forward_only
        )
        if not isinstance(losses, Tensor):
            raise _no_tensor(losses)
        return losses

    # ----- capture

    def _capture(self, iteration: _Iteration, forward_only: bool) -> _Graph:
        def step() -> Tensor:
            return self._run(iteration.static.arguments, forward_only)

        stats = self._stats(forward_only)
        named = [("", self._model)]
        modules = list(self._model.named_modules())
        attributes, watched = Attributes(modules, hooks_of=modules, parameters_of=modules), self._session.watch(named)
        observation = iteration.observation
        try:
            observation = observation or self._session.observe(step)
            if not forward_only:
                iteration.homes.add(observation.leaves)
            gradients = [(leaf, leaf.grad) for leaf in observation.leaves]
            try:
                with optimizers_refused():
                    recording = self._session.capture(stats, step, observation=observation)
                if problem := _problem_of(gradients, watched):
                    self._session.release([recording], stats)
                    raise problem
            finally:
                for leaf, gradient in gradients:
                    if leaf.grad is not gradient:
                        leaf.grad = gradient
        except BaseException:
            watched.put_back()
            iteration.homes.forget()
            raise
        attributes.ignore_changed()
        return _Graph(recording, self._session.watch(named, observation.leaves), attributes)


def _no_tensor(result: Any) -> CaptureError:
    what = f"the forward-backward function returned {type(result).__name__}, not a tensor of losses"
    return CaptureError(what, where=_WHERE, fix="return one tensor [num_microbatches]")


def _stage(forward_only: bool) -> str:
    return STAGES[1 if forward_only else 0]


def _problem_of(gradients: list[tuple[Tensor, Tensor | None]], watched: Watched) -> CaptureError | None:
    """What a replay of a step could not do, although it was captured."""
    num_replaced = sum(leaf.grad is not gradient for leaf, gradient in gradients)
    if num_replaced:
        what = f"the step replaces .grad of {num_replaced} parameters; a graph writes gradients where they were"
        fix = "zero gradients outside the step, or with set_to_none=False; let DistributedDataParallel, which moves "
        return CaptureError(what, where=_WHERE, fix=f"{fix}them in its second step, warm up for at least 3 steps")
    replaced = watched.put_back()
    if replaced:
        what = f"the step replaces {', '.join(replaced)} by new tensors; a graph works on the tensors that it has seen"
        return CaptureError(what, where=_WHERE, fix="write into the tensors (copy_, add_, mul_)")
    return None
