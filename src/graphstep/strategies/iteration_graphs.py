"""Graphs of whole iterations: one for each stage and signature of the batch, captured after eager runs."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphstep.capture.attributes import Attributes
from graphstep.capture.manifest import verify
from graphstep.capture.observe import Observation
from graphstep.capture.reasons import EagerReason
from graphstep.capture.report import RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import StaticInputs, copies_of, to_device
from graphstep.capture.tree import Node, Value, flatten, unflatten
from graphstep.config.switches import CapturePolicy, MismatchPolicy
from graphstep.engine import Recording, torch_private
from graphstep.errors import CaptureError, InputMismatchError
from graphstep.strategies.gradient_threads import gradient_threads_watched
from graphstep.strategies.iteration_gradients import NotGatheredError, StepGradients
from graphstep.strategies.iteration_refusals import (
    OTHER_THREADS,
    RETURNS_OTHERS,
    is_wrapped,
    least_warmup,
    parts_not_captured,
    refused,
    told_of_clipping,
    told_of_wrapper,
    with_children,
)
from graphstep.strategies.iteration_state import Captured, Iteration, LastRun, Step
from graphstep.strategies.iteration_watch import watched_run
from graphstep.strategies.leaf_streams import SET_UP_AGAIN, LeafStreams
from graphstep.strategies.settled import tensors_kept
from graphstep.strategies.step_state import StepState

LANE: Final = "iterations"
"""Whole iterations share memory with each other, and not with graphs of parts of one, which others run between."""
_WARNED_AFTER = 3
"""Captures anew, after something has changed that a graph has fixed, from which on they are warned of."""
_MOST_LOOKS = 2
"""Eager runs more before a capture, after changes since the last one."""
_MOST_GIVEN_UP = 1000
_MOST_DIFFERENCES = 3


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
        gather_gradients: add gradients many at a time.
        parallel_gradients: have branches in the graph for gradients, and add them many at a time.
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
        gather_gradients: bool = False,
        parallel_gradients: bool = False,
    ) -> None:
        self._session = session
        self._gradients = partial(
            StepGradients,
            session.gradient_homes,
            gathers=gather_gradients or parallel_gradients,
            is_parallel=parallel_gradients,
        )
        self._use_single_mempool = use_single_mempool
        self._warmup_steps = warmup_steps
        self._max_graphs = max_graphs
        self._policy = policy
        self._on_mismatch = on_mismatch
        self._iterations: dict[tuple[str, Signature], Iteration] = {}
        """The one used last is the last one."""
        self._refused: set[tuple[str, Signature]] = set()
        """Keys that could not be captured."""
        self._given_up: dict[tuple[str, Signature], None] = {}
        """Keys that had to make room for others, those of the latest first to last."""
        self._warned: set[str] = set()
        """Stages whose users know that there are more keys than there is room for."""
        self._modules: dict[str, tuple[int, tuple[nn.Module, ...]]] = {}
        self._leaf_streams = LeafStreams(session)

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
        if iteration.graph is None and iteration.num_eager >= self._warmup_of(step):
            self._look_again_if_changed(iteration, step)
        if iteration.graph is None and iteration.num_eager < self._warmup_of(step):
            stats.eager_calls[iteration.why_eager] += 1
            return self._warm_up(step, iteration, batch)
        if iteration.graph is None:
            try:
                with self._session.timed(stats):
                    self._make_room(key, captured=True, number=self._max_graphs - 1)
                    iteration.static.load(batch)
                    iteration.graph = self._capture(step, iteration, stats)
                    iteration.num_looked_again = 0
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

    def _new(self, batch: Any, stats: RegionStats) -> Iteration:
        self._modules.clear()  # Some may have been added or replaced.
        static = StaticInputs(batch, self._session.device)
        self._session.note_static(static)
        stats.static_bytes += static.nbytes
        return Iteration(static, self._gradients())

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

    def _drop(self, iteration: Iteration, stats: RegionStats) -> None:
        if iteration.graph is not None:
            self._session.release([iteration.graph.recording], stats)
        iteration.graph, iteration.observation, iteration.last_run, iteration.num_eager = None, None, None, 0
        if not self._session.has_recordings:
            # Nothing writes them any more: gradients may live elsewhere from now on.
            self._session.gradient_homes.clear()
        iteration.gradients = self._gradients()

    def _drop_if_changed(self, iteration: Iteration, step: Step, stats: RegionStats) -> None:
        graph = iteration.graph
        if graph is None:
            return
        if graph.recording.is_closed:
            self._drop(iteration, stats)
            iteration.why_eager = "warmup after its memory was given up"
            return
        changed = graph.attributes.changed() or graph.optimizers.moved()
        if changed:
            self._drop(iteration, stats)
            iteration.why_eager = f"warmup after a change of {changed[0]}"
            advice = "keep it in a tensor on the device (graphstep.clip_grad_norm_ takes one), or as it is"
            self._count_recapture(iteration, step, changed[0], advice)
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
            advice = "learning rates, and most weight decays, follow a schedule inside of a graph; others do not"
            self._count_recapture(iteration, step, what, advice)

    def _look_again_if_changed(self, iteration: Iteration, step: Step) -> None:
        """What the last run has shown is not what a capture would do, if something has changed since."""
        last_run = iteration.last_run
        changed = last_run.changed() if last_run is not None else []
        if last_run and changed and (iteration.num_looked_again < _MOST_LOOKS or last_run.taking_part()):
            iteration.num_looked_again += 1
            iteration.num_eager = self._warmup_of(step) - 1
            iteration.why_eager = f"warmup after a change of {changed[0]}"
            if iteration.num_looked_again == _WARNED_AFTER:
                warnings.warn(
                    f"{step.stage} is not captured, because {changed[0]} changes between its calls", stacklevel=4
                )

    @staticmethod
    def _count_recapture(iteration: Iteration, step: Step, what: str, advice: str) -> None:
        iteration.num_recaptures += 1
        if iteration.num_recaptures == _WARNED_AFTER:
            warnings.warn(
                f"{step.stage} has been captured {_WARNED_AFTER + 1} times because {what} changes; {advice}",
                stacklevel=5,
            )

    def _learn_again(self, step: Step, iteration: Iteration, batch: Any, stats: RegionStats, reason: str) -> Any:
        """Gradients are not as in the runs that were seen: run eagerly, and see what the step does with these."""
        stats.eager_calls[reason] += 1
        # What runs no backward has nothing to do with gradients; it was only seen before there were any.
        is_evaluation = not step.fills_gradients or not torch.is_grad_enabled()
        if is_evaluation or iteration.gradients.knows_too_little():
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
        least = least_warmup(step.modules, self._session.device) if step.fills_gradients else 0
        return max(self._warmup_steps, least, 1 if len(step.optimizers) else 0)

    def _lane_of(self, step: Step) -> Hashable:
        return LANE if self._use_single_mempool else (LANE, step.stage)

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

    def _warm_up(self, step: Step, iteration: Iteration, batch: Any) -> Any:
        # On the capture stream and from the static inputs, so that what the libraries set up per stream and per
        # address is what the capture will find. The last one is watched: it is what the capture will repeat.
        def run() -> Any:
            if iteration.num_eager + 1 < self._warmup_of(step):
                return step.function(iteration.static.arguments)
            return watched_run(step, iteration, self._session, self._all_modules(step))

        is_set_up_again = False
        with self._session.engine.capture_stream(), step.optimizers.on_device():
            iteration.static.load(batch)
            if step.fills_gradients and torch.is_grad_enabled():
                parameters = step.optimizers.parameters()
                result, is_set_up_again = self._leaf_streams.run(run, self._all_modules(step), parameters)
            else:
                # Collectives hold memory for longer than their call.
                has_wrapper = is_wrapped(with_children(step.modules), self._session.device)
                lane = "" if has_wrapper else self._lane_of(step)
                result = self._session.engine.run_on_pool(run, lane=lane, copied=copies_of)
            result = iteration.static.copied_out(result)
        iteration.num_eager += 1
        if iteration.attributes is not None:
            modules = self._all_modules(step) if iteration.gradients.are_filled() else ()
            leaves = (p for module in modules for p in module._parameters.values() if p is not None)
            iteration.last_run = LastRun(iteration.attributes.again(), step.optimizers, leaves)
            iteration.attributes = None
        if is_set_up_again:
            self._warm_up_again()
        return result

    def _warm_up_again(self) -> None:
        """After DistributedDataParallel was set up again: what is not captured begins anew."""
        for each in self._iterations.values():
            if each.graph is None:
                each.num_eager, each.why_eager = 0, SET_UP_AGAIN

    # ----- capture and replay

    def _capture(self, step: Step, iteration: Iteration, stats: RegionStats) -> Captured:
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
                known = gradients.before(self._all_modules(step), step.optimizers.parameters())
                with gradient_threads_watched(each.leaf for each in known) as came_unseen:
                    observation = self._session.observe(lambda: step.function(iteration.static.arguments))
                if came_unseen():
                    raise refused(where, *OTHER_THREADS)
                attributes.refuse_changes(where, observation.externals, may_leave_losses=True)
                observation.forget_unheld()  # Such as what compiled code has made past the dispatcher.
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
            if self._leaf_streams.give_up_backward(module for _, module in modules):
                self._warm_up_again()
            if not isinstance(error, CaptureError):
                raise
            told = told_of_clipping(error)
            if is_wrapped(modules, self._session.device):
                told = told_of_wrapper(told, self._leaf_streams.problem)
            if told is error:
                raise
            raise told from error
        attributes.ignore_changed()
        # What gives no gradients computes the same whichever parameters are frozen.
        is_evaluation = iteration.last_run is not None and not gradients.are_filled() and not len(step.optimizers)
        now = self._session.watch(step.modules, observation.leaves, may_be_frozen=is_evaluation)
        return Captured(recording, structure, tensors, now, attributes, step.optimizers.noted())

    def _record(
        self,
        step: Step,
        iteration: Iteration,
        stats: RegionStats,
        observation: Observation,
        leaves: Sequence[Tensor],
        where: str,
    ) -> Recording:
        """Capture, twice if the first time shows that gradients are made anew in the step."""

        def run() -> tuple[list[Tensor], Node | Value]:
            with iteration.gradients.gathered(branch):
                result = step.function(iteration.static.arguments)
            iteration.gradients.collect()
            return flatten(result)

        while True:
            branch = self._session.engine.branch() if iteration.gradients.wants_branch else None
            iteration.gradients.ready(leaves, where, is_alone=not self._session.has_recordings)
            try:
                untimed = torch_private.no_data_parallel_timings(self._all_modules(step))
                with step.optimizers.captured(where), untimed:
                    recording = self._session.capture(stats, run, observation=observation, lane=self._lane_of(step))
                problem = iteration.gradients.problem()
                if problem is None:
                    iteration.gradients.keep()
                    return recording
                self._session.release([recording], stats)
            except NotGatheredError:
                continue
            finally:
                iteration.gradients.put_back()
            if not iteration.gradients.take_as_made_anew():
                raise problem
            iteration.gradients.forget()

    def _replay(self, iteration: Iteration, graph: Captured, tensors: list[Tensor], stats: RegionStats) -> Any:
        # The copies run while the host checks; should it refuse, they have changed nothing but the graph's own inputs.
        iteration.static.load_tensors(tensors)
        verify(graph.watched, f"{stats.name}, before replay")
        guests = iteration.gradients.settle()
        graph.recording.replay()
        iteration.gradients.hand_out(guests)
        stats.num_replays += 1
        return unflatten(graph.structure, [tensor.detach().clone() for tensor in graph.tensors])
