"""Which results of a call get a gradient from its caller, and not only from other results of the same call.

The logits of a model that returns its loss as well get a gradient in every backward, from within the model. A graph of
that backward computes it by itself, and needs a place for gradients from outside alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.saved_tensors import nodes_behind


class _FromInside(Tensor):
    """A gradient that came along the inside of a call, on its way to a result. A sum of such is one too.

    All else that is computed from it is plain, such as the sum with a gradient from outside.
    """

    plain: Tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # There it is the one that does nothing.
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_sum = func is torch.ops.aten.add.Tensor and all(isinstance(each, cls) for each in args)
        result = func(*(each.plain if isinstance(each, cls) else each for each in args), **(kwargs or {}))
        return _marked(result) if is_sum else result


def note_outside(outputs: Sequence[Tensor], begins_at: Iterable[Any]) -> set[int]:
    """Positions of the results that get a gradient from outside, filled in while backward passes run.

    Nobody sees a trace of it but autograd: gradients are the same bits, and all hooks get plain ones. What notes them
    goes with the autograd graph of the results.

    Args:
        outputs: the results, flat, before the caller has them.
        begins_at: nodes of autograd that have made its arguments: what lies before them is not looked at.

    Returns:
        The set that is filled in. Leaves are in it from the start: those are the caller's, and no place for hooks. So
        is, in doubt, what gets a gradient from both sides.
    """
    used = {index for index, tensor in enumerate(outputs) if tensor.requires_grad and tensor.is_leaf}
    places: dict[tuple[Any, int], list[int]] = {}
    for index, tensor in enumerate(outputs):
        if tensor.requires_grad and not tensor.is_leaf:
            places.setdefault((tensor.grad_fn, tensor.output_nr), []).append(index)
    for node in nodes_behind(outputs, ends=begins_at):
        edges = {number for number, edge in enumerate(node.next_functions) if edge in places}
        if edges:
            node.register_hook(partial(_mark, edges))
    for indices in places.values():
        outputs[indices[0]].register_hook(partial(_note, used, indices))
    return used


def _mark(edges: set[int], gradients: tuple[Tensor | None, ...], _given: Any) -> tuple[Tensor | None, ...] | None:
    """A node inside has run: mark what goes to results."""
    if torch.is_grad_enabled():
        return None  # The gradients have a history, which a mark would end.
    return tuple(_marked(each) if number in edges else each for number, each in enumerate(gradients))


def _marked(gradient: Tensor | None) -> Tensor | None:
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return gradient
    marked = Tensor._make_subclass(_FromInside, gradient)
    marked.plain = gradient
    return marked


def _note(used: set[int], indices: Sequence[int], gradient: Tensor | None) -> Tensor | None:
    """The whole gradient of a result has come; ``None`` where only another result of one and the same node has one."""
    if isinstance(gradient, _FromInside):
        return gradient.plain
    if gradient is not None:
        used.update(indices)
    return None
