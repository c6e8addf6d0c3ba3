"""Calls of the autograd engine, made such that a function mode stays on while the user's backward code runs.

While a function mode handles a call it is off. So a mode that simply carried on a call of ``backward`` would not see
what hooks and custom functions do. Given gradient edges in place of tensors, torch does not offer the call to modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from graphstep.engine import torch_private


def through_edges(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The same call on gradient edges, or ``None`` if this is another function or a case that edges do not cover."""
    if func is Tensor.backward:
        return _backward(*args, **kwargs)
    if func is torch.autograd.backward:
        return _backward_of_several(*args, **kwargs)
    if func is torch.autograd.grad:
        return _grad(*args, **kwargs)
    return None


def _backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> Callable[[], Any] | None:
    return _backward_of_several(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _backward_of_several(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **others: Any
) -> Callable[[], Any] | None:
    inputs = others.pop("inputs", None)
    edges, wanted = _edges(tensors), _edges(inputs if inputs is not None else ())
    if edges is None or wanted is None or any(value is not None for value in others.values()):
        return None
    return partial(
        torch.autograd.backward, edges, grad_tensors, retain_graph, create_graph, inputs=wanted if wanted else None
    )


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Callable[[], Any] | None:
    edges, wanted = _edges(outputs), _edges(inputs)
    if edges is None or wanted is None or len(args) > 4 or kwargs.get("materialize_grads"):
        return None
    return partial(torch.autograd.grad, edges, wanted, *args, **kwargs)


def _edges(tensors: Any) -> list[Any] | None:
    """A gradient edge for each tensor; ``None`` if one has none or is of a class with its own rules."""
    edges = []
    for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
        if isinstance(tensor, Tensor):
            is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not torch_private.is_functorch_wrapped(tensor)
            if not tensor.requires_grad or not is_plain:
                return None
            edges.append(get_gradient_edge(tensor))
        else:
            edges.append(tensor)
    return edges
