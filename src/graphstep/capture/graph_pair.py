"""Forward and backward recordings of one region, slot and signature, and the tensors at their seams."""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.capture.gradients import GradientHomes, Guests, has_gradient_hooks, hooks_off
from graphstep.capture.holders import Holders
from graphstep.capture.kept_state import KeptState
from graphstep.capture.lanes import Lane
from graphstep.capture.left_tensors import LeftTensors
from graphstep.capture.observe import Observation, training_flags_set
from graphstep.capture.parameter_aliases import ParameterAliases
from graphstep.capture.region import Region
from graphstep.capture.report import RegionStats
from graphstep.capture.results import (
    ResultForm,
    not_reached,
    parameters_behind,
    share_memory,
    with_memory_of_its_own,
)
from graphstep.capture.saved_tensors import (
    CreatedStorages,
    SavedTensors,
    poison,
    saved_storages,
    with_memory_of_their_own,
)
from graphstep.capture.session import GraphSession
from graphstep.capture.shared_copies import SharedCopy
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import refresh, refresh_gradients, static_like
from graphstep.capture.tree import flatten, unflatten
from graphstep.capture.warmup import warm_up
from graphstep.engine import Recording, torch_private

_hooks_of: Final = attrgetter("_backward_hooks")
_version_of: Final = attrgetter("_version")
BACKWARD_LANE: Final = "backward"
"""Memory of backward halves, all of it free after each replay but for what the next of the chain reads."""


