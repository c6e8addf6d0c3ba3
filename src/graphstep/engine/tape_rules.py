"""What a tape refuses, because a graph on a GPU could not do it either or a replay would not repeat it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from graphstep.engine import torch_private
from graphstep.engine.refusals import Refusals
from graphstep.engine.tape_ops import OperationTraits, has_boolean_index


class CaptureRules:
    """Checks each operation before it runs.

    Args:
        created: keys of the storages that the captured function allocated.
        constants: keys of those that it made from Python values.
    """

    def __init__(self, refusals: Refusals, created: Container[int], constants: Container[int]) -> None:
        self._refusals = refusals
        self._created = created
        self._constants = constants

    def check(self, traits: OperationTraits, args: Any, kwargs: Any) -> None:
        """Refuse the call if a graph cannot repeat it.

        Raises:
            CaptureError: names the operation, the user's line and the way out.
        """
        if traits.reads_host:
            self._refusals.host_read(traits.name, "keep the value in a tensor, or read it after the replay")
        if traits.changes_storage:
            self._refusals.storage_change(traits.name)
        if traits.has_dynamic_shape and _shape_depends_on_values(traits, args, kwargs):
            self._refusals.refuse(
                f"{traits.name} has a result whose shape depends on values",
                "use torch.where or a multiplication by the mask, or an explicit size (output_size=)",
            )
        if traits.writes_index:
            self._check_index_write(traits, args)
        if traits.changes_metadata and torch_private.storage_key(args[0]) not in self._created:
            self._refusals.refuse(
                f"{traits.name} changes the shape of a tensor from outside the captured function; a replay would not",
                "use the form that returns a view, such as t() for t_()",
            )

    def _check_index_write(self, traits: OperationTraits, args: Any) -> None:
        value, accumulates = args[2], len(args) > 3 and args[3]
        is_number = value.numel() == 1 and torch_private.storage_key(value) in self._constants and not accumulates
        if has_boolean_index(args) and not is_number:  # `x[mask] = 1.0` needs no count, on a GPU neither.
            self._refusals.refuse(
                f"{traits.name} with a mask writes as many entries as the mask has set",
                "use torch.where, masked_fill_ or masked_scatter_",
            )
        if not has_boolean_index(args) and is_number:
            self._refusals.refuse(
                f"{traits.name} copies a number from the host to where a tensor of positions says",
                "use index_fill_ or scatter_, which take numbers, or write a tensor of the device",
            )


def _shape_depends_on_values(traits: OperationTraits, args: Any, kwargs: Any) -> bool:
    if traits.name.startswith("aten::index"):
        return has_boolean_index(args)
    if traits.name.startswith("aten::repeat_interleave"):
        return kwargs.get("output_size") is None
    return True
