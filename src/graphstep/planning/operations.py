"""The operations of a step and the memory that they allocate, by the part that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode, compiled_code_off
from graphstep.engine.tape_ops import OperationTable, OperationTraits, Replay, tensors_in
from graphstep.planning.scopes import Scopes

MODEL: Final = "model"
"""Stands for parameters and buffers."""
_MANY_BLOCKS: Final = 256
"""For each so many blocks that are alive, memory that was freed is looked for one operation later."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One that a GPU would launch a kernel for: views and empty memory do not count."""

    name: str
    scope: str
    is_backward: bool
    microbatch: int = 0
    is_random: bool = False


@dataclass(slots=True)
class Block:
    """Memory that an operation allocated. ``born`` and ``died`` count operations, views included."""

    nbytes: int
    scope: str
    is_backward: bool
    microbatch: int
    born: int
    died: int | None = None
    """None: it outlived the step, as gradients and the state of optimizers do."""

    @property
    def outlives(self) -> bool:
        """True for what is no memory of the step alone."""
        return self.died is None


@dataclass(frozen=True, slots=True)
class Entry:
    """The arguments of a part when its forward began."""

    scope: str
    microbatch: int
    made_by: tuple[str | None, ...]
    """For each tensor the scope that allocated its memory in this step; ``MODEL`` for what the model owns, None for
    other memory from before."""
    nbytes: tuple[int, ...]
    memory: tuple[int, ...] = ()
    """For each tensor which memory it lies in: equal for those that share it."""


@dataclass(slots=True)
class StepLog:
    """What one step did."""

    operations: list[Operation] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    num_microbatches: int = 0

    def peak_bytes(self, chosen: Callable[[Block], bool] = lambda _: True) -> int:
        """Largest sum of chosen blocks that were alive together, without those that outlive the step."""
        return peak_bytes(block for block in self.blocks if not block.outlives and chosen(block))


def peak_bytes(blocks: Iterable[Block]) -> int:
    """Largest sum of those that are alive together."""
    changes: list[tuple[int, int]] = []
    for block in blocks:
        changes.append((block.born, block.nbytes))
        if block.died is not None:
            changes.append((block.died, -block.nbytes))
    # At one moment, memory is freed before it is taken: it was seen some operations late.
    largest = now = 0
    for _, change in sorted(changes):
        now += change
        largest = max(largest, now)
    return largest


def log_step(run: Callable[[Scopes], Any], device: torch.device, owned: Iterable[Tensor] = ()) -> StepLog:
    """Run a step under observation. It runs for real.

    Args:
        run: runs a whole step while the scopes that it is given are installed.
        device: operations on other devices are left out.
        owned: parameters and buffers of the model.
    """
    logger = StepLogger(device, owned)
    scopes = Scopes(on_change=logger.look, on_entry=logger.entered)
    logger.follow(scopes)
    with compiled_code_off(), logger:
        run(scopes)
        logger.log.num_microbatches = scopes.num_microbatches
    logger.look()
    return logger.log


class StepLogger(DispatchMode):
    """Writes a :class:`StepLog` while it is entered."""

    def __init__(self, device: torch.device, owned: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owned = {torch_private.storage_key(tensor) for tensor in owned}
        self.log = StepLog()
        self._device = device
        self._table = OperationTable()
        self._scopes: Scopes | None = None
        self._num_seen = 0
        self._alive: dict[int, tuple[torch_private.WeakStorage, Block]] = {}

    def follow(self, scopes: Scopes) -> None:
        """Say where the scope of an operation is read."""
        self._scopes = scopes

    def entered(self, scope: str, tensors: Sequence[Tensor]) -> None:
        """The forward of a part begins."""
        found = [tensor for tensor in tensors if tensor.device.type == self._device.type]
        keys = [torch_private.storage_key(tensor) for tensor in found]
        makers = [
            MODEL if key in self._owned else self._alive[key][1].scope if key in self._alive else None for key in keys
        ]
        self.log.entries.append(
            Entry(
                scope,
                self._scopes.microbatch if self._scopes is not None else 0,
                tuple(makers),
                tuple(tensor.numel() * tensor.element_size() for tensor in found),
                # Names of memory that is freed are given again; when it was allocated is its own.
                tuple(self._alive[key][1].born if key in self._alive else -key for key in keys),
            )
        )

    def look(self, *_: Any) -> None:
        """Note what has been freed."""
        for key, (storage, block) in list(self._alive.items()):
            if storage.is_gone():
                # The operation that was seen last may still have read it.
                block.died = self._num_seen + 1
                del self._alive[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Once, from what goes in: what the operation gives may lie in new memory under an old name.
        given = list(tensors_in((args, tuple(kwargs.values()))))
        known = {torch_private.storage_key(tensor) for tensor in given}
        is_ours = any(tensor.device.type == self._device.type for tensor in given)
        del types, given
        result = func(*args, **kwargs)
        traits = self._table.of(func)
        is_random = traits.is_random and not _drops_nothing(traits, args, kwargs)
        self._note(traits, known, result, is_ours=is_ours, is_random=is_random)
        return result

    def _note(self, traits: OperationTraits, known: set[int], result: Any, *, is_ours: bool, is_random: bool) -> None:
        self._num_seen += 1
        if self._num_seen % (1 + len(self._alive) // _MANY_BLOCKS) == 0:
            self.look()
        made = [tensor for tensor in tensors_in(result) if tensor.device.type == self._device.type]
        if self._scopes is None or not (made or is_ours):
            return
        is_view = traits.replay in (Replay.VIEW, Replay.NOTHING) or (
            bool(made) and not traits.written and all(torch_private.storage_key(tensor) in known for tensor in made)
        )
        scope, is_backward = self._scopes.current, torch_private.backward_pass() is not None
        if not is_view and not traits.name.startswith("profiler::"):
            self.log.operations.append(Operation(traits.name, scope, is_backward, self._scopes.microbatch, is_random))
        for tensor in made:
            key = torch_private.storage_key(tensor)
            if key in known:
                continue
            known.add(key)
            old = self._alive.get(key)
            if old is not None:
                if not old[0].is_gone():
                    continue
                old[1].died = self._num_seen
            nbytes = tensor.untyped_storage().nbytes()
            block = Block(nbytes, scope, is_backward, self._scopes.microbatch, self._num_seen)
            self._alive[key] = (torch_private.WeakStorage(tensor), block)
            self.log.blocks.append(block)


def _drops_nothing(traits: OperationTraits, args: Sequence[Any], kwargs: Any) -> bool:
    """True for attention without dropout: it could draw random numbers, and does not."""
    if "dropout_p" not in traits.argument_names:
        return False
    place = traits.argument_names.index("dropout_p")
    return float(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0
