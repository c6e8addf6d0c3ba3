"""Captured pairs of a function, outside of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature


class Lease:
    """Counts what autograd tells it."""

    def __init__(self) -> None:
        self.num_backwards = 0
        self.num_closed = 0

    def backward_begins(self) -> None:
        self.num_backwards += 1

    def close(self) -> None:
        self.num_closed += 1


def forward_pair(
    session: GraphSession,
    function: Callable[..., Any],
    *examples: Any,
    modules: Sequence[nn.Module] = (),
    inputs: Sequence[Tensor] | None = None,
    warmups: int = 1,
    **options: Any,
) -> GraphPair:
    """A pair whose forward half is captured; ``inputs`` are static tensors to use instead of own ones."""
    signature = Signature.of(examples, device_type=session.device.type, modules=modules)
    region = Region("region", "layer", function, tuple(modules))
    given = [t for t in examples if isinstance(t, Tensor)]
    static = inputs or [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    pair = GraphPair(region, signature, static, frozenset(), session, session.stats("region", "layer"), **options)
    pair.warm_up(warmups)
    pair.capture_forward()
    return pair


def backward_half(pair: GraphPair, **options: Any) -> GraphPair:
    """Capture the backward half with gradients of its own."""
    static = [
        torch.empty_like(output, requires_grad=False).detach() if wanted else None
        for output, wanted in zip(pair.outputs, pair.differentiable, strict=True)
    ]
    pair.capture_backward(static, **options)
    pair.is_held()
    return pair


def captured(session: GraphSession, function: Callable[..., Any], *examples: Any, **options: Any) -> GraphPair:
    return backward_half(forward_pair(session, function, *examples, **options))


def call(pair: GraphPair, *tensors: Tensor) -> Any:
    return pair.replay(tensors, Lease())
