"""What a recording was captured for: the layout of its arguments and the modes around the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.capture.ambient import AmbientState
from graphstep.capture.tree import Node, Value, flatten, step_of, tensor_paths
from graphstep.errors import InputMismatchError


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Everything about a tensor argument except its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_conj: bool = False
    """What is in memory is the conjugate of its values."""
    is_neg: bool = False
    """What is in memory is the negative of its values."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """The layout of a tensor."""
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        flags = {"requires_grad": self.requires_grad, "conjugated": self.is_conj, "negated": self.is_neg}
        return " ".join([f"{self.shape} {dtype} {self.device}", *(name for name, is_set in flags.items() if is_set)])

    def explain(self, other: TensorLayout) -> str:
        """What differs, in words; empty if nothing."""
        names = [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]
        if not names:
            return ""
        detail = f" stride {self.stride} -> {other.stride}" if names == ["stride"] else ""
        return f"changed {', '.join(names)}: captured {self}, got {other}{detail}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Structure and layout of the arguments, modes, and the training flags of the modules involved. Hashable."""

    structure: Node | Value
    layouts: tuple[TensorLayout, ...]
    ambient: AmbientState
    training: tuple[bool, ...] = ()
    repeated: tuple[tuple[int, int], ...] = ()
    """Positions of tensors that are the same object as an earlier one, each with the position of that one."""
    trainable: tuple[bool, ...] = ()
    """``requires_grad`` of the parameters involved, where frozen ones are no error."""

    @classmethod
    def of(
        cls,
        arguments: Any,
        *,
        device_type: str,
        modules: Sequence[nn.Module] = (),
        are_copied: bool = False,
        trainable: tuple[bool, ...] = (),
    ) -> Signature:
        """The signature of a call.

        Args:
            arguments: any nesting of containers, dataclasses, tensors and values.
            device_type: ``cuda`` or ``cpu``, for the autocast state.
            modules: modules whose ``training`` flags matter.
            trainable: see the attribute.
            are_copied: what is called gets a copy of each tensor, whether some of them are the same or not.

        Raises:
            InputMismatchError: a tensor has no strides (a sparse or jagged one).
        """
        tensors, structure = flatten(arguments)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise InputMismatchError(_not_dense(tensors, tensor_paths(structure, "arguments")), fix="call to_dense()")
        return cls(
            structure,
            tuple(TensorLayout.of(tensor) for tensor in tensors),
            AmbientState.now(device_type),
            tuple(module.training for module in modules),
            repeated_in(tensors) if len(tensors) > 1 and not are_copied else (),
            trainable,
        )

    def differences(self, other: Signature, root: str = "arguments") -> list[str]:
        """Every way in which ``other`` differs from this captured signature, each with its path."""
        found = list(_structure_differences(self.structure, other.structure, root))
        given = dict(zip(tensor_paths(other.structure, root), other.layouts, strict=True))
        for path, mine in zip(tensor_paths(self.structure, root), self.layouts, strict=True):
            text = mine.explain(given[path]) if path in given else ""
            if text:
                found.append(f"{path} {text}")
        for name in AmbientState.__slots__:
            captured, given = getattr(self.ambient, name), getattr(other.ambient, name)
            if captured != given:
                found.append(f"{name} was {captured} at capture and is {given}")
        if self.repeated != other.repeated:
            found.append("other arguments than at capture are one and the same tensor")
        if self.training != other.training:
            found.append("the training flags of the modules changed (train() or eval() was called)")
        if self.trainable != other.trainable:
            found.append("parameters were frozen or thawed (requires_grad_() was called)")
        return found


def repeated_in(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """See :attr:`Signature.repeated`."""
    first: dict[int, int] = {}
    places = [(position, first.setdefault(id(tensor), position)) for position, tensor in enumerate(tensors)]
    return tuple(place for place in places if place[0] != place[1]) if len(first) < len(tensors) else ()


def _not_dense(tensors: Sequence[Tensor], paths: Sequence[str]) -> str:
    found = [
        f"{path} is a {str(tensor.layout).removeprefix('torch.')} tensor"
        for path, tensor in zip(paths, tensors, strict=True)
        if tensor.layout is not torch.strided
    ]
    return f"{'; '.join(found)}; a graph needs tensors with strides"


def _structure_differences(mine: Node | Value, theirs: Node | Value, path: str) -> Iterator[str]:
    if mine == theirs:
        return
    if isinstance(mine, Value) and isinstance(theirs, Value):
        yield f"{path} changed value: captured {mine.value!r}, got {theirs.value!r}"
    elif isinstance(mine, Node) and isinstance(theirs, Node) and mine.kind is theirs.kind and mine.kind is not None:
        missing = [name for name in mine.names if name not in theirs.names]
        added = [name for name in theirs.names if name not in mine.names]
        yield from (f"{path}{step_of(mine.kind, name)} is missing" for name in missing)
        yield from (f"{path}{step_of(mine.kind, name)} was not there at capture" for name in added)
        other = dict(zip(theirs.names, theirs.children, strict=True))
        for name, child in zip(mine.names, mine.children, strict=True):
            if name in other:
                yield from _structure_differences(child, other[name], path + step_of(mine.kind, name))
        if not missing and not added and mine.names != theirs.names:
            yield f"{path} has its entries in another order"
    else:
        yield f"{path} changed kind: captured {_kind(mine)}, got {_kind(theirs)}"


def _kind(structure: Node | Value) -> str:
    if isinstance(structure, Value):
        return type(structure.value).__name__
    return "tensor" if structure.kind is None else structure.kind.__name__
