"""Captures the graph pairs of a plan, observed or made from an order, in its order and with its memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphstep.capture.attributes import Attributes
from graphstep.capture.chain import Chain, Handover, Receiver
from graphstep.capture.graph_pair import BACKWARD_LANE, GraphPair
from graphstep.capture.graph_triple import GraphTriple
from graphstep.capture.lanes import Lanes, delayed_lanes, lane_groups
from graphstep.capture.observe import training_flags_kept
from graphstep.capture.pair_capture import capture_backwards, capture_forwards
from graphstep.capture.plan import Event, Key, Phase, Plan, Variant
from graphstep.capture.progress import CaptureProgress
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import TensorLayout
from graphstep.capture.static_inputs import static_like
from graphstep.capture.tree import argument_places, values_of
from graphstep.engine import torch_private
from graphstep.engine.user_frame import user_line_of
from graphstep.errors import CaptureError

Pairs = dict[Key, GraphPair]


class _Every:
    """Contains whatever is asked for."""

    def __contains__(self, _number: object) -> bool:
        return True


EVERY_PARAMETER: Final[Container[int]] = _Every()
"""For :attr:`Order.through_autograd`: those that nobody knows by now as well."""


class RegionFailedError(CaptureError):
    """A capture that failed because of one region."""

    region: Region
    is_of_several: bool
    """The capture was that of several regions: of which one is not certain."""


@dataclass(slots=True, kw_only=True)
class Order:
    """What to capture, and how."""

    plan: Plan
    handovers: Mapping[Key, Handover]
    """For variants and slots that follow another one: which of their arguments are which results of it."""
    session: GraphSession
    lanes: Lanes
    receivers: Mapping[Region, Receiver]
    attributes: Mapping[Region, Attributes] = field(default_factory=dict)
    """What Python reads in each region, as it was before."""
    num_warmup_runs: int = 3
    """Eager runs of each region before its capture."""
    merge: int | None = 1
    """Pairs of a chain that become one graph, the rest of a layer in front of them not counted; 0 for all, ``None`` for
    each by itself, that rest as well."""
    through_autograd: Container[int] = frozenset()
    """Identities of parameters whose gradients autograd accumulates."""
    poisons: bool = False
    apart: Mapping[Region, int] = field(default_factory=dict)
    """Groups of regions that share no memory if the whole plan could not be replayed otherwise."""
    around: Callable[[Event], AbstractContextManager[None]] = lambda _event: nullcontext()
    """What else is done before and after each capture, outside of it."""


def gradients_through_autograd(
    model: nn.Module, regions: Sequence[Region], plan: Plan, *, is_data_parallel: bool = False
) -> frozenset[int]:
    """Identities of the parameters whose gradients autograd has to accumulate.

    Those are parameters used in several places, whose parts autograd sums before it accumulates (a recording that adds
    its part by itself would round differently), and all where DistributedDataParallel waits for each accumulation.
    """
    if is_data_parallel or _is_data_parallel(model):
        return frozenset(id(parameter) for parameter in model.parameters())
    inside = {id(module) for region in regions for module in region.modules}
    outside = [module for module in model.modules() if id(module) not in inside]
    shared = shared_parameters([*(region.modules for region in regions), outside])
    reused = {id(p) for region in plan.reused for module in region.modules for p in module._parameters.values()}
    return frozenset(shared | reused)


def shared_parameters(groups: Iterable[Iterable[nn.Module]]) -> frozenset[int]:
    """Identities of the parameters that modules of several groups have. Submodules do not count."""
    users = Counter(
        number
        for modules in groups
        for number in {id(p) for module in modules for p in module._parameters.values() if p is not None}
    )
    return frozenset(number for number, count in users.items() if count > 1)


def _is_data_parallel(model: nn.Module) -> bool:
    """True if DistributedDataParallel is in the model, or around a part of it: the latter only the wrapper knows."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return True
    own = {id(parameter) for parameter in model.parameters()}
    wrappers = [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]
    return any(id(parameter) in own for wrapper in wrappers for parameter in wrapper.parameters())


def capture_chains(order: Order) -> list[Chain]:
    """Capture both halves of every variant and slot of a plan.

    Captures follow the order of execution. Forward halves of one slot share memory in that order; backward halves all
    share the same, which is free again after each.

    Returns:
        The chains, each with its pairs in order. The lanes know the positions of all of them.

    Raises:
        RegionFailedError: names the region. All recordings of this order are closed, and gradients that were made for
            them are gone, whatever the error.
    """
    groups = lane_groups(order.plan, order.apart)
    capturing = _Capturing(order, groups, delayed=delayed_lanes(order.plan, groups))
    with (
        order.session.captures_in_a_row(),
        torch_private.no_weights_cached(),
        CaptureProgress(len(order.plan.calls)) as progress,
    ):
        try:
            return capturing.run(progress)
        except BaseException:
            capturing.abandon()
            raise


