"""Arguments at fixed addresses, refreshed before each replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.host_inputs import HostInputs
from graphstep.capture.signature import TensorLayout
from graphstep.capture.tree import flatten, unflatten


class StaticInputs:
    """Copies of one call's tensors at addresses that a recording may read.

    Args:
        arguments: the call's arguments; values that are not tensors are kept as they are. Copies want no gradient:
            what a backward pass would add to a batch does not reach the caller's tensors.
        device: where the copies live.
    """

    def __init__(self, arguments: Any, device: torch.device) -> None:
        tensors, self._structure = flatten(arguments)
        self._tensors = [_like(tensor, device) for tensor in tensors]
        self._host: tuple[tuple[int, ...], HostInputs] | None = None
        """For those that came from the host last time."""
        self.arguments = unflatten(self._structure, self._tensors)
        """The same nesting, with the static tensors in it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the static tensors."""
        return sum(own_entries(tensor).nbytes for tensor in self._tensors)

    def static_tensors(self) -> list[Tensor]:
        """The copies: the next load overwrites them."""
        return list(self._tensors)

    def versions(self) -> list[int]:
        """Of the static tensors: others than before where something was written into one."""
        return versions_of(self._tensors)

    def copied_out(self, result: Any) -> Any:
        """What a run returned, with copies of the tensors that lie in these: the next load would overwrite them."""
        tensors, structure = flatten(result)
        own = {tensor.untyped_storage().data_ptr() for tensor in self._tensors if tensor.numel()}
        inside = [tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in own for tensor in tensors]
        if not any(inside):
            return result
        return unflatten(structure, [t.clone() if is_own else t for t, is_own in zip(tensors, inside, strict=True)])

    def load(self, arguments: Any) -> None:
        """Copy the tensors of another call with the same signature into place.

        Host tensors in pinned memory must stay unchanged until the device has read them; see :class:`HostInputs`. Cost:
        one launch for all tensors that are on the device, a copy and a launch for those that are not.
        """
        self.load_tensors(flatten(arguments)[0])

    def load_tensors(self, tensors: Sequence[Tensor]) -> None:
        """The same for a call that is flat already."""
        from_host, here = [], []
        for target, source in zip(self._tensors, tensors, strict=True):
            if 0 in target.stride() or source.is_conj() or source.is_neg():
                refresh(target, source)
            elif target.device.type == "cuda" and source.device.type == "cpu":
                from_host.append((target, source))
            else:
                here.append((target, source))
        if here:
            # One launch for all of a dtype.
            torch._foreach_copy_([target for target, _ in here], [source for _, source in here], non_blocking=True)
        if from_host:
            self._load_from_host(from_host)

    def _load_from_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        key = tuple(id(target) for target, _ in pairs)
        if self._host is None or self._host[0] != key:
            self._host = key, HostInputs([target for target, _ in pairs])
        self._host[1].load([source for _, source in pairs])


def copies_of(result: Any) -> Any:
    """The same nesting with copies of the tensors; those with a gradient history stay as they are."""
    tensors, structure = flatten(result)
    return unflatten(structure, [each if each.requires_grad else each.detach().clone() for each in tensors])


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Others than before where something was written; those made in inference mode do not count what is written."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def refresh(target: Tensor, source: Tensor) -> None:
    """Copy the values of a tensor with the same layout, expanded dimensions included."""
    if 0 in target.stride():
        # Entries of an expanded dimension are one entry in memory, which copy_ does not write more than once.
        target, source = own_entries(target), own_entries(source)
    target.copy_(source, non_blocking=True)


def refresh_gradients(targets: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, adds: bool) -> None:
    """Copy gradients into the static ones, zeros where there is none; or add them to what is there."""
    for static, given in zip(targets, gradients, strict=True):
        if static is None:
            continue
        if given is None:
            if not adds:
                static.zero_()
        elif adds:
            static.add_(given)
        elif static.data_ptr() != given.data_ptr() or static.stride() != given.stride():
            static.copy_(given)


def own_entries(tensor: Tensor) -> Tensor:
    """The entries that have memory of their own: expanded dimensions are cut to one."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nesting with every tensor on ``device``; tensors that are there already are not copied."""
    tensors, structure = flatten(batch)
    return unflatten(structure, [tensor.to(device, non_blocking=True) for tensor in tensors])


def static_like(layout: TensorLayout, sample: Tensor | None = None) -> Tensor:
    """A tensor with a layout, outside of any pool: with the values of a sample, or zeros."""
    made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    made = made.conj() if layout.is_conj else made
    made = torch._neg_view(made) if layout.is_neg else made
    if sample is None:
        own_entries(made).zero_()
    else:
        with torch.no_grad():
            refresh(made, sample)
    return made.requires_grad_(layout.requires_grad)
