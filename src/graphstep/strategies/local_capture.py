"""Captures the graph pairs of an observed plan, in its order and with its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.observe import training_flags_kept
from graphstep.capture.plan import Event, Origin, Phase, Plan
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import TensorLayout
from graphstep.errors import CaptureError

Pairs = dict[tuple[Region, int], GraphPair]


def capture_plan(plan: Plan, session: GraphSession, *, num_warmup_runs: int) -> Pairs:
    """Capture both halves of every region and slot whose backward was seen.

    Captures follow the order of execution, which is what lets them share one pool. With one microbatch in flight, a
    tensor's memory goes back to the pool as soon as the plan needs it no more; with several, nothing goes back before
    all is captured, since a later replay of one slot may run between the halves of another.

    Raises:
        CaptureError: names the region. All recordings made so far are closed.
    """
    capturing = _Capturing(plan, session, num_warmup_runs, is_ordered=plan.num_slots == 1)
    trained = plan.trained()
    pairs: Pairs = {}
    events = [event for event in plan.first_events() if (event.region, event.slot) in trained]
    for position, event in enumerate(events):
        stats = session.stats(event.region.name, event.region.kind)
        try:
            with session.timed(stats):
                if event.phase is Phase.FORWARD:
                    capturing.forward(event, pairs)
                else:
                    capturing.backward(event, pairs, events[position + 1 :])
        except CaptureError as error:
            where = f"{event.region.name}, {event.phase.value}"
            session.release_all()
            raise CaptureError(error.what, where=f"{where}; {error.where}", fix=error.fix) from error
    return pairs


@dataclass(slots=True)
class _Capturing:
    plan: Plan
    session: GraphSession
    num_warmup_runs: int
    is_ordered: bool

    def forward(self, event: Event, pairs: Pairs) -> None:
        call = self.plan.calls[event.region, event.slot]
        owned = {entry.address: entry for entry in self.session.manifest}
        inputs, in_place = [], set()
        for position, layout in enumerate(call.signature.layouts):
            origin = call.origins[position]
            entry = owned.get(call.addresses[position])
            chained = _output_of(pairs, origin)
            if chained is not None:
                inputs.append(chained.detach().requires_grad_(layout.requires_grad))
            elif entry is not None and not layout.requires_grad and TensorLayout.of(entry.tensor) == layout:
                inputs.append(entry.tensor)
                in_place.add(position)
            else:
                inputs.append(_static(layout))
        stats = self.session.stats(event.region.name, event.region.kind)
        stats.static_bytes += sum(t.nbytes for i, t in enumerate(inputs) if i not in in_place and not call.origins[i])
        pair = GraphPair(event.region, call.signature, inputs, frozenset(in_place), self.session, stats)
        with training_flags_kept(event.region.modules):
            for module, flag in zip(event.region.modules, call.signature.training, strict=True):
                module.training = flag
            pair.warm_up(self.num_warmup_runs)
            pair.capture_forward()
        pair.require_gradients()
        pairs[event.region, event.slot] = pair

    def backward(self, event: Event, pairs: Pairs, later: list[Event]) -> None:
        key = (event.region, event.slot)
        pair = pairs[key]
        consumers = [self._consumer(key, index, pairs) for index in range(len(pair.outputs))]
        grad_outputs: list[Tensor | None] = []
        for output, wanted, consumer in zip(pair.outputs, pair.differentiable, consumers, strict=True):
            if not wanted:
                grad_outputs.append(None)
            elif consumer is not None and consumer[0].grad_inputs[consumer[1]] is not None:
                grad_outputs.append(consumer[0].grad_inputs[consumer[1]])
            else:
                grad_outputs.append(torch.empty_like(output, requires_grad=False).detach())
        with training_flags_kept(event.region.modules):
            for module, flag in zip(event.region.modules, pair.signature.training, strict=True):
                module.training = flag
            pair.capture_backward(grad_outputs, retain_graph=not self.is_ordered)
        if not self.is_ordered:
            return  # A later replay of another slot may run before this one's backward: nothing goes back to the pool.
        origins = self.plan.calls[key].origins
        pair.let_go_forward(chained=[i for i, origin in enumerate(origins) if _output_of(pairs, origin) is not None])
        for consumer in consumers:
            if consumer is not None and consumer[0].gradient_is_handed_on:
                consumer[0].let_go_grad_inputs()
                pair.let_go_grad_outputs()
        # A gradient that only the very next backward reads may be handed on after it; any other may wait in autograd.
        follows = bool(later) and later[0].phase is Phase.BACKWARD and self._feeds(later[0], key)
        pair.gradient_is_handed_on = follows

    def _consumer(self, key: tuple[Region, int], output: int, pairs: Pairs) -> tuple[GraphPair, int] | None:
        """The pair whose input is this output, with the position of that input, if there is exactly one."""
        wanted = Origin(key[0], key[1], output)
        found = [
            (pairs[other], position)
            for other, call in self.plan.calls.items()
            for position, origin in enumerate(call.origins)
            if origin == wanted and other in pairs and pairs[other].is_ready
        ]
        return found[0] if len(found) == 1 else None

    def _feeds(self, event: Event, key: tuple[Region, int]) -> bool:
        """True if all gradients that ``key``'s backward hands to other regions go to this event's region."""
        origins = [origin for origin in self.plan.calls[key].origins if origin is not None]
        return bool(origins) and all((o.region, o.slot) == (event.region, event.slot) for o in origins)


def _output_of(pairs: Pairs, origin: Origin | None) -> Tensor | None:
    if origin is None or (origin.region, origin.slot) not in pairs:
        return None
    return pairs[origin.region, origin.slot].outputs[origin.output]


def _static(layout: TensorLayout) -> Tensor:
    made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    return made.zero_().requires_grad_(layout.requires_grad)
