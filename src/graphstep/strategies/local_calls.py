"""The calls of one captured region: which pair serves them, or why none does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from graphstep.capture.ambient import ambient_key
from graphstep.capture.attributes import Attributes
from graphstep.capture.chain import Chain, Receiver
from graphstep.capture.chain_run import ChainRun
from graphstep.capture.fast_check import FastCheck
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.pending import Pending
from graphstep.capture.plan import PlanObserver
from graphstep.capture.reasons import EagerReason
from graphstep.capture.region import Region
from graphstep.capture.report import RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.tree import flatten
from graphstep.config import MismatchPolicy
from graphstep.engine import torch_private
from graphstep.errors import CaptureError, InputMismatchError
from graphstep.native.interface import Call, Facts
from graphstep.strategies.capture_failures import OR_EAGERLY
from graphstep.strategies.local_observed import ObservedCalls, is_subclassed
from graphstep.strategies.sure_starts import Start

_training_of: Final = attrgetter("training")
_wants_gradient: Final = attrgetter("requires_grad")
_OBSERVED: Final = frozenset(
    {
        EagerReason.NOT_CAPTURED_YET,
        EagerReason.OTHER_SIGNATURE,
        EagerReason.MORE_IN_FLIGHT,
        EagerReason.OUT_OF_ORDER,
        EagerReason.WRITTEN_BETWEEN,
        EagerReason.TOO_MANY_SIGNATURES,
        EagerReason.CHANGED_ATTRIBUTE,
    }
)
"""Reasons that a further capture can remove."""
_OBSERVED_ONCE: Final = frozenset({EagerReason.RESULT_HELD, EagerReason.PLACE_IN_USE})
"""Reasons that a second slot removes, for a loop that lets go of a result when it has the next."""

_REFUSED: Final[Mapping[EagerReason | None, tuple[str, str]]] = {
    EagerReason.RECOMPUTE: (
        "this region is called in activation recompute (torch.utils.checkpoint) or under other hooks on saved "
        "tensors: they work on what autograd saves, and a replay saves nothing",
        "use the reentrant form (use_reentrant=True), which replays when it computes again; or a checkpoint "
        "without dropout inside the region",
    ),
    EagerReason.CACHED_WEIGHTS: (
        "this region is called within parametrize.cached(): calls share weights that are computed outside of them, "
        "and a replay computes its own",
        "leave parametrize.cached() out around the captured modules, or leave these out of the captured ones",
    ),
}
"""What is wrong, and the fix, for reasons that concern the call and no signature of it."""


class Host(Protocol):
    """What a region needs of the one who captures it."""

    session: GraphSession
    observed: ObservedCalls
    on_mismatch: MismatchPolicy
    device_type: str
    is_debugging: bool
    is_data_parallel: bool
    is_required: bool

    @property
    def is_capturing(self) -> bool:
        """True while regions are captured: their functions run as they are."""

    def before_call(self) -> bool:
        """A call begins: capture what is due. True if :meth:`verify` is due as well."""

    def data_parallel_found(self) -> None:
        """A call came through DistributedDataParallel, of which nothing was known."""

    def observed_call(self) -> PlanObserver | None:
        """The one who is told of a call that runs eagerly, if anybody is."""

    def open_run(self, chain: Chain, index: int, *, is_verified: bool = False) -> ChainRun:
        """A run that begins with this pair of a chain, in flight from now on.

        Args:
            is_verified: nothing that the chain reads has moved, or each of its calls will look.
        """

    def not_replayed(self, calls: RegionCalls, reason: EagerReason) -> Callable[..., Any]:
        """No chain can serve a call, for this reason. Returns what runs instead."""

    def verify(self) -> None:
        """Refuse to go on if something moved."""


@dataclass(slots=True, eq=False)
class Generation:
    """What was captured of a region while the attributes of its modules had certain values."""

    attributes: Attributes
    links: dict[Signature, list[tuple[Chain, int]]] = field(default_factory=dict)
    is_settled: bool = False
    """Attributes that the region sets itself are left out."""


class RegionCalls:
    """The calls of one region: observed, replayed, or eager with a counted reason."""

    def __init__(
        self, region: Region, modules: Sequence[tuple[str, nn.Module]], host: Host, stats: RegionStats
    ) -> None:
        self.region = region
        self.stats = stats
        self.pending: Pending | None = None
        """Of a run that expects this region to be called next."""
        self.entry: Call | None = None
        """Where there is a compiled part: what is called in place of this, and looks at the common case."""
        self.starts: tuple[Start, ...] = ()
        """And the calls that it knows to begin a run."""
        self.generations: list[Generation] = []
        """What was captured, by the values that attributes had then."""
        self.current: Generation | None = None
        """The one that is as things are now."""
        self.why_not: EagerReason = EagerReason.NOT_CAPTURED_YET
        """Why nothing is captured."""
        self.manual_hook: Callable[[], object] | None = None
        """Called before each replay."""
        self.is_full = False
        """No further signature is captured without giving one up."""
        self._modules = modules
        self._parameters = region.parameters()
        self._place: FastCheck | None = None
        """Where weights and buffers were at the capture: one may get other memory between two layers."""
        self._host = host
        self._device_type = host.device_type
        self._is_debugging = host.is_debugging
        self._changed = ""
        self._was_written = False
        """What it reads was written after the launch of the graph that holds this call."""
        self._not_trained: tuple[bool, ...] | None = None
        """Which parameters wanted a gradient when no call had one; ``None`` if that is not why nothing is captured."""
        self._has_warned = False
        self._mismatched: Signature | None = None

    @property
    def links(self) -> dict[Signature, list[tuple[Chain, int]]]:
        """For each signature captured as things are now: its chains, one a slot, and the place of this region there."""
        return self.current.links if self.current is not None else {}

    @property
    def is_captured(self) -> bool:
        """True if there are graphs for anything."""
        return any(generation.links for generation in self.generations)

    def all_links(self) -> Iterator[tuple[Chain, int]]:
        """All chains that have a pair of this region, and its place there."""
        for generation in self.generations:
            for links in generation.links.values():
                yield from links

    def pairs(self) -> list[GraphPair]:
        """All pairs of this region."""
        return [chain.pairs[index] for chain, index in self.all_links()]

    def note_attributes(self) -> Attributes:
        """Before a capture: note what Python reads besides tensors, unless it is as at an earlier one."""
        if self.current is None:
            # Hooks of the layer itself run around it; those of parameters run whoever computes the gradient.
            self.current = Generation(Attributes(self._modules, hooks_of=self._modules[1:]))
            self.generations.append(self.current)
            self._changed = ""
        return self.current.attributes

    def captured(self) -> None:
        """After a capture: leave out attributes that the region sets itself, and generations without graphs."""
        if self.current is not None and not self.current.is_settled:
            self.current.attributes.ignore_changed()
            self.current.is_settled = True
        self._parameters = self.region.parameters()
        self._place = FastCheck(self.region.containers(), self.region.tensors())
        self.generations = [each for each in self.generations if each.links]
        if self.current is not None and not self.current.links:
            self.current = None

    def has_no_gradient(self) -> None:
        """Its calls reach no backward: run eagerly until parameters are frozen or thawed."""
        self.why_not = EagerReason.NO_GRADIENT
        self._not_trained = tuple(map(_wants_gradient, self._parameters))

    def forget(self, reason: EagerReason) -> None:
        """Let go of all pairs and run eagerly."""
        self.expect_nothing()
        self.starts = ()
        self.generations, self.current, self.why_not = [], None, reason

    def expect(self, pending: Pending) -> None:
        """Wait for the call that is described, and for no other one."""
        if self.entry is not None:
            self.entry.drop()
        self.pending = pending

    def expect_nothing(self) -> None:
        """End the run that waits for a call of this region, if there is one."""
        if self.entry is not None:
            self.entry.drop()
        if self.pending is not None:
            self.pending.drop()

    def resume(self, *state: Any) -> None:
        """Take over from the compiled part: see :meth:`Pending.resumed`."""
        Pending.resumed(*state)

    def add_facts(self, facts: Facts, pair: GraphPair) -> bool:
        """Have the compiled part look at all that a replay of this pair needs of the modules. False if it cannot."""
        owner = pair.owner
        if self._is_debugging or self._place is None or not isinstance(owner, Generation):
            return False
        if not owner.attributes.add_to(facts):
            return False
        self._place.add_to(facts, may_be_frozen=True)
        for module, is_training in zip(self.region.modules, pair.signature.training, strict=True):
            facts.entry(module.__dict__, "training", is_training)
        for parameter, is_wanted in zip(self._parameters, pair.signature.trainable, strict=True):
            facts.tensor(parameter, parameter.data_ptr(), int(is_wanted), False, False)
        return True

    def look_at_attributes(self) -> None:
        """Find the graphs that were captured with attributes as they are now: those may change between two layers."""
        if not self.generations or (self.current is not None and self.current.attributes.hold()):
            return
        if self.current is not None and not self.current.attributes.changed():
            self._changed = ""
            return
        changed = self.generations[-1].attributes.changed()
        fitting = [each for each in self.generations if not each.attributes.changed()]
        self.current = fitting[-1] if fitting else None
        self._changed = changed[0] if changed and not fitting else ""

    def is_as_for(self, pair: GraphPair) -> bool:
        """True if a pair was captured with frozen parameters as they are, and attributes as at the last call or now."""
        if pair.owner is not self.current:
            self.look_at_attributes()
        return pair.owner is self.current and tuple(map(_wants_gradient, self._parameters)) == pair.signature.trainable

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the region on its arguments."""
        pending = self.pending
        if pending is not None:
            self.pending = None
            self.look_at_attributes()
            place = self._place
            is_in_place = place is not None and place.is_in_place() and place.is_laid_out_so()
            if not is_in_place and pending.pair.forward is not None:
                self._host.verify()  # Nobody has looked at it since the last step.
            is_as_launched = is_in_place and not pending.has_run_on_old()
            if (
                pending.matches(arguments, named)
                and pending.ambient == ambient_key(self._device_type)
                and tuple(map(_training_of, self.region.modules)) == pending.training
                and tuple(map(_wants_gradient, self._parameters)) == pending.trainable
                and pending.pair.owner is self.current
                and not pending.pair.has_new_hook()
                and not torch_private.saved_tensors_are_taken()
                and not torch_private.weights_are_cached()
                and is_as_launched
            ):
                if self._is_debugging:
                    self._host.verify()
                if self.manual_hook is not None:
                    self.manual_hook()
                return pending.advance()
            self._was_written = not is_as_launched
            pending.drop()
        return self._start(arguments, named)

    def _start(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        host = self._host
        if host.is_capturing:
            return self.region.function(*arguments, **named)
        host.session.settle_ahead()
        reason = never_replayed()
        if reason is None and torch_private.weights_are_cached() and self.region.is_parametrized:
            reason = EagerReason.CACHED_WEIGHTS
        if reason in _REFUSED and not self._has_warned:
            self._refuse(*_REFUSED[reason])
        if reason is not None:
            return self._eager(reason, arguments, named)
        if torch_private.data_parallel_is_active() and not host.is_data_parallel:
            host.data_parallel_found()
        is_due = host.before_call()
        found = self._surely_starts(arguments, named)
        if found is not None:
            start, given = found
            if is_due and not start.is_watched:
                host.verify()
            if self.manual_hook is not None:
                self.manual_hook()
            ambient = start.chain.pairs[start.index].signature.ambient.key
            run = host.open_run(start.chain, start.index, is_verified=start.is_watched)
            return run.start(given, arguments, named, ambient)
        if is_due:
            host.verify()
        self.look_at_attributes()
        if self._is_debugging:
            host.verify()
        tensors, _ = flatten((arguments, named))
        if not host.is_required and any(tensor.layout is not torch.strided for tensor in tensors):
            return self._eager(EagerReason.OTHER_SIGNATURE, arguments, named)
        if not self.generations:
            self._parameters = self.region.parameters()
        signature = Signature.of(
            (arguments, named),
            device_type=host.device_type,
            modules=self.region.modules,
            trainable=tuple(map(_wants_gradient, self._parameters)),
        )
        return self._replayed(signature, tensors, arguments, named)

    def _surely_starts(
        self, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Start, tuple[Tensor, ...]] | None:
        """What surely serves a call with these arguments, and their tensors; ``None``: look closer."""
        for start in self.starts:
            tensors = start.pattern.flat(arguments, named)
            if tensors is not None:
                return (start, tensors) if start.facts.hold() and start.is_free(tensors) else None
        return None

    def _replayed(
        self,
        signature: Signature,
        tensors: Sequence[Tensor],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Replay the call, or run it eagerly for a reason."""
        host = self._host
        links = self.links.get(signature)
        if links is not None and any(map(is_subclassed, tensors)):
            return self._eager(EagerReason.OTHER_SIGNATURE, arguments, named)
        if links is None:
            reason = self._why_no_signature(signature)
        else:
            reasons = []
            for chain, index in links if len(links) == 1 else _nearest_first(links, tensors):
                found = _why_not(chain, index, tensors)
                if found is None:
                    if self.manual_hook is not None:
                        self.manual_hook()
                    return host.open_run(chain, index).start(tensors, arguments, named, signature.ambient.key)
                reasons.append(found)
            if self._was_written and EagerReason.OUT_OF_ORDER in reasons:
                reasons.insert(0, EagerReason.WRITTEN_BETWEEN)
            self._was_written = False
            # Of a slot in flight there is nothing to say if another one was free.
            reason = next((each for each in reasons if each is not EagerReason.MORE_IN_FLIGHT), reasons[0])
        is_worth_it = reason in _OBSERVED or (reason in _OBSERVED_ONCE and links is not None and len(links) == 1)
        observer = host.observed_call() if is_worth_it else None
        if observer is not None:
            return self._observed(observer, reason, signature, tensors, arguments, named)
        return self._eager(reason, arguments, named)

    def _refuse(self, what: str, fix: str) -> None:
        error = CaptureError(what, where=self.region.name, fix=fix + OR_EAGERLY * self._host.is_required)
        if self._host.is_required:
            raise error
        self._has_warned = True
        warnings.warn(f"{self.region.name} runs eagerly: {error}", UserWarning, stacklevel=4)

    def _why_no_signature(self, signature: Signature) -> EagerReason:
        if self._changed and self.is_captured:
            self.stats.last_detail = self._changed
            return EagerReason.CHANGED_ATTRIBUTE
        if not self.links:
            is_no_gradient = self.why_not is EagerReason.NO_GRADIENT
            if is_no_gradient and self._not_trained not in (None, signature.trainable):
                self.why_not = EagerReason.NOT_CAPTURED_YET
            return self.why_not
        nearest = min(self.links, key=lambda captured: len(captured.differences(signature)))
        if all(captured.training != signature.training for captured in self.links):
            return EagerReason.EVALUATION
        if self._mismatched != signature:
            self._mismatched = signature
            self.stats.last_mismatch = tuple(nearest.differences(signature, "call"))
        if self._host.on_mismatch is MismatchPolicy.error:
            raise InputMismatchError(
                "; ".join(self.stats.last_mismatch),
                where=self.region.name,
                fix="give it what it was captured for, or let other inputs run eagerly or be captured as well: "
                "--cuda-graph-on-mismatch eager or recapture",
            )
        return EagerReason.TOO_MANY_SIGNATURES if self.is_full else EagerReason.OTHER_SIGNATURE

    def _eager(self, reason: EagerReason, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        function = self._host.not_replayed(self, reason)
        self.stats.eager_calls[reason] += 1
        return function(*arguments, **named)

    def _observed(
        self,
        observer: PlanObserver,
        reason: EagerReason,
        signature: Signature,
        tensors: Sequence[Tensor],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        if reason is EagerReason.NOT_CAPTURED_YET:
            reason = EagerReason.OBSERVED
        self.stats.eager_calls[reason] += 1
        taken = {chain.slot for chain, _ in self.links.get(signature, ())}
        call, arguments, named = self._host.observed.begin(observer, self, signature, tensors, arguments, named, taken)
        begins_at = [tensor.grad_fn for tensor in tensors]
        result = self.region.function(*arguments, **named)
        call.returned(flatten(result)[0], begins_at)
        return result


def never_replayed() -> EagerReason | None:
    """Why no call can be replayed now, whatever it is; ``None`` if it may be."""
    if not torch.is_grad_enabled():
        return EagerReason.EVALUATION
    if torch_private.saved_tensors_are_taken():
        # Recompute and offloading work on what autograd saves; a replay saves nothing.
        return EagerReason.RECOMPUTE
    if torch_private.capture_is_under_way():
        return EagerReason.NESTED_CAPTURE
    if torch_private.transforms_are_active():
        return EagerReason.TRANSFORMED
    return None


def _why_not(chain: Chain, index: int, tensors: Sequence[Tensor]) -> EagerReason | None:
    """Why this pair cannot serve a call with its signature now; ``None`` if it can."""
    pair = chain.pairs[index]
    graph = chain.graph_at(index)
    shares = index and chain.shares_copies
    if any(each.num_in_flight for each in graph):
        reason = EagerReason.MORE_IN_FLIGHT
    elif pair.forward is None or not chain.lane.allows(pair.forward_position):
        reason = EagerReason.OUT_OF_ORDER
    elif pair.moved_inputs(tensors):
        reason = EagerReason.MOVED_ARGUMENT
    elif chain.lane.holds_results(pair.forward_position):
        reason = EagerReason.RESULT_HELD
    elif any(each.has_new_hook() for each in graph):
        reason = EagerReason.NEW_HOOK
    elif len(graph) > 1 and not all(map(_is_as_captured, graph, chain.receivers[index:])):
        reason = EagerReason.OUT_OF_ORDER
    elif pair.overwrites_what_is_in_use(tensors) or (
        shares and any(before.num_in_flight for before in chain.pairs[:index])
    ):
        reason = EagerReason.PLACE_IN_USE
    else:
        return None
    return reason


def _is_as_captured(pair: GraphPair, receiver: Receiver) -> bool:
    """True if nothing about a pair that is launched with another one has changed; its arguments come later."""
    if isinstance(receiver, RegionCalls) and not receiver.is_as_for(pair):
        return False
    return tuple(map(_training_of, pair.region.modules)) == pair.signature.training


def _nearest_first(links: Sequence[tuple[Chain, int]], tensors: Sequence[Tensor]) -> Sequence[tuple[Chain, int]]:
    """The slots, first the one in whose memory the arguments lie already."""

    def num_copies(link: tuple[Chain, int]) -> int:
        pair = link[0].pairs[link[1]]
        return sum(tensors[p].data_ptr() != pair.inputs[p].data_ptr() for p in pair.chained)

    return sorted(links, key=num_copies)