@dataclass(slots=True)
class _Capturing:
    order: Order
    groups: Mapping[Variant, int]
    pairs: Pairs = field(default_factory=dict)
    warm: dict[Variant, GraphPair] = field(default_factory=dict)
    delayed: Mapping[Key, Hashable] = field(default_factory=dict)
    """Memory of backward halves whose weight gradients are computed apart."""
    segments: dict[Key, list[Key]] = field(default_factory=dict)
    """For each key, those that are captured together, in order."""

    def run(self, progress: CaptureProgress) -> list[Chain]:
        self._settle_followers()
        self._merge()
        for event in self.order.plan.first_events():
            segment = self.segments[event.variant, event.slot]
            if event.phase is Phase.FORWARD:
                if segment[0] == (event.variant, event.slot):
                    self._guarded(event, segment, self._forward)
            elif event.phase is Phase.WEIGHT_GRADIENT:
                self._guarded(event, segment, self._weight_gradients)
            elif segment[-1] == (event.variant, event.slot):
                self._guarded(event, segment, self._backward)
                for variant, _ in segment:
                    progress.advance(variant.region.name, _allocated(self.order.session.device))
        return self._chains()

    def abandon(self) -> None:
        """Leave nothing behind."""
        for pair in self.pairs.values():
            pair.release()
            pair.homes.forget()

    def _guarded(self, event: Event, segment: list[Key], capture: Callable[[list[Key]], None]) -> None:
        region = event.variant.region
        try:
            stats = self.order.session.stats(region.name, region.kind)
            with self.order.session.timed(stats), self.order.around(event):
                capture(segment)
        except CaptureError as error:
            inner = error.where.removeprefix(region.name).lstrip(";, ")
            where = "; ".join(filter(None, [f"{region.name}, {event.phase.value}", inner]))
            failed = RegionFailedError(error.what, where=where, fix=error.fix)
            failed.region, failed.is_of_several = region, len(segment) > 1
            raise failed from error
        except Exception as error:
            failed = RegionFailedError(
                f"the {event.phase.value} failed: {type(error).__name__}: {error}",
                where="; ".join([region.name, *filter(None, [str(user_line_of(error) or "")])]),
                fix="see that it runs eagerly with the same arguments; or leave it out of what is captured",
            )
            failed.region, failed.is_of_several = region, len(segment) > 1
            raise failed from error

    def _settle_followers(self) -> None:
        """Forget that one follows another where the two cannot share a lane or a form."""
        followed: set[Key] = set()
        for key, call in self.order.plan.calls.items():
            before = call.follows
            if before is None:
                continue
            is_known = before in self.order.plan.calls and key in self.order.handovers
            is_delayed = key in self.delayed or before in self.delayed  # Those are replayed one by one.
            if not is_known or is_delayed or before in followed or self.groups[before[0]] != self.groups[key[0]]:
                call.follows = None
                continue
            earlier = self.order.handovers.get(before)
            if self.order.plan.calls[before].follows is not None and earlier != self.order.handovers[key]:
                call.follows = None
                continue
            followed.add(before)

    def _merge(self) -> None:
        """Put as many as are wanted of those that follow each other into one segment."""
        self.segments = {key: [key] for key in self.order.plan.calls}
        merge = self.order.merge
        if merge is None:
            return
        for key in dict.fromkeys((event.variant, event.slot) for event in self.order.plan.first_events()):
            before = self.order.plan.calls[key].follows
            if before is None or self._exposes(key) or self._exposes(before):
                continue
            segment = self.segments[before]
            if merge == 0 or sum(not variant.region.is_rest for variant, _ in segment) < merge:
                segment.append(key)
                self.segments[key] = segment

    def _exposes(self, key: Key) -> bool:
        """True if autograd accumulates some of its gradients, which would come late in a graph of several layers."""
        return any(
            id(parameter) in self.order.through_autograd or parameter._backward_hooks
            for parameter, is_trainable in _trainable_in(key[0])
            if is_trainable
        )

    def _make(self, key: Key) -> GraphPair:
        order, session = self.order, self.order.session
        variant, slot = key
        call = order.plan.calls[key]
        if call.refusal:
            raise CaptureError(
                f"it was called with {call.refusal}: what that computes or reads is not known to a graph",
                where=variant.region.name,
                fix="give it plain tensors and values, and make modules that it uses its submodules",
            )
        owned = {entry.facts[0]: entry.tensor for entry in session.manifest if entry.facts is not None}
        before = self.pairs[call.follows] if call.follows is not None else None
        shared = _shared_inputs(before, variant, order.handovers[key]) if before is not None else {}
        inputs: list[Tensor] = []
        in_place: set[int] = set()
        chained: dict[int, tuple[GraphPair, int]] = {}
        repeated = dict(variant.signature.repeated)
        static_bytes = 0
        stats = session.stats(variant.region.name, variant.region.kind)
        for position, layout in enumerate(variant.signature.layouts):
            origin = call.origins[position]
            found = owned.get(call.addresses[position])
            source = self.pairs.get((origin.variant, origin.slot)) if origin is not None else None
            if position in repeated:
                inputs.append(inputs[repeated[position]])
                if source is not None and origin is not None:
                    chained[position] = source, origin.output
            elif source is not None and origin is not None:
                chained[position] = source, origin.output
                inputs.append(torch.empty(0))  # Found at capture.
            elif found is not None and not layout.requires_grad and TensorLayout.of(found) == layout:
                inputs.append(found)
                in_place.add(position)
            elif position in shared:
                inputs.append(shared[position])  # The same object for both, and so one copy.
            else:
                inputs.append(static_like(layout, call.samples[position] if call.samples else None))
                static_bytes += inputs[-1].nbytes
        stats.static_bytes += static_bytes
        pair = self.pairs[key] = (GraphTriple if key in self.delayed else GraphPair)(
            variant.region,
            variant.signature,
            inputs,
            frozenset(in_place),
            session,
            stats,
            chained=chained,
            through_autograd=order.through_autograd,
            lane=("forward", self.groups[variant], slot),
            backward_lane=self.delayed.get(key, BACKWARD_LANE),
            poisons=order.poisons,
        )
        pair.static_bytes = static_bytes
        pair.left.attributes = order.attributes.get(variant.region)
        with _flags_of(variant):
            if variant in self.warm:
                pair.warm_up_as(self.warm[variant])
            else:
                with self._refuse_counting(pair):
                    pair.warm_up(order.num_warmup_runs)
                self.warm[variant] = pair
        return pair

    @contextmanager
    def _refuse_counting(self, pair: GraphPair) -> Iterator[None]:
        """Refuse what the body, a warmup, does to attributes and a replay could not do; then they are as before."""
        attributes = self.order.attributes.get(pair.region)
        values = values_of(pair.signature.structure)
        functions = [each for each in values if callable(each) and not isinstance(each, type)]
        before = attributes.again(functions) if attributes is not None else None
        try:
            yield
            if before is not None:
                before.refuse_changes(pair.region.name, pair.observation.externals)
        except BaseException:
            if before is not None:
                before.put_back()
            raise

    def _forward(self, segment: list[Key]) -> None:
        pairs = [self.pairs.get(key) or self._make(key) for key in segment]
        self._cut(segment, pairs)
        with _flags_of(*(variant for variant, _ in segment)):
            capture_forwards(pairs)
        for (variant, slot), pair in zip(segment, pairs, strict=True):
            pair.lane = self.order.lanes.of(self.groups[variant], slot)
            pair.forward_position = self.order.lanes.tick()

    def _cut(self, segment: list[Key], pairs: list[GraphPair]) -> None:
        """Leave out, from the first one on, those that may not run before they are called."""
        for index in range(1, len(segment)):
            # A rest of a layer is merged without being asked for, and never at the price of an error later on.
            is_safe = pairs[index - 1].runs_again or not pairs[index - 1].region.is_rest
            # Of a tensor of inference mode nobody can tell whether it was written before the call.
            is_known = not any(map(Tensor.is_inference, pairs[index].region.tensors()))
            if not (is_safe and is_known and pairs[index].run_ahead()):
                rest = segment[index:]
                del segment[index:], pairs[index:]
                self.segments.update(dict.fromkeys(rest, rest))
                return

    def _backward(self, segment: list[Key]) -> None:
        pairs = [self.pairs[key] for key in segment]
        last = pairs[-1]
        consumer = self._follower(segment[-1])
        grad_outputs: list[Tensor | None] = [None] * len(last.outputs)
        used = self.order.plan.calls[segment[-1]].used
        for index, (output, wanted) in enumerate(zip(last.outputs, last.differentiable, strict=True)):
            if wanted and (not used or index in used):
                found = _gradient_for(consumer, last, index)
                grad_outputs[index] = torch.zeros_like(output, requires_grad=False) if found is None else found
        with _flags_of(*(variant for variant, _ in segment)):
            if isinstance(last, GraphTriple):
                last.capture_backward(grad_outputs)
            else:
                capture_backwards(pairs, grad_outputs)
        for pair in reversed(pairs):
            pair.backward_position = self.order.lanes.tick()
        if consumer is not None:
            consumer.let_go_grad_inputs()
            last.let_go_grad_outputs()
        if self.order.plan.calls[segment[0]].follows is None:
            # Handed to autograd as copies, right after each replay.
            pairs[0].let_go_grad_inputs()

    def _weight_gradients(self, segment: list[Key]) -> None:
        triple = self.pairs[segment[0]]
        if isinstance(triple, GraphTriple):
            with _flags_of(segment[0][0]):
                triple.capture_weight_gradients()
            # Until now its forward half keeps its memory.
            triple.backward_position = self.order.lanes.tick()

    def _follower(self, key: Key) -> GraphPair | None:
        """The pair that reads the results of this one and nothing else."""
        for other, call in self.order.plan.calls.items():
            if call.follows == key and other in self.pairs and self.pairs[other].is_ready:
                return self.pairs[other]
        return None

    def _chains(self) -> list[Chain]:
        order = self.order
        chains: list[list[Key]] = []
        place: dict[Key, list[Key]] = {}
        for key in dict.fromkeys((event.variant, event.slot) for event in order.plan.first_events()):
            before = order.plan.calls[key].follows
            if before is not None and self._is_linked(before, key):
                place[key] = place[before]
                place[key].append(key)
            else:
                place[key] = [key]
                chains.append(place[key])
        return [
            Chain(
                tuple(self.pairs[key] for key in keys),
                tuple(order.receivers[variant.region] for variant, _ in keys),
                keys[0][1],
                self.pairs[keys[0]].lane,
                order.handovers[keys[1]] if len(keys) > 1 else (),
                torch.empty(0, device=order.session.device, requires_grad=True),
            )
            for keys in chains
        ]

    def _is_linked(self, before: Key, key: Key) -> bool:
        first, second = self.pairs[before], self.pairs[key]
        if self.segments[before] is self.segments[key]:
            return True
        if first.exposed or second.exposed:
            return False
        # Their first events may lie in different microbatches, and so the other way round than they run.
        places = [(g, _gradient_for(second, first, index)) for index, g in enumerate(first.grad_outputs)]
        return all(
            found is not None and found.data_ptr() == place.data_ptr() for place, found in places if place is not None
        ) and all(place is not None for (place, _), wanted in zip(places, first.differentiable, strict=True) if wanted)


