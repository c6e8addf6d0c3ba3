"""Graphs of whole iterations: one for each stage and signature of the batch, captured after eager runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from graphstep.capture.attributes import Attributes
from graphstep.capture.manifest import Watched, verify
from graphstep.capture.observe import Observation
from graphstep.capture.places import Place
from graphstep.capture.reasons import EagerReason
from graphstep.capture.report import RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import StaticInputs, to_device
from graphstep.capture.tree import Node, Value, flatten, unflatten
from graphstep.config.switches import CapturePolicy, MismatchPolicy
from graphstep.engine import Recording, torch_private
from graphstep.errors import CaptureError, InputMismatchError
from graphstep.strategies.iteration_gradients import StepGradients
from graphstep.strategies.iteration_refusals import (
    RETURNS_LOSS,
    RETURNS_OTHERS,
    SETS_FLAGS,
    WRITES,
    Named,
    has_wrapper,
    least_warmup,
    parts_not_captured,
    refused,
    told_of_wrapper,
    with_children,
)
from graphstep.strategies.optimizers_inside import OptimizersInside
from graphstep.strategies.settled import tensors_kept
from graphstep.strategies.step_state import StepState

_LANE = "iterations"
"""Whole iterations share memory with each other, and not with graphs of parts of one, which others run between."""
_WARNED_AFTER = 3
"""Captures anew, after something has changed that a graph has fixed, from which on they are warned of."""
_MOST_GIVEN_UP = 1000
_MOST_DIFFERENCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is captured, and what it consists of."""

    stage: str
    """Its row in the report. Graphs of one stage are those of one function."""
    kind: str
    function: Callable[[Any], Any]
    """Takes the batch, on the session's device; returns any nesting of tensors."""
    modules: Sequence[Named]
    """The modules that run in it, outermost ones only."""
    optimizers: OptimizersInside
    """Those that step in it."""
    fills_gradients: bool = True
    reads: Callable[[Any], Sequence[Place]] = field(default=lambda _: ())
    """Where its Python finds what is no attribute of the modules, for a batch."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recording, and what must still be as it was for it to be replayed."""

    recording: Recording
    structure: Node | Value
    tensors: list[Tensor]
    watched: Watched
    attributes: Attributes
    optimizers: OptimizersInside


@dataclass(slots=True)
class _Iteration:
    """State of one key: eager until warm, then one recording."""

    static: StaticInputs
    gradients: StepGradients
    observation: Observation | None = None
    num_eager: int = 0
    why_eager: str = "warmup"
    structure: Node | Value | None = None
    """Of the last eager result."""
    refusal: CaptureError | None = None
    """What the last eager run has done and a replay would not."""
    graph: _Graph | None = None
    num_recaptures: int = 0


