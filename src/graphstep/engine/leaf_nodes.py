"""Nodes that accumulate the gradients of leaves: on which stream they run, and new ones in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Stream = TypeVar("Stream")


@contextmanager
def streams_noted(leaves: Iterable[Tensor], current_stream: Callable[[], Stream]) -> Iterator[dict[int, Stream]]:
    """While the body runs backward passes: note the stream on which each leaf's gradient is accumulated, by identity.

    The node that does so runs on the stream on which it was made, and lives as long as anybody holds a graph with it: a
    loss that a loop has kept, or DistributedDataParallel. One that nobody holds is made anew here.

    Args:
        leaves: those that want a gradient.
        current_stream: asked by each node, in the thread of the backward pass.
    """
    found: dict[int, Stream] = {}
    held: list[Any] = []

    def noter(number: int) -> Callable[[Any], None]:
        def note(_gradients: Any) -> None:
            found[number] = current_stream()

        return note

    try:
        for leaf in leaves:
            node = _node_of(leaf)
            held.append((node, node.register_prehook(noter(id(leaf)))))
        yield found
    finally:
        for _, handle in held:
            handle.remove()


def is_held(leaf: Tensor) -> bool:
    """True if somebody in Python has the leaf's node in hand, and may have put hooks on it to stay."""
    counts = []
    for each in (leaf, torch.zeros((), requires_grad=True)):
        with torch.enable_grad():
            graph = each.view_as(each)  # Newer versions of torch count a graph as a holder: there is one for both.
        counts.append(sys.getrefcount(_node_of(each)))
        del graph
    return counts[0] > counts[1]


def renew(leaf: Tensor) -> bool:
    """Give a leaf a new node, made on the current stream; graphs that were made before keep the old one.

    Memory, version and gradient of the leaf stay as they are. Returns whether it could be done: not where
    :func:`is_held` says so, nor for other classes than torch's own.
    """
    if type(leaf) not in (Tensor, torch.nn.Parameter) or is_held(leaf):
        return False
    other = torch.float32 if leaf.dtype == torch.float64 else torch.float64
    data = leaf.data
    # torch forgets the node of a leaf that gets data of another type.
    leaf.data = torch.empty(0, dtype=other, device=leaf.device)
    leaf.data = data
    return True


def _node_of(leaf: Tensor) -> Any:
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(leaf).node
