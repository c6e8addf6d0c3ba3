"""The calls of one captured region: which slot serves them, or why none does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graphstep.capture.attributes import Attributes
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.plan import Event, Phase, PlanGuard, PlanObserver, lowest_free
from graphstep.capture.region import Region
from graphstep.capture.report import RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.engine import torch_private

Carried = tuple[Tensor, ...]


class RegionCalls:
    """The calls of one region: observed, replayed, or eager with a counted reason."""

    def __init__(self, region: Region, modules: Sequence[tuple[str, nn.Module]], session: GraphSession) -> None:
        self.region = region
        self.observer: PlanObserver | None = None
        self._modules = modules
        self._attributes: Attributes | None = None
        self._why_not = "not captured yet"
        self._device_type = session.device.type
        self._stats: RegionStats = session.stats(region.name, region.kind)
        self._pairs: Sequence[GraphPair] = ()
        self._guard: PlanGuard | None = None
        self._busy: set[int] = set()
        self._mismatched: Signature | None = None

    def start_capture(self) -> None:
        """Run eagerly without reporting, and note what the capture has to find again."""
        self.observer = None
        # Hooks of the layer itself run around it; those of parameters run whoever computes the gradient.
        self._attributes = Attributes(self._modules, hooks_of=self._modules[1:])

    def use(self, pairs: Sequence[GraphPair], guard: PlanGuard) -> None:
        """Replay ``pairs``, one a slot, in an order that ``guard`` allows."""
        self._pairs, self._guard = pairs, guard
        if self._attributes is not None:
            self._attributes.ignore_changed()
        self._why_not = "" if pairs else "no gradient in the first step"
        for pair in pairs:
            pair.is_held()

    def forget(self) -> None:
        """Let go of the pairs and run eagerly."""
        self.observer, self._pairs, self._why_not = None, (), "closed"

    def start_step(self) -> None:
        """Look whether the attributes of the modules are as captured."""
        changed = self._attributes.changed() if self._attributes is not None else []
        if self._pairs:
            self._why_not = f"{changed[0]} changed after the capture" if changed else ""

    def __call__(self, carried: Carried, context: Carried) -> Carried:
        """Run the region on its arguments."""
        if not torch.is_grad_enabled():
            return self._eager(carried, context, "evaluation")
        if torch_private.saved_tensors_are_taken():
            # Recompute and offloading work on what autograd saves; a replay saves nothing.
            return self._eager(carried, context, "recompute or offloading of saved tensors")
        signature = Signature.of((carried, context), device_type=self._device_type, modules=self.region.modules)
        if self.observer is not None:
            return self._observed(self.observer, signature, carried, context)
        slot = lowest_free(self._busy)
        reason = self._why_not or self._why_eager(slot, signature, (*carried, *context))
        if not reason and self._guard is not None:
            reason = self._guard.why_not(self.region, slot)
        if reason or self._guard is None:
            return self._eager(carried, context, reason)
        self._guard.enter(Event(self.region, slot, Phase.FORWARD))
        pair = self._pairs[slot]
        result: Carried = pair.replay((*carried, *context), _Lease(self.region, slot, self._busy, self._guard, pair))
        return result

    def _why_eager(self, slot: int, signature: Signature, tensors: Sequence[Tensor]) -> str:
        """The reason why no captured pair serves a call; empty if one does."""
        if slot >= len(self._pairs):
            return "more microbatches in flight than at capture"
        pair = self._pairs[slot]
        if signature != pair.signature:
            if signature.training != pair.signature.training:
                return "evaluation"
            if self._mismatched != signature:
                self._mismatched = signature
                self._stats.last_mismatch = tuple(pair.signature.differences(signature, "call"))
            return "another signature"
        if pair.moved_inputs(tensors):
            return "an argument that the model owns has moved"
        if pair.is_held():
            return "an earlier result is still held"
        return pair.why_not(tensors)

    def _eager(self, carried: Carried, context: Carried, reason: str) -> Carried:
        self._stats.eager_calls[reason] += 1
        result: Carried = self.region.function(carried, context)
        return result

    def _observed(self, observer: PlanObserver, signature: Signature, carried: Carried, context: Carried) -> Carried:
        slot = observer.forward(self.region, signature, [*carried, *context])
        result = self._eager(carried, context, "observed")
        observer.outputs(self.region, slot, result)
        differentiable = [tensor for tensor in result if tensor.requires_grad]
        call = _ObservedCall(observer, self.region, slot)
        if differentiable:
            torch.autograd.graph.register_multi_grad_hook(differentiable, call.backward_begins, mode="any")
        return result


class _ObservedCall:
    """Lives in the autograd graph of one observed forward: tells when its backward begins, or that none will come."""

    def __init__(self, observer: PlanObserver, region: Region, slot: int) -> None:
        self._observer, self._region, self._slot = observer, region, slot
        self._is_open = True

    def backward_begins(self, _gradient: Tensor) -> None:
        if self._is_open:
            self._is_open = False
            self._observer.backward(self._region, self._slot, torch_private.backward_pass())

    def __del__(self) -> None:
        if self._is_open:
            self._observer.dropped(self._region, self._slot)


class _Lease:
    """A slot from its forward until its backward, or until autograd drops the result."""

    def __init__(self, region: Region, slot: int, busy: set[int], guard: PlanGuard, pair: GraphPair) -> None:
        self._region, self._slot, self._busy, self._guard, self._pair = region, slot, busy, guard, pair
        self._is_open = pair.is_in_flight = True
        busy.add(slot)
        guard.started(region, slot)

    def backward_begins(self) -> None:
        """Check the order of backwards, and that this one has not run before."""
        self._guard.enter(Event(self._region, self._slot, Phase.BACKWARD))

    def close(self) -> None:
        """Give the slot back. May be called twice."""
        if self._is_open:
            self._is_open = self._pair.is_in_flight = False
            self._busy.discard(self._slot)
            self._guard.finished(self._region, self._slot)

    def __del__(self) -> None:
        self.close()