class GraphPair:
    """The two halves and the tensors at their seams.

    NEW -> FORWARD -> READY: :func:`graphstep.capture.pair_capture.capture_forwards`, then ``capture_backwards``, in the
    order of the plan.
    Replays go through :class:`graphstep.capture.chain_run.ChainRun`.

    Args:
        region: what is captured.
        signature: of the captured call.
        inputs: argument tensors at fixed addresses, detached, requiring grad as in the call. Where ``chained``, they
            are found at capture.
        in_place: positions of inputs that belong to the model and are read where they are.
        session: owner of the recordings.
        stats: the region's counts.
        chained: positions of inputs that are outputs of other pairs: those pairs, and which output. Nothing is copied
            there, and the gradients are handed on without a copy.
        through_autograd: identities of parameters whose gradients autograd accumulates: those that are used outside
            the region too, so that their parts are summed in the order of eager execution. Parameters with hooks on
            their gradient are treated so without being named.
        lane: memory that the forward half shares with others, see the engine.
        backward_lane: memory that the backward half shares with others: all of it is free after each replay, except
            the gradients that the next backward of the chain reads.
        poisons: overwrite static memory by NaN when nobody should read it any more.
    """

    def __init__(
        self,
        region: Region,
        signature: Signature,
        inputs: Sequence[Tensor],
        in_place: frozenset[int],
        session: GraphSession,
        stats: RegionStats,
        *,
        chained: Mapping[int, tuple[GraphPair, int]] | None = None,
        through_autograd: Container[int] = frozenset(),
        lane: Hashable = 0,
        backward_lane: Hashable = BACKWARD_LANE,
        poisons: bool = False,
    ) -> None:
        self.region, self.signature = region, signature
        self.inputs, self.in_place = list(inputs), in_place
        self.chained = dict(chained or {})
        self.session, self.stats = session, stats
        self.outputs: list[Tensor] = []
        self.grad_outputs: list[Tensor | None] = []
        self.grad_inputs: list[Tensor | None] = []
        self.homes = GradientHomes(session.gradient_homes)
        self.poisons = poisons
        self.lane = Lane()
        """Where its forward half lies."""
        self.forward_position = self.backward_position = 0
        """Places in the order of capture."""
        self.num_in_flight = 0
        """Runs with a forward of this pair whose backward may still come: 0 or 1."""
        self.num_replays = self.static_bytes = 0
        self.copies_results = False
        """Callers get copies of the results, and may keep them."""
        self.owner: object = None
        """Whoever replays it; for their use."""
        self.shared_copies: list[tuple[int, SharedCopy]] = []
        """By position: static inputs that pairs of other chains read as well."""
        self.takes_all_gradients = False
        """Every result has a place for its gradient."""
        self._reached: list[set[int]] = []
        """For each output, if there are several, the parameters behind it."""
        self.saved_inputs: list[int] = []
        """Positions of those of ``chained`` that the backward half reads again."""
        self._is_saved: list[bool] = []
        """For each output, whether autograd needs it for the backward half."""
        self.shared_results: set[int] = set()
        """Outputs of which a write into one changes another one, and autograd would not know."""
        self._is_own: list[bool] = []
        """For each output, whether the recording made its memory; known where it is poisoned."""
        self.form = ResultForm(())
        self.differentiable: tuple[bool, ...] = ()
        """For each output, whether it has a gradient."""
        self.forward: Recording | None = None
        """Launched at the call of this pair; ``None`` if the pair before launches both."""
        self.backward: Recording | None = None
        """Launched at the backward of this pair; ``None`` if the pair after it launches both."""
        self._through_autograd = through_autograd
        self.forward_lane, self.backward_lane = lane, backward_lane
        """Keys of the memory that each half is recorded in."""
        self.is_forward_captured = self.is_backward_captured = False
        self.accumulated: list[Tensor] = []
        """Parameters whose gradients are accumulated inside the backward recording."""
        self.exposed: list[Tensor] = []
        """Their gradients are results of the backward recording, and autograd accumulates them."""
        self.exposed_gradients: list[Tensor | None] = []
        self.left = LeftTensors()
        self.kept: KeptState | None = None
        """What it writes, as it was before its latest launch, if it may run before it is called."""
        self._holders: Holders | None = None
        self.observation = Observation()
        """What the warmup has found."""
        self.known_storages: set[int] = set()
        """Those with an owner who is asked elsewhere."""
        self._aliases = ParameterAliases(region.modules)
        self._saved = SavedTensors()

    def static_tensors(self) -> list[Tensor]:
        """Inputs that are copied to before each replay."""
        elsewhere = {*self.in_place, *self.chained}
        return [tensor for position, tensor in enumerate(self.inputs) if position not in elsewhere]

    # ----- capture

    def warm_up(self, num_runs: int) -> None:
        """Run both halves eagerly and learn which parameters and generators they use. See :func:`warm_up`."""
        inputs = [
            static_like(layout) if position in self.chained else tensor
            for position, (layout, tensor) in enumerate(zip(self.signature.layouts, self.inputs, strict=True))
        ]
        self._share_repeated(inputs)
        trained, observation = warm_up(
            self.region, self.signature, inputs, self.session, num_runs=num_runs, aliases=self._aliases
        )
        self._learn(trained, observation)
        self.known_storages = set(map(torch_private.storage_key, [*inputs, *self.region.tensors()]))

    def warm_up_as(self, other: GraphPair) -> None:
        """Take over what the warmup of another pair of the variant has found."""
        self._learn(other.trained, other.observation)
        self.known_storages = other.known_storages

    def _learn(self, trained: Sequence[Tensor], observation: Observation) -> None:
        self.observation = observation
        self.exposed = [leaf for leaf in trained if id(leaf) in self._through_autograd or has_gradient_hooks(leaf)]
        exposed = {id(leaf) for leaf in self.exposed}
        self.accumulated = [leaf for leaf in trained if id(leaf) not in exposed]
        self.homes.add(self.accumulated)

    def _bind_chained(self) -> None:
        """Read the arguments where the pairs before have their results."""
        for position, (source, output) in self.chained.items():
            needs_grad = self.signature.layouts[position].requires_grad
            self.inputs[position] = source.outputs[output].detach().requires_grad_(needs_grad)
        self._share_repeated(self.inputs)

    def _share_repeated(self, inputs: list[Tensor]) -> None:
        """One tensor for arguments that were one tensor in the call."""
        for position, first in self.signature.repeated:
            inputs[position] = inputs[first]

    def run_forward(self) -> Any:
        """Run the forward half while it is recorded, and learn what its seams are."""
        if self.kept is not None:
            self.kept.keep()
        with self._aliases.installed(), self.left.noted(self):
            return self._run_forward()

    def note_forward(self, recording: Recording | None) -> None:
        """The forward half is captured; ``None``: together with that of the pair before."""
        self.forward, self.is_forward_captured = recording, True
        self.session.note_static(self)
        self.differentiable = tuple(output.requires_grad for output in self.outputs)

    def note_backward(self, recording: Recording | None) -> None:
        """The backward half is captured; ``None``: together with that of the pair after."""
        self.backward, self.is_backward_captured = recording, True
        self.takes_all_gradients = all(gradient is not None for gradient in self.grad_outputs)
        self._let_go_forward()

    def _run_forward(self) -> Any:
        self._bind_chained()
        with self._saved.noted() if self.poisons else nullcontext():
            result = self._call(self.inputs)
        owned = [p for module in self.region.modules for p in module._parameters.values() if p is not None]
        result = with_memory_of_its_own(result, [*self.inputs, *owned])
        self.outputs, self.form = flatten(result)[0], ResultForm(result)
        if len(self.outputs) > 1 and not self.observation.saves_by_hooks:
            self._reached = parameters_behind(self.outputs, self._aliases)
        # Looking at what was saved would start a recompute.
        saved = None if self.observation.saves_by_hooks or self.poisons else saved_storages(self.outputs)
        self.saved_inputs = [n for n in self.chained if not saved or torch_private.storage_key(self.inputs[n]) in saved]
        self._is_saved = [saved is None or torch_private.storage_key(output) in saved for output in self.outputs]
        self.shared_results = share_memory(self.outputs)
        self._is_own = [output in self._saved.created for output in self.outputs]
        return result

    def not_reached_from(self, given: Sequence[Tensor | None], following: GraphPair | None) -> list[Tensor]:
        """See :func:`not_reached`; ``following`` gives gradients to its arguments, which are results of this pair."""
        if not self._reached:
            return []
        handed = [output for _, output in following.chained.values()] if following is not None else ()
        return not_reached(self.trained, self._reached, given, handed)

    def run_backward(self) -> list[Tensor | None]:
        """Run the backward half while it is recorded; gives the gradients of inputs and of what autograd is to add."""
        outputs = [output for output, g in zip(self.outputs, self.grad_outputs, strict=True) if g is not None]
        given = [gradient for gradient in self.grad_outputs if gradient is not None]
        repeated = {position for position, _ in self.signature.repeated}  # Their first one has the whole gradient.
        wants = [tensor.requires_grad and index not in repeated for index, tensor in enumerate(self.inputs)]
        wanted_inputs = [tensor for tensor, is_wanted in zip(self.inputs, wants, strict=True) if is_wanted]
        exposed = [self._aliases.current_leaf(parameter) for parameter in self.exposed]
        accumulated = [self._aliases.current_leaf(parameter) for parameter in self.accumulated]
        wanted = [*wanted_inputs, *exposed]
        created = CreatedStorages()
        # As in a backward after the forward's modes have ended, whatever call has led to the capture.
        with hooks_off(exposed), torch.autocast(self.session.device.type, enabled=False), created:
            gradients = torch_private.gradients(outputs, [*wanted, *accumulated], given)
        self.homes.accumulate(self.accumulated, gradients[len(wanted) :])
        gradients = tuple(with_memory_of_their_own(gradients[: len(wanted)], created))
        found = iter(gradients)
        self.grad_inputs = [next(found) if is_wanted else None for is_wanted in wants]
        self.exposed_gradients = list(found)
        self._saved.poison(keep=[*self.inputs, *self.outputs, *gradients])
        return list(gradients)

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        with self.signature.ambient.entered(self.session.device.type):
            arguments, named = unflatten(self.signature.structure, inputs)
            return self.region.function(*arguments, **named)

    # Seam tensors whose memory the rest of the plan may use again become views that do not own it.

    def _let_go_forward(self) -> None:
        """Stop owning all that autograd saved. The outputs stay: a caller may hold them until the next replay."""
        self.outputs = [output.detach() for output in self.outputs]
        for position in self.chained:
            needs_grad = self.inputs[position].requires_grad
            self.inputs[position] = self.inputs[position].detach().requires_grad_(needs_grad)
        self._share_repeated(self.inputs)
        borrow = self.session.engine.borrowed_view
        self.exposed_gradients = [None if g is None else borrow(g) for g in self.exposed_gradients]
        self._aliases = ParameterAliases(())
        self._saved = SavedTensors()

    def let_go_grad_inputs(self) -> None:
        """Stop owning the gradients of the inputs: what reads them in the chain is captured."""
        borrow = self.session.engine.borrowed_view
        self.grad_inputs = [None if g is None else borrow(g) for g in self.grad_inputs]

    def let_go_grad_outputs(self) -> None:
        """Stop owning the gradients of the outputs."""
        borrow = self.session.engine.borrowed_view
        self.grad_outputs = [None if g is None else borrow(g) for g in self.grad_outputs]

    def release(self) -> None:
        """Close what is captured. Results that callers hold stay as they are."""
        # The recordings may have held these results, and those that they read.
        held = [(each, each.now()) for each in (self.holders, *(source.holders for source in self.sources()))]
        self.session.release([each for each in (self.forward, self.backward) if each is not None], self.stats)
        self.stats.static_bytes -= self.static_bytes
        self.left.forget()
        for position in self.chained:
            self.inputs[position] = torch.empty(0)
        for holders, before in held:
            holders.lost(before)

    # ----- replay

    @property
    def is_pure(self) -> bool:
        """True if the region changes no state: it may run although nobody asks for its result, and run again."""
        return self.observation.is_pure

    @property
    def runs_again(self) -> bool:
        """True if it may run again for its gradients, and leave no trace."""
        return self.is_pure or self.kept is not None

    def run_ahead(self) -> bool:
        """After the warmup: prepare a launch before the call. False if what that would do cannot be undone."""
        if not self.is_pure and self.kept is None:
            self.kept = KeptState.of(self)
        return self.runs_again

    @property
    def is_ready(self) -> bool:
        """True once both halves are captured."""
        return self.is_forward_captured and self.is_backward_captured

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that get a gradient."""
        return [*self.accumulated, *self.exposed]

    def accumulate_eagerly(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of such a parameter as autograd would."""
        self.homes.accumulate_eagerly(parameter, gradient)
        for hook in torch_private.post_accumulate_hooks(parameter):
            hook(parameter)

    @property
    def accumulates(self) -> bool:
        """True if the backward half adds to gradients by itself."""
        return bool(self.accumulated)

    def is_held(self) -> bool:
        """True if somebody still holds a result of an earlier replay, which the next one would overwrite.

        The first call comes before any replay: those who hold them then do not count.
        """
        return self.holders.are_more()

    @property
    def holders(self) -> Holders:
        """Who holds the results. First asked for before any replay."""
        if self._holders is None:
            self._holders = Holders(self.outputs)
        return self._holders

    def lost_tensors(self) -> list[str]:
        """Tensors that the recordings read and whose owner has let go of them, in words; for debugging."""
        return [f"{text}, read by {self.region.name}" for text in self.observation.lost_tensors(self.known_storages)]

    def has_new_hook(self) -> bool:
        """True if a parameter got a hook on its gradient, which the recording would not run."""
        return any(map(_hooks_of, self.accumulated))

    def moved_inputs(self, tensors: Sequence[Tensor]) -> bool:
        """True if an input that is read in place is not where it was captured."""
        return any(tensors[position].data_ptr() != self.inputs[position].data_ptr() for position in self.in_place)

    def sources(self) -> set[GraphPair]:
        """The pairs whose results this one reads where they are."""
        return {source for source, _ in self.chained.values()}

    def overwrites_what_is_in_use(self, tensors: Sequence[Tensor]) -> bool:
        """True if an argument had to be copied over the result of another pair, where that must not run now.

        Or over another argument that pairs in flight share with this one.
        """
        if any(copy.is_needed_with_others(tensors[position]) for position, copy in self.shared_copies):
            return True
        return any(
            tensors[position].data_ptr() != self.inputs[position].data_ptr()
            and (source.is_held() or not source.lane.allows(source.forward_position))
            for position, (source, _) in self.chained.items()
        )

    def load_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Refresh the static inputs, where they are not the same memory already."""
        for static, given in zip(self.inputs, tensors, strict=True):
            if static.data_ptr() != given.data_ptr():
                refresh(static, given)
        for position, copy in self.shared_copies:
            copy.note(tensors[position])

    def launch_forward(self) -> None:
        """Replay the forward half, unless the pair before has launched it with its own."""
        if self.forward is not None:
            self.forward.replay()
            self.stats.num_launches += 1
        if self.left.places:
            self.left.renew()
        # Anything that autograd saved from the last replay's outputs is now stale; autograd checks versions.
        torch.autograd.graph.increment_version(self.outputs)

    def recompute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the region eagerly on its static inputs, or on what another one made; returns its outputs, flat."""
        kept = self.kept.put_back() if self.kept is not None else nullcontext()
        with self.left.put_back(), training_flags_set(self.region.modules, self.signature.training), kept:
            return flatten(self._call(inputs))[0]

    def load_output_gradients(self, gradients: Sequence[Tensor | None], *, is_chained: bool) -> None:
        """Refresh the gradients of the outputs.

        Args:
            gradients: what autograd gives, each or ``None``.
            is_chained: the next pair of the chain has just left its gradients in place; others are added to them.
        """
        refresh_gradients(self.grad_outputs, gradients, adds=is_chained)

    @property
    def landmark(self) -> Tensor | None:
        """A parameter whose gradient the backward half accumulates, without hooks that autograd would run."""
        first = self.accumulated[:1]
        return first[0] if first and not torch_private.any_post_accumulate_hooks(first) else None

    def gets_unknown(self, given: Sequence[Tensor | None]) -> bool:
        """True if a result has a gradient for which the backward half has no place."""
        return not self.takes_all_gradients and any(
            g is not None and place is None for g, place in zip(given, self.grad_outputs, strict=False)
        )

    def misses_some(self, given: Sequence[Tensor | None]) -> bool:
        """True if a result has no gradient although it had one at the capture."""
        return any(g is None and place is not None for g, place in zip(given, self.grad_outputs, strict=False))

    def launch_backward(self, guests: Guests) -> None:
        """Replay the backward half, unless the pair after has launched it with its own; then run what follows."""
        if self.backward is not None:
            self.backward.replay()
            self.stats.num_launches += 1
        self._have_accumulated(self.accumulated, guests)

    def _have_accumulated(self, parameters: Sequence[Tensor], guests: Guests) -> None:
        if guests:
            self.homes.hand_out(guests)
        if torch_private.any_post_accumulate_hooks(parameters):
            for parameter in parameters:
                # One that moves `.grad` to `main_grad` finds None there: the recording added to `main_grad` itself.
                for hook in torch_private.post_accumulate_hooks(parameter):
                    hook(parameter)

    def versions(self) -> list[int]:
        """Of the outputs: they tell whether somebody writes into them."""
        return list(map(_version_of, self.outputs))

    def spoilt(self, versions: Sequence[int], read_by_next: Collection[int]) -> bool:
        """True if a result that the backward halves read was written into since it had these versions."""
        pairs = enumerate(zip(versions, self.versions(), self._is_saved, strict=True))
        return any(
            before != after and (is_saved or index in read_by_next) for index, (before, after, is_saved) in pairs
        )

    def poison_dead(self) -> None:
        """Overwrite what nobody should read after the backward: results that no caller holds."""
        if self.poisons and not self.is_held():
            poison(output for output, is_own in zip(self.outputs, self._is_own, strict=True) if is_own)
