"""Captured pairs of a function, outside of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.capture.chain_run import Chain, ChainRun, Handover, Pending
from graphstep.capture.graph_pair import GraphPair, capture_backwards, capture_forwards
from graphstep.capture.lanes import Lane
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature


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
    signature = Signature.of((examples, {}), device_type=session.device.type, modules=modules)
    region = Region("region", "layer", function, tuple(modules))
    given = [t for t in examples if isinstance(t, Tensor)]
    static = inputs or [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    pair = GraphPair(region, signature, static, frozenset(), session, session.stats("region", "layer"), **options)
    pair.warm_up(warmups)
    capture_forwards([pair])
    return pair


def backward_half(pair: GraphPair) -> GraphPair:
    """Capture the backward half with gradients of its own."""
    static = [
        torch.empty_like(output, requires_grad=False).detach() if wanted else None
        for output, wanted in zip(pair.outputs, pair.differentiable, strict=True)
    ]
    capture_backwards([pair], static)
    pair.is_held()
    return pair


def captured(session: GraphSession, function: Callable[..., Any], *examples: Any, **options: Any) -> GraphPair:
    return backward_half(forward_pair(session, function, *examples, **options))


class Caller:
    pending: Pending | None = None


def chain_of(*pairs: GraphPair, handover: Handover = ((0, 0),)) -> Chain:
    """Pairs whose first result is the next one's first argument."""
    anchor = torch.empty(0, device=pairs[0].session.device, requires_grad=True)
    return Chain(pairs, tuple(Caller() for _ in pairs), 0, Lane(), handover if len(pairs) > 1 else (), anchor)


def call(pair: GraphPair, *tensors: Tensor) -> Any:
    """Replay a pair by itself."""
    run = ChainRun(chain_of(pair), 0, lambda: None)
    return run.start(tensors, tensors, {}, pair.signature.ambient.key)
