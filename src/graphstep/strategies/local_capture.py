"""Captures the graph pairs of an observed plan, in its order and with its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphstep.capture.garbage import collected_once
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.observe import training_flags_kept
from graphstep.capture.plan import Event, Origin, Phase, Plan
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import TensorLayout
from graphstep.capture.static_inputs import own_entries
from graphstep.engine.user_frame import user_line_of
from graphstep.errors import CaptureError

Pairs = dict[tuple[Region, int], GraphPair]


def gradients_through_autograd(model: nn.Module, regions: Sequence[Region], plan: Plan) -> frozenset[int]:
    """Identities of the parameters whose gradients autograd has to accumulate.

    Those are parameters used in several places, whose parts autograd sums before it accumulates (a recording that adds
    its part by itself would round differently), and all where DistributedDataParallel waits for each accumulation.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return frozenset(id(parameter) for parameter in model.parameters())
    inside = {id(module) for region in regions for module in region.modules}
    outside = [module for module in model.modules() if id(module) not in inside]
    users = Counter(
        number
        for modules in (*(region.modules for region in regions), outside)
        for number in {id(p) for module in modules for p in module._parameters.values() if p is not None}
    )
    shared = {number for number, count in users.items() if count > 1}
    reused = {id(p) for region in plan.reused for module in region.modules for p in module._parameters.values()}
    return frozenset(shared | reused)


def capture_plan(
    plan: Plan, session: GraphSession, *, num_warmup_runs: int, through_autograd: frozenset[int] = frozenset()
) -> Pairs:
    """Capture both halves of every region and slot whose backward was seen.

    Captures follow the order of execution. With one microbatch in flight (a nested plan) that lets them all share one
    memory: what one half needs no more the next one uses. With several, a later replay of one pair may run between the
    halves of another, in any order: each pair then has a memory of its own.

    Args:
        plan: what was observed.
        session: owner of the recordings.
        num_warmup_runs: eager runs of each region before its capture.
        through_autograd: identities of parameters whose gradients autograd accumulates.

    Raises:
        CaptureError: names the region. All recordings made so far are closed, whatever the error.
    """
    capturing = _Capturing(plan, session, num_warmup_runs, plan.is_nested, through_autograd)
    trained = plan.trained()
    pairs: Pairs = {}
    events = [event for event in plan.first_events() if (event.region, event.slot) in trained]
    with collected_once():
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
                capturing.abandon(pairs)
                raise CaptureError(error.what, where=f"{where}; {error.where}", fix=error.fix) from error
            except Exception as error:
                capturing.abandon(pairs)
                raise CaptureError(
                    f"the {event.phase.value} failed: {type(error).__name__}: {error}",
                    where="; ".join([event.region.name, *filter(None, [str(user_line_of(error) or "")])]),
                    fix="run the region by itself with the shapes of the step, or leave it out of the captured modules",
                ) from error
            except BaseException:
                capturing.abandon(pairs)
                raise
    return pairs


@dataclass(slots=True)
class _Capturing:
    plan: Plan
    session: GraphSession
    num_warmup_runs: int
    is_ordered: bool
    through_autograd: frozenset[int]

    def abandon(self, pairs: Pairs) -> None:
        """Leave nothing behind: recordings are closed, and gradients that were made for them are gone."""
        self.session.release_all()
        for pair in pairs.values():
            pair.homes.forget()

    def forward(self, event: Event, pairs: Pairs) -> None:
        call = self.plan.calls[event.region, event.slot]
        owned = {entry.facts[0]: entry.tensor for entry in self.session.manifest if entry.facts is not None}
        inputs, in_place, chained_at = [], set(), {}
        for position, layout in enumerate(call.signature.layouts):
            origin = call.origins[position]
            found = owned.get(call.addresses[position])
            chained = _output_of(pairs, origin)
            if chained is not None and origin is not None:
                inputs.append(chained.detach().requires_grad_(layout.requires_grad))
                chained_at[position] = pairs[origin.region, origin.slot]
            elif found is not None and not layout.requires_grad and TensorLayout.of(found) == layout:
                inputs.append(found)
                in_place.add(position)
            else:
                inputs.append(_static(layout))
        stats = self.session.stats(event.region.name, event.region.kind)
        stats.static_bytes += sum(t.nbytes for i, t in enumerate(inputs) if i not in in_place and not call.origins[i])
        pair = GraphPair(
            event.region,
            call.signature,
            inputs,
            frozenset(in_place),
            self.session,
            stats,
            chained=chained_at,
            through_autograd=self.through_autograd,
            lane=0 if self.is_ordered else (event.region, event.slot),
        )
        pairs[event.region, event.slot] = pair
        with training_flags_kept(event.region.modules):
            for module, flag in zip(event.region.modules, call.signature.training, strict=True):
                module.training = flag
            pair.warm_up(self.num_warmup_runs)
            pair.capture_forward()
        pair.require_gradients()

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
            pair.capture_backward(grad_outputs)
        pair.let_go_forward()
        if not self.is_ordered:
            return
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
    own_entries(made).zero_()
    return made.requires_grad_(layout.requires_grad)
