"""Captures the halves of a graph pair, or of several pairs that follow each other, as one recording each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.observe import Observation
from graphstep.capture.region import Region
from graphstep.capture.signature import Signature
from graphstep.errors import CaptureError, LifecycleError


class NoGradientError(CaptureError):
    """No result of a region needs a gradient: there is no backward half."""

    region: Region
    signature: Signature


def capture_forwards(pairs: Sequence[GraphPair]) -> None:
    """Capture the forward halves of a pair, or of several that follow each other, as one recording.

    Their outputs and what autograd saved stay in the pool until the backward halves are captured.

    Raises:
        CaptureError: it cannot be captured.
        NoGradientError: no output of a region depends on anything that wants a gradient.
        LifecycleError: captured already.
    """
    first = pairs[0]
    if any(pair.is_forward_captured for pair in pairs):
        raise LifecycleError("the forward half is captured already", where=first.region.name)

    def run() -> list[Any]:
        return [pair.run_forward() for pair in pairs]

    observation = Observation.joined(pair.observation for pair in pairs)
    recording = first.session.capture(first.stats, run, observation=observation, lane=first.forward_lane)
    for pair in pairs:
        pair.note_forward(recording if pair is first else None)
        if not any(pair.differentiable):
            failed = NoGradientError(
                "no result of it needs a gradient, so that there is no backward to capture",
                where=pair.region.name,
                fix="leave it out of what is captured; or see that results depend on what wants a gradient, outside of "
                "no_grad() and detach()",
            )
            failed.region, failed.signature = pair.region, pair.signature
            raise failed


def capture_backwards(pairs: Sequence[GraphPair], grad_outputs: Sequence[Tensor | None]) -> None:
    """Capture the backward halves of what :func:`capture_forwards` has captured together.

    They give the gradients of the first pair's inputs, and those of the parameters added to where they live.

    Args:
        pairs: in the order of their forwards.
        grad_outputs: for each output of the last pair, the static tensor that holds its gradient; ``None`` where it
            has none.

    Raises:
        CaptureError: it cannot be captured.
        LifecycleError: the forward is not captured yet, or the backward is already.
    """
    first, last = pairs[0], pairs[-1]
    if not all(pair.is_forward_captured for pair in pairs):
        raise LifecycleError("the forward half is not captured yet", where=last.region.name)
    if any(pair.is_backward_captured for pair in pairs):
        raise LifecycleError("the backward half is captured already", where=last.region.name)
    last.grad_outputs = last.form.without_repeated(grad_outputs)

    def run() -> list[Any]:
        results: list[Any] = []
        for pair, before in zip(reversed(pairs), [*reversed(pairs[:-1]), None], strict=True):
            results.append(pair.run_backward())
            if before is not None:
                given: list[Tensor | None] = [None] * len(before.outputs)
                repeated = {position for position, _ in pair.signature.repeated}
                for position, (_, output) in pair.chained.items():
                    found = pair.grad_inputs[position]
                    if before.differentiable[output] and position not in repeated:
                        given[output] = torch.zeros_like(before.outputs[output]) if found is None else found
                before.grad_outputs = before.form.without_repeated(given)
        return results

    observation = Observation.joined(pair.observation for pair in pairs)
    recording = last.session.capture(last.stats, run, observation=observation, lane=last.backward_lane)
    for pair in pairs:
        pair.note_backward(recording if pair is last else None)
        if pair is not first:
            pair.grad_inputs = []
        if pair is not last:
            pair.grad_outputs = []
    for each in (first.forward, recording):
        if each is not None:
            each.release_result()
