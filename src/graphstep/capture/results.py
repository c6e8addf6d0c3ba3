"""What a captured region returns: memory of its own, and which parameters it depends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.gradients import leaves_reached
from graphstep.capture.parameter_aliases import ParameterAliases
from graphstep.capture.signature import repeated_in
from graphstep.capture.tree import flatten, tensor_paths, unflatten
from graphstep.engine import torch_private


class ResultForm:
    """What a region returns, but for the tensors in it."""

    def __init__(self, result: Any) -> None:
        tensors, self._structure = flatten(result)
        self.repeated = dict(repeated_in(tensors))
        """Positions of tensors that are the same object as an earlier one, each with the position of that one."""
        self.is_tensor = isinstance(result, Tensor)
        self._is_plain_tuple = type(result) is tuple and all(isinstance(item, Tensor) for item in result)

    @property
    def is_plain_tuple(self) -> bool:
        """A tuple of tensors, each another one."""
        return self._is_plain_tuple and not self.repeated

    def name_of(self, position: int) -> str:
        """A result as the caller would write it: ``result['logits']``."""
        return tensor_paths(self._structure, "result")[position]

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """The same form with other tensors in it."""
        if self.is_tensor:
            return tensors[0]
        if self.repeated:
            tensors = [tensors[self.repeated.get(position, position)] for position in range(len(tensors))]
        return tuple(tensors) if self._is_plain_tuple else unflatten(self._structure, tensors)

    def without_repeated(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the results: a tensor that is there several times has one, at its first place."""
        return [None if position in self.repeated else gradient for position, gradient in enumerate(gradients)]


def with_memory_of_its_own(result: Any, foreign: Iterable[Tensor]) -> Any:
    """The result, with copies of what lies in the memory of these tensors: the next call would overwrite it there."""
    tensors, structure = flatten(result)
    taken = set(map(torch_private.storage_key, foreign))
    is_foreign = [torch_private.storage_key(tensor) in taken for tensor in tensors]
    if not any(is_foreign):
        return result
    return unflatten(structure, [_copy(t) if copied else t for t, copied in zip(tensors, is_foreign, strict=True)])


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides: what is computed from it is rounded as before."""
    if 0 in tensor.stride():
        return tensor.clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def share_memory(outputs: Sequence[Tensor]) -> set[int]:
    """Positions of outputs with a gradient that lie in the memory of another one, not the same, with a gradient."""
    again = dict(repeated_in(outputs))
    differentiable = {n: output for n, output in enumerate(outputs) if output.requires_grad and n not in again}
    keys = {n: torch_private.storage_key(output) for n, output in differentiable.items()}
    counts = Counter(keys.values())
    return {position for position, key in keys.items() if counts[key] > 1}


def parameters_behind(outputs: Sequence[Tensor], aliases: ParameterAliases) -> list[set[int]]:
    """For each output the identities of the parameters that its gradient reaches."""
    return [
        {id(aliases.original_of(leaf)) for leaf in leaves_reached([output])} if output.requires_grad else set()
        for output in outputs
    ]


def not_reached(
    parameters: Sequence[Tensor], behind: Sequence[set[int]], given: Sequence[Tensor | None], handed: Iterable[int]
) -> list[Tensor]:
    """Those of the parameters that get no gradient in a backward.

    Args:
        parameters: to choose from.
        behind: of :func:`parameters_behind`.
        given: the gradients of the outputs, each or ``None``.
        handed: outputs that get one from elsewhere.
    """
    outputs = {*(index for index, gradient in enumerate(given) if gradient is not None), *handed}
    reached = set().union(*(behind[output] for output in outputs))
    return [parameter for parameter in parameters if id(parameter) not in reached]
