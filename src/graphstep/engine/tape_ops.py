"""What the tape has to know of an ATen operation: what it writes, whether it can be replayed, and how."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from graphstep.engine import torch_private


class Replay(enum.Enum):
    """How a recorded call is repeated."""

    VIEW = "nothing to do for a view of fixed storage; where it had to copy, as COPY"
    NOTHING = "nothing to do: memory without content"
    CONSTANT = "restore the content that the function brought with it"
    CALL = "call again: it writes into its own arguments"
    OUT = "call the out-variant on the recorded results, if it gives the same; else as COPY"
    COPY = "call again and copy the results into the recorded ones"
    COLLECTIVE = "call again, wait, and copy the results that are new"


@dataclass(frozen=True, slots=True)
class OperationTraits:
    """Facts about one overload, from its schema and tags."""

    name: str
    replay: Replay
    argument_names: tuple[str, ...] = ()
    written: tuple[tuple[int, str], ...] = ()
    """Arguments that it writes: position and name."""
    out_variant: Any = None
    out_names: tuple[str, ...] = ()
    out_arguments: frozenset[str] = frozenset()
    """Keyword arguments that the out-variant takes besides its outputs."""
    is_random: bool = False
    is_composite: bool = False
    """It is made of other operations; those are recorded."""
    is_foreign: bool = False
    """It is not one of ATen's: it may draw random numbers and write its arguments without saying so."""
    reads_host: bool = False
    """It hands a value of a tensor to the host."""
    has_dynamic_shape: bool = False
    """The shape of its result depends on values."""
    changes_storage: bool = False
    """It replaces or resizes the storage of an argument."""
    changes_metadata: bool = False
    """It changes the shape or strides of an argument in place."""
    writes_index: bool = False
    """It writes where an index says."""


@dataclass(slots=True)
class OperationTable:
    """Traits by overload, computed when an overload is first seen."""

    _known: dict[Any, OperationTraits] = field(default_factory=dict)

    def of(self, operation: Any) -> OperationTraits:
        """Traits of an overload such as ``torch.ops.aten.mm.default``."""
        traits = self._known.get(operation)
        if traits is None:
            traits = self._known[operation] = _describe(operation)
        return traits


COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_TORCH_NAMESPACES = frozenset({"aten", "prims"})
_LIFTS = frozenset({"aten::lift_fresh"})
_WITHOUT_CONTENT = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::_efficientzerotensor",
    }
)
_UNANNOTATED_WRITES = MappingProxyType(
    {
        # Running statistics, written in training mode. The schemas do not say so.
        "aten::native_batch_norm": ("running_mean", "running_var"),
        "aten::cudnn_batch_norm": ("running_mean", "running_var"),
        "aten::miopen_batch_norm": ("running_mean", "running_var"),
        "aten::batch_norm_update_stats": ("running_mean", "running_var"),
        "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
        "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    }
)
_OUT_REPLACES_MEMORY = frozenset(
    # Where they reduce, their out-variants grow the result to the shape of the arguments on the way, with a warning.
    f"aten::{name}"
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
)
_HOST_READERS = frozenset({"aten::_linalg_check_errors"})  # data-dependent, but without the tag
_INDEX_WRITERS = frozenset({"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"})
_STORAGE_CHANGERS = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"})
_TENSOR_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def _describe(operation: Any) -> OperationTraits:
    schema = operation._schema
    tags = frozenset(operation.tags)
    annotated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    unannotated = _UNANNOTATED_WRITES.get(schema.name, ())
    is_collective = operation.namespace in COLLECTIVE_NAMESPACES
    facts: dict[str, Any] = {
        "name": f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name,
        "argument_names": tuple(argument.name for argument in schema.arguments),
        "written": tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.name in annotated or argument.name in unannotated
        ),
        "is_random": torch.Tag.nondeterministic_seeded in tags,
        "is_composite": torch_private.is_composite(operation),
        "is_foreign": not is_collective and operation.namespace not in _TORCH_NAMESPACES,
        "reads_host": torch.Tag.data_dependent_output in tags or schema.name in _HOST_READERS,
        "has_dynamic_shape": torch.Tag.dynamic_output_shape in tags,
        "changes_storage": schema.name in _STORAGE_CHANGERS,
        "changes_metadata": torch.Tag.inplace_view in tags and schema.name != "aten::detach_",
        "writes_index": schema.name in _INDEX_WRITERS,
    }
    has_views = any(argument.alias_info is not None for argument in schema.arguments)
    replay = Replay.COPY
    if is_collective:
        replay = Replay.COLLECTIVE
    elif annotated or not schema.returns:
        replay = Replay.CALL
    elif schema.name in _LIFTS:
        replay = Replay.CONSTANT
    elif schema.name in _WITHOUT_CONTENT:
        replay = Replay.NOTHING
    elif has_views:
        replay = Replay.VIEW
    elif not facts["is_random"] and not unannotated and schema.name not in _OUT_REPLACES_MEMORY:
        # Random operations keep their own kernel: only that one is known to draw the same numbers in the same order.
        # So do those that write arguments: out-variants are tried before they are used.
        found = _out_variant(operation)
        if found is not None:
            variant, out_names = found
            accepted = frozenset(a.name for a in variant._schema.arguments if a.name not in out_names)
            return OperationTraits(
                replay=Replay.OUT, out_variant=variant, out_names=out_names, out_arguments=accepted, **facts
            )
    return OperationTraits(replay=replay, **facts)


def _out_variant(operation: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload that computes the same into given tensors, and the names of those.

    The dispatcher has no link from an operation to its out-variant: the match is by arguments. Tensor options may be
    missing there, since the given tensors carry them.
    """
    if operation.namespace != "aten":
        return None
    schema = operation._schema
    if not all(isinstance(result.type, torch.TensorType) for result in schema.returns):
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    packet = operation.overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        outs = tuple(a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)
        if len(outs) != len(schema.returns) or len(outs) == 0:
            continue
        given = [(a.name, str(a.type)) for a in arguments if a.name not in outs]
        names = {name for name, _ in given}
        if given == [pair for pair in wanted if pair[0] in names or pair[0] not in _TENSOR_OPTIONS]:
            return candidate, outs
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an argument or result, through lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def replace_tensors(value: Any, change: Any) -> Any:
    """The same argument with ``change`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [replace_tensors(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(replace_tensors(item, change) for item in value)
    return value


def written_tensors(traits: OperationTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call writes. Collectives do not say which, so all of their tensors count."""
    if traits.replay is Replay.COLLECTIVE:
        yield from tensors_in(list(args))
        yield from tensors_in(list(kwargs.values()))
        return
    for position, name in traits.written:
        yield from tensors_in(args[position] if position < len(args) else kwargs.get(name))


def has_boolean_index(args: Sequence[Any]) -> bool:
    """True for ``index`` and its relatives called with a mask, whose result depends on how many entries are set."""
    indices = args[1] if len(args) > 1 else ()
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(indices))