class IterationGraphs:
    """Runs steps: eagerly at first, then by one graph launch each.

    A key is a stage and the signature of its batch: structure, layouts, non-tensor values, training flags and modes. A
    key that was not seen warms up and is captured; it is never served by the graph of another key. At most
    ``max_graphs`` graphs are kept; a further one takes the place of the one that was used longest ago.

    Args:
        session: owner of the graphs.
        warmup_steps: eager runs of each key before its capture, which are real ones. With 0, the capture is preceded by
            one observed run that leaves no trace.
        max_graphs: most graphs.
        policy: what becomes of a step that cannot be captured: ``required`` raises, ``auto`` goes on eagerly with a
            warning and the reason in the report, ``off`` captures nothing.
        on_mismatch: what becomes of another key in a stage that has a graph: ``recapture``, ``eager`` or ``error``.
        use_single_mempool: the graphs of all stages share one memory pool; they never run at the same time.
    """

    def __init__(
        self,
        session: GraphSession,
        *,
        warmup_steps: int,
        max_graphs: int = 16,
        policy: CapturePolicy = CapturePolicy.required,
        on_mismatch: MismatchPolicy = MismatchPolicy.recapture,
        use_single_mempool: bool = True,
    ) -> None:
        self._session = session
        self._use_single_mempool = use_single_mempool
        self._warmup_steps = warmup_steps
        self._max_graphs = max_graphs
        self._policy = policy
        self._on_mismatch = on_mismatch
        self._iterations: dict[tuple[str, Signature], _Iteration] = {}
        """The one used last is the last one."""
        self._refused: set[tuple[str, Signature]] = set()
        """Keys that could not be captured."""
        self._given_up: dict[tuple[str, Signature], None] = {}
        """Keys that had to make room for others, those of the latest first to last."""
        self._warned: set[str] = set()
        """Stages whose users know that there are more keys than there is room for."""
        self._modules: dict[str, tuple[int, tuple[nn.Module, ...]]] = {}

    def run(self, step: Step, batch: Any) -> Any:
        """Run the step on a batch.

        Returns:
            What the function returned, with copies of the tensors: later runs do not change them.

        Raises:
            CaptureError: the step cannot be captured, and the policy requires it. Gradients, buffers and generators are
                as before the call.
            StaleAddressError: a parameter, buffer or gradient has moved since the capture, or a module was replaced.
            InputMismatchError: ``on_mismatch`` is ``error``, and the batch differs from all that were captured.
            LifecycleError: the session is closed.

        Cost of a replay: one copy an input tensor, one launch, one copy a result; no wait for the device.
        """
        self._session.require_open()
        stats = self._session.stats(step.stage, step.kind)
        tensors, _ = flatten(batch)
        key = (step.stage, self._signature(step, batch))
        iteration = self._iterations.pop(key, None)
        if iteration is None:
            reason = self._why_not(key, tensors)
            if reason is not None:
                return self._plainly(step, batch, stats, reason)
            iteration = self._new(batch, stats)
            if key in self._given_up:
                iteration.why_eager = EagerReason.TOO_MANY_SIGNATURES
                self._warn_of_many(next((k for k in reversed(self._iterations) if k[0] == key[0]), key), key)
        self._iterations[key] = iteration
        self._make_room(key, captured=False, number=self._max_graphs)
        if iteration.graph is not None:
            self._drop_if_changed(iteration, step, stats)
        if iteration.graph is not None and (reason := iteration.gradients.why_not()) is not None:
            return self._learn_again(step, iteration, batch, stats, reason)
        if iteration.graph is None and iteration.num_eager < self._warmup_of(step):
            stats.eager_calls[iteration.why_eager] += 1
            return self._warm_up(step, iteration, batch)
        if iteration.graph is None:
            try:
                with self._session.timed(stats):
                    self._make_room(key, captured=True, number=self._max_graphs - 1)
                    iteration.static.load(batch)
                    iteration.graph = self._capture(step, iteration, stats)
            except Exception as error:
                if self._policy is CapturePolicy.required:
                    raise
                return self._refuse(key, step, batch, stats, error)
        return self._replay(iteration, iteration.graph, tensors, stats)

    def reset(self, stages: Iterable[str]) -> None:
        """Drop the graphs of some stages; they warm up and are captured again when they are used."""
        chosen = set(stages)
        self._refused = {key for key in self._refused if key[0] not in chosen}
        self._given_up = {key: None for key in self._given_up if key[0] not in chosen}
        for key in [key for key in self._iterations if key[0] in chosen]:
            self._forget(key)

    def close(self) -> None:
        """Close the session and forget the graphs."""
        self._iterations.clear()
        self._refused.clear()
        self._given_up.clear()
        self._session.close()

    # ----- keys

    def _signature(self, step: Step, batch: Any) -> Signature:
        modules = self._all_modules(step)
        return Signature.of(batch, device_type=self._session.device.type, modules=modules, are_copied=True)

    def _all_modules(self, step: Step) -> tuple[nn.Module, ...]:
        """All modules of a step, found once for as long as nothing is captured or seen anew."""
        known = self._modules.get(step.stage)
        if known is None or known[0] != len(step.modules):
            found = {id(module): module for _, root in step.modules for module in root.modules()}
            known = self._modules[step.stage] = (len(step.modules), tuple(found.values()))
        return known[1]

    def _why_not(self, key: tuple[str, Signature], tensors: list[Tensor]) -> str | None:
        """Why a key that is not known is not to be captured, or None."""
        if self._policy is CapturePolicy.off:
            return "policy off"
        if any(tensor.requires_grad for tensor in tensors):
            return "a batch wants a gradient"
        if key in self._refused:
            return "it cannot be captured"
        captured = [other for other, each in self._iterations.items() if other[0] == key[0] and each.graph is not None]
        if not captured or self._on_mismatch is MismatchPolicy.recapture:
            return None
        if self._on_mismatch is MismatchPolicy.eager:
            return "another key than those captured"
        differences = min((other[1].differences(key[1], "batch") for other in captured), key=len)
        raise InputMismatchError(
            "; ".join(differences),
            where=key[0],
            fix="give batches like the captured ones, or choose recapture or eager (on_mismatch)",
        )

    def _new(self, batch: Any, stats: RegionStats) -> _Iteration:
        self._modules.clear()  # Some may have been added or replaced.
        static = StaticInputs(batch, self._session.device)
        self._session.note_static(static)
        stats.static_bytes += static.nbytes
        return _Iteration(static, StepGradients(self._session.gradient_homes))

    def _make_room(self, new: tuple[str, Signature], *, captured: bool, number: int) -> None:
        """Forget keys, those used longest ago first, until ``number`` are left that have a graph, or that have none.

        They are counted apart: keys that are seen once do not push out graphs that are used.
        """
        keys = [key for key, each in self._iterations.items() if (each.graph is not None) is captured]
        for key in keys[: max(0, len(keys) - number)]:
            self._forget(key)
            self._session.stats(key[0], "iteration").num_evictions += captured
            self._given_up[key] = None
            if len(self._given_up) > _MOST_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
            if key[0] == new[0] and not captured:
                self._warn_of_many(key, new)

    def _warn_of_many(self, key: tuple[str, Signature], new: tuple[str, Signature]) -> None:
        """Once for each stage: when a key is given up before it was captured, or one that was given up comes back."""
        if new[0] in self._warned:
            return
        self._warned.add(new[0])
        differences = "; ".join(key[1].differences(new[1], "batch")[:_MOST_DIFFERENCES])
        warnings.warn(
            f"{new[0]} was called with more signatures than the {self._max_graphs} of max_graphs; those used longest "
            f"ago are given up, and run eagerly when they come back. Two of them differ: {differences}",
            stacklevel=5,
        )

    def _forget(self, key: tuple[str, Signature]) -> None:
        iteration = self._iterations.pop(key)
        stats = self._session.stats(key[0], "iteration")
        stats.static_bytes -= iteration.static.nbytes
        self._drop(iteration, stats)

    def _drop(self, iteration: _Iteration, stats: RegionStats) -> None:
        if iteration.graph is not None:
            self._session.release([iteration.graph.recording], stats)
        iteration.graph, iteration.observation, iteration.num_eager = None, None, 0
        if all(other.graph is None for other in self._iterations.values()):
            # Nothing writes them any more: gradients may live elsewhere from now on.
            self._session.gradient_homes.clear()
        iteration.gradients = StepGradients(self._session.gradient_homes)

    def _drop_if_changed(self, iteration: _Iteration, step: Step, stats: RegionStats) -> None:
        graph = iteration.graph
        if graph is None:
            return
        changed = graph.attributes.changed() or graph.optimizers.moved()
        if changed:
            self._drop(iteration, stats)
            iteration.why_eager = f"warmup after a change of {changed[0]}"
            self._count_recapture(iteration, step, changed[0], "keep it in a tensor on the device, or as it is")
            return
        numbers = graph.optimizers.refresh()
        if numbers:
            observation, gradients = iteration.observation, iteration.gradients.again()
            self._drop(iteration, stats)
            # What the step does is known. One run comes first, as another number may want state that is not there yet.
            iteration.observation, iteration.gradients = observation, gradients
            iteration.num_eager = self._warmup_of(step) - 1
            iteration.why_eager = f"warmup after a change of {numbers[0]} of an optimizer"
            what = f"{numbers[0]} of an optimizer"
            advice = "only the learning rate can follow a schedule inside of a graph"
            self._count_recapture(iteration, step, what, advice)

    @staticmethod
    def _count_recapture(iteration: _Iteration, step: Step, what: str, advice: str) -> None:
        iteration.num_recaptures += 1
        if iteration.num_recaptures == _WARNED_AFTER:
            warnings.warn(
                f"{step.stage} has been captured {_WARNED_AFTER + 1} times because {what} changes; {advice}",
                stacklevel=5,
            )

    def _learn_again(self, step: Step, iteration: _Iteration, batch: Any, stats: RegionStats, reason: str) -> Any:
        """Gradients are not as in the runs that were seen: run eagerly, and see what the step does with these."""
        stats.eager_calls[reason] += 1
        if iteration.gradients.knows_too_little():
            self._drop(iteration, stats)
            iteration.num_eager = self._warmup_of(step) - 1
            return self._warm_up(step, iteration, batch)
        return self.eager(step, batch)

    def _refuse(self, key: tuple[str, Signature], step: Step, batch: Any, stats: RegionStats, error: Exception) -> Any:
        # An error of the function's own comes again, from the eager run, if it has nothing to do with the capture.
        what = error.what if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
        self._forget(key)
        self._refused.add(key)
        warnings.warn(f"{step.stage} runs eagerly: {error}", stacklevel=3)
        return self._plainly(step, batch, stats, f"it cannot be captured: {what}")

    def _warmup_of(self, step: Step) -> int:
        """Eager runs before a capture: optimizers make their state in the first one."""
        least = least_warmup(step.modules, self._session.device)
        return max(self._warmup_steps, least, 1 if len(step.optimizers) else 0)

    # ----- eager

    def _plainly(self, step: Step, batch: Any, stats: RegionStats, reason: str) -> Any:
        stats.eager_calls[reason] += 1
        if self._policy is CapturePolicy.off:
            return step.function(to_device(batch, self._session.device))
        return self.eager(step, batch)

    def eager(self, step: Step, batch: Any) -> Any:
        """Run the step as it is, on the stream of the graphs."""
        with self._session.engine.capture_stream(), step.optimizers.on_device():
            return step.function(to_device(batch, self._session.device))

    def _warm_up(self, step: Step, iteration: _Iteration, batch: Any) -> Any:
        # On the capture stream and from the static inputs, so that what the libraries set up per stream and per
        # address is what the capture will find. The last one is watched: it is what the capture will repeat.
        with self._session.engine.capture_stream(), step.optimizers.on_device():
            iteration.static.load(batch)
            if iteration.num_eager + 1 < self._warmup_of(step):
                result = step.function(iteration.static.arguments)
            else:
                result = self._watch(step, iteration)
            result = iteration.static.copied_out(result)
        iteration.num_eager += 1
        return result

    def _watch(self, step: Step, iteration: _Iteration) -> Any:
        """Run the step for real, and learn what a capture of it has to know."""
        modules = self._all_modules(step)
        places = step.reads(iteration.static.arguments)
        attributes = Attributes(with_children(step.modules), places=places)
        flags = [module.training for module in modules]
        versions = iteration.static.versions()
        before = iteration.gradients.before(modules, step.optimizers.parameters())
        result, observation = self._session.watch_run(lambda: step.function(iteration.static.arguments))
        tensors, iteration.structure = flatten(result)
        iteration.gradients.learn(before, observation)
        where = f"{step.stage}, the captured function"
        iteration.refusal = None
        if iteration.static.versions() != versions:
            iteration.refusal = refused(where, *WRITES)
        elif [module.training for module in modules] != flags:
            iteration.refusal = refused(where, *SETS_FLAGS)
        elif any(tensor.requires_grad for tensor in tensors) and not iteration.gradients.are_filled():
            iteration.refusal = refused(where, *RETURNS_LOSS)
        else:
            try:
                attributes.refuse_changes(where, observation.externals, may_leave_losses=True)
            except CaptureError as error:
                iteration.refusal = error
        observation.forget_storages(
            torch_private.storage_key(home.tensor) for home in self._session.gradient_homes.values()
        )
        iteration.observation = observation
        return result

    # ----- capture and replay

    def _capture(self, step: Step, iteration: _Iteration, stats: RegionStats) -> _Graph:
        where = f"{stats.name}, the captured function"
        step.optimizers.require_capturable(where)
        if iteration.refusal is not None:
            raise iteration.refusal
        modules = with_children(step.modules)
        places = step.reads(iteration.static.arguments)
        if (in_the_way := parts_not_captured(modules, places, where)) is not None:
            self._drop(iteration, stats)  # What the runs so far have shown is not what later ones will do.
            raise in_the_way
        attributes = Attributes(modules, hooks_of=modules, parameters_of=modules, places=places)
        watched = self._session.watch(step.modules)
        gradients, observation = iteration.gradients, iteration.observation
        before = StepState(attributes.again(), self._all_modules(step), step.optimizers, places)
        try:
            if observation is None:
                observation = self._session.observe(lambda: step.function(iteration.static.arguments))
                attributes.refuse_changes(where, observation.externals, may_leave_losses=True)
            leaves = observation.leaves if step.fills_gradients else ()
            recording = self._record(step, iteration, stats, observation, leaves, where)
            try:
                with tensors_kept([watched], where=where):
                    tensors, structure = recording.result
                if iteration.structure is not None and structure != iteration.structure:
                    raise refused(where, *RETURNS_OTHERS)
            except CaptureError:
                self._session.release([recording], stats)
                raise
        except BaseException as error:
            watched.put_back()
            before.put_back()
            gradients.forget()
            if not isinstance(error, CaptureError) or not has_wrapper(modules, self._session.device):
                raise
            raise told_of_wrapper(error) from error
        attributes.ignore_changed()
        now = self._session.watch(step.modules, observation.leaves)
        return _Graph(recording, structure, tensors, now, attributes, step.optimizers.noted())

    def _record(
        self,
        step: Step,
        iteration: _Iteration,
        stats: RegionStats,
        observation: Observation,
        leaves: Sequence[Tensor],
        where: str,
    ) -> Recording:
        """Capture, twice if the first time shows that gradients are made anew in the step."""

        def run() -> tuple[list[Tensor], Node | Value]:
            result = step.function(iteration.static.arguments)
            iteration.gradients.collect()
            return flatten(result)

        lane = _LANE if self._use_single_mempool else (_LANE, step.stage)
        while True:
            iteration.gradients.ready(leaves, where)
            try:
                untimed = torch_private.no_data_parallel_timings(self._all_modules(step))
                with step.optimizers.captured(where), untimed:
                    recording = self._session.capture(stats, run, observation=observation, lane=lane)
                problem = iteration.gradients.problem()
                if problem is None:
                    iteration.gradients.keep()
                    return recording
                self._session.release([recording], stats)
            finally:
                iteration.gradients.put_back()
            if not iteration.gradients.take_as_made_anew():
                raise problem
            iteration.gradients.forget()

    def _replay(self, iteration: _Iteration, graph: _Graph, tensors: list[Tensor], stats: RegionStats) -> Any:
        # The copies run while the host checks; should it refuse, they have changed nothing but the graph's own inputs.
        iteration.static.load_tensors(tensors)
        verify(graph.watched, f"{stats.name}, before replay")
        guests = iteration.gradients.settle()
        graph.recording.replay()
        iteration.gradients.hand_out(guests)
        stats.num_replays += 1
        return unflatten(graph.structure, [tensor.detach().clone() for tensor in graph.tensors])
