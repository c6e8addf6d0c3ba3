"""Undo of everything that a function wrote into tensors that existed before it ran."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.refusals import Refusals
from graphstep.engine.tape_ops import OperationTable, tensors_in, written_tensors


class UndoLog:
    """Copies of storages, each taken just before its first write.

    Restoring writes only storages whose content changed, and does so without touching version counters: a needless
    bump would make caches of derived tensors refresh and so hide that they are stale.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held in copies."""
        return sum(copy.nbytes for _, copy in self._saved.values())

    def contents(self) -> list[Tensor]:
        """The storages that are kept and not empty, as bytes."""
        return [content for content, _ in self._saved.values() if content.nbytes]

    def __contains__(self, storage_key: int) -> bool:
        return storage_key in self._saved

    def save(self, tensor: Tensor) -> None:
        """Keep the content of the tensor's whole storage, unless it is kept already."""
        key = torch_private.storage_key(tensor)
        if key not in self._saved:
            content = torch_private.all_bytes(tensor)
            self._saved[key] = (content, content.clone())

    def drop_unchanged(self, tensor: Tensor) -> bool:
        """Forget the copy of the tensor's storage if the storage still has that content; tells whether it has."""
        key = torch_private.storage_key(tensor)
        is_unchanged = _same_bytes(*self._saved[key])
        if is_unchanged:
            del self._saved[key]
        return is_unchanged

    def restore(self) -> None:
        """Write the kept contents back where they differ, then forget them."""
        for content, copy in self._saved.values():
            if not _same_bytes(content, copy):
                content.copy_(copy)
        self._saved.clear()


class WriteObserver(DispatchMode):
    """Feeds an :class:`UndoLog` while a function runs, and notes what the function touches.

    Kernels launched past the dispatcher are not seen; tensors known to be written by such are saved by the caller.
    What is to be undone cannot replace the memory of a tensor that existed before: that is a :class:`CaptureError`.

    Args:
        log: keeps what is overwritten; ``None`` where nothing is to be undone. Then no memory is held that the function
            lets go of.
        table: facts about operations.
    """

    def __init__(self, log: UndoLog | None, table: OperationTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._table = table
        self._created: dict[int, torch_private.WeakStorage] = {}
        self._external: dict[int, Tensor | torch_private.WeakStorage] = {}
        self._first_seen: dict[int, weakref.ref[Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._outer_pass = torch_private.backward_pass()
        self.only_in_backward: set[int] = set()
        """Storages that existed before and were first used in a backward pass, by key."""
        self.sees_saved_taken = False
        """An operation ran under hooks that take what autograd saves."""
        self._generator_states: dict[int, tuple[torch.Generator, Tensor]] = {}

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators that were given to operations by name, in the order of first use."""
        return [generator for generator, _ in self._generator_states.values()]

    @property
    def leaves(self) -> list[Tensor]:
        """Leaf tensors that want a gradient, in the order of first use."""
        return [leaf for leaf, _ in self._gradients.values()]

    @property
    def externals(self) -> list[Tensor]:
        """One alias over each storage that existed before and was used; without a log, of those still there."""
        found = (each if isinstance(each, Tensor) else each.as_bytes() for each in self._external.values())
        return [each for each in found if each is not None]

    def gone(self) -> dict[int, torch_private.WeakStorage]:
        """The others, by key, which no other storage has as long as the values live."""
        weak = ((key, each) for key, each in self._external.items() if not isinstance(each, Tensor))
        return {key: each for key, each in weak if each.is_gone()}

    @property
    def sources(self) -> list[weakref.ref[Tensor]]:
        """For each of :attr:`externals`, the tensor that was used first, as long as others keep it."""
        return list(self._first_seen.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_private.unwraps_itself(types):
            return NotImplemented
        given = self._note([*args, *kwargs.values()])
        self.sees_saved_taken = self.sees_saved_taken or torch_private.saved_tensors_are_taken()
        log = self._log
        if log is not None:
            traits = self._table.of(func)
            # A GPU would capture what is done with the new memory, and no replay would replace it.
            if traits.changes_storage and torch_private.storage_key(args[0]) not in self._created:
                Refusals().storage_change(traits.name)
            for tensor in written_tensors(traits, args, kwargs):
                if torch_private.storage_key(tensor) not in self._created:
                    log.save(tensor)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            key = torch_private.storage_key(tensor)
            if key not in given and key not in self._created and key not in self._external:
                self._created[key] = torch_private.WeakStorage(tensor)
        return result

    def restore_gradients(self) -> None:
        """Give every leaf the ``.grad`` object that it had when it was first used."""
        for leaf, gradient in self._gradients.values():
            if leaf.grad is not gradient:
                leaf.grad = gradient

    def restore_generators(self) -> None:
        """Put the named generators back to the state of their first use."""
        for generator, state in self._generator_states.values():
            generator.set_state(state)

    def _note(self, values: Sequence[Any]) -> set[int]:
        given = set()
        for value in values:
            if isinstance(value, torch.Generator):
                self._generator_states.setdefault(id(value), (value, value.get_state()))
                continue
            for tensor in tensors_in(value):
                key = torch_private.storage_key(tensor)
                given.add(key)
                if key not in self._created and key not in self._external:
                    # What compiled code makes past the dispatcher seems to have been there before. To hold that would
                    # keep all activations; what is undone, and what is asked for lost tensors, is held.
                    is_held = self._log is not None
                    self._external[key] = tensor.detach() if is_held else torch_private.WeakStorage(tensor)
                    self._first_seen[key] = weakref.ref(tensor)
                    if torch_private.backward_pass() not in (None, self._outer_pass):
                        self.only_in_backward.add(key)
                if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._gradients:
                    self._gradients[id(tensor)] = (tensor, tensor.grad)
        return given


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    if left.device.type != "cpu":
        # Comparing would wait for the device; a copy is as cheap and the version counter is not the user's.
        return False
    return bool(torch.equal(left, right))
