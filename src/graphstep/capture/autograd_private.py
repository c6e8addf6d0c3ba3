"""What torch tells only through private interfaces about autograd and storages, each with a fallback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def backward_pass() -> int | None:
    """A number for the backward pass that this thread is in; ``None`` outside of one or where torch does not tell."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if current is None else int(current())
    return None if number < 0 else number


def saved_tensors_are_taken() -> bool:
    """Whether somebody takes what autograd saves in this thread: activation recompute, or offloading to the host."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def will_accumulate(node: Any) -> bool:
    """Whether the backward pass under way reaches the leaf of this node: not so in ``autograd.grad``, for example."""
    query = getattr(torch._C, "_will_engine_execute_node", None)
    return True if query is None else bool(query(node))


def num_holders(tensor: Tensor) -> int | None:
    """How many tensors and other objects hold the tensor's storage; ``None`` where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(tensor.untyped_storage()._cdata))