def _shared_inputs(before: GraphPair, variant: Variant, handover: Handover) -> dict[int, Tensor]:
    """By position: static inputs of the pair before for the arguments that are the same objects in both calls."""
    handed = {place for place, _ in handover}
    known = dict(zip(argument_places(before.signature.structure), before.inputs, strict=True))
    layouts = dict(zip(argument_places(before.signature.structure), before.signature.layouts, strict=True))
    places = enumerate(zip(argument_places(variant.signature.structure), variant.signature.layouts, strict=True))
    return {n: known[place] for n, (place, layout) in places if place[0] not in handed and layouts.get(place) == layout}


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _gradient_for(consumer: GraphPair | None, pair: GraphPair, output: int) -> Tensor | None:
    """Where the pair that follows leaves the gradient of an output."""
    if consumer is None or not consumer.grad_inputs:
        return None
    for position, (source, index) in consumer.chained.items():
        if source is pair and index == output:
            return consumer.grad_inputs[position]
    return None


@contextmanager
def _flags_of(*variants: Variant) -> Iterator[None]:
    """Training flags and frozen parameters as they were in the observed call, for the body."""
    with training_flags_kept([module for variant in variants for module in variant.region.modules]):
        for variant in variants:
            for module, flag in zip(variant.region.modules, variant.signature.training, strict=True):
                module.training = flag
        wanted = {id(parameter): (parameter, flag) for each in variants for parameter, flag in _trainable_in(each)}
        others = [parameter for parameter, flag in wanted.values() if parameter.requires_grad != flag]
        try:
            for parameter in others:
                parameter.requires_grad_(not parameter.requires_grad)
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(not wanted[id(parameter)][1])


def _trainable_in(variant: Variant) -> list[tuple[nn.Parameter, bool]]:
    """The parameters of a region, each with whether it wanted a gradient in the observed call."""
    parameters = [parameter for parameter in variant.region.parameters() if parameter.is_leaf]
    flags = variant.signature.trainable
    if len(flags) != len(parameters):  # Not known, or some came or went since.
        return [(parameter, parameter.requires_grad) for parameter in parameters]
    return list(zip(parameters, flags, strict=True))
