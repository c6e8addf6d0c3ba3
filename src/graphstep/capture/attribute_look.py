"""Whether attributes are surely as they were when noted: the common case, at the speed of C."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice, repeat
from operator import is_
from typing import TYPE_CHECKING, Any, Final

from graphstep.capture.fast_check import all_same
from graphstep.capture.places import GONE
from graphstep.native.interface import Facts

if TYPE_CHECKING:
    from graphstep.capture.attributes import Attributes

_LARGE_OBJECT: Final = 8
"""Entries."""


class FastLook:
    """For several of them: answers "surely as they were", or "look closer", at the speed of C."""

    def __init__(self, watched: Iterable[Attributes]) -> None:
        watched = list(watched)
        noted = [each._noted for each in watched]
        # Modules share configurations: once is enough.
        entries = {(id(owner), name): (owner, name) for each in noted for _, owner, name, _ in each.entries}
        values = {(id(owner), name, id(value)): value for each in noted for _, owner, name, value in each.entries}
        self._is_possible = len(entries) == len(values)
        """Else two of them have noted different values of one attribute."""
        noted_of: dict[int, list[Any]] = {}
        for (number, _, _), value in values.items():
            noted_of.setdefault(number, []).append(value)
        owners = {id(owner): owner for owner, _ in entries.values()}
        # Of a large object, such as a configuration, all entries are compared in their order: at half the price.
        self._whole = [
            owner for number, owner in owners.items() if len(owner) == len(noted_of[number]) >= _LARGE_OBJECT
        ]
        self._in_whole = [value for owner in self._whole for value in noted_of[id(owner)]]
        whole = set(map(id, self._whole))
        apart = {key: value for key, value in values.items() if key[0] not in whole}
        self._attributes = [owners[number] for number, _, _ in apart]
        self._names = [name for _, name, _ in apart]
        self._values = list(apart.values())
        sized = {id(owner): (owner, len(keys)) for each in noted for _, owner, keys in each.dicts}
        sized.update((id(owner), (owner, size)) for each in noted for _, owner, size in each.large)
        sequences = {id(owner): (owner, before) for each in noted for _, owner, before in each.sequences}
        sized.update((number, (owner, len(before))) for number, (owner, before) in sequences.items())
        self._sized = [owner for owner, _ in sized.values()]
        self._sizes = [size for _, size in sized.values()]
        self._sequences = [owner for owner, before in sequences.values() if before]
        self._elements = [element for _, before in sequences.values() for element in before]
        slots = [slot for each in noted for slot in each.slots]
        self._slot_owners = [owner for _, owner, _, _ in slots]
        self._slot_names = [name for _, _, name, _ in slots]
        self._slot_values = [value for _, _, _, value in slots]
        self._arrays = [array for each in noted for array in each.arrays]
        module_hooks = {id(hooks): hooks for each in watched for _, hooks, _ in each._module_hooks}
        self._module_hooks = list(module_hooks.values())
        tensor_hooks = [(parameter, name) for each in watched for _, parameter, name, _ in each._tensor_hooks]
        self._parameters = [parameter for parameter, _ in tensor_hooks]
        self._hook_names = [name for _, name in tensor_hooks]
        kinds = [each._module_hooks for each in watched], [each._tensor_hooks for each in watched]
        self._had_hooks = any(entry[-1] for kind in kinds for entries in kind for entry in entries)

    def holds(self) -> bool:
        """True if all attributes are the same objects, arrays have their content, and no hooks are or were there."""
        return (
            self._is_possible
            and not self._had_hooks
            and not any(self._module_hooks)
            and not (self._parameters and any(map(getattr, self._parameters, self._hook_names, repeat(None))))
            and list(map(len, self._sized)) == self._sizes
            and all(map(is_, self._values, map(dict.get, self._attributes, self._names)))
            and (not self._whole or all_same(self._in_whole, chain.from_iterable(map(dict.values, self._whole))))
            and (not self._elements or all_same(self._elements, chain.from_iterable(self._sequences)))
            and (
                not self._slot_values
                or all_same(self._slot_values, map(getattr, self._slot_owners, self._slot_names, repeat(GONE)))
            )
            and not (self._arrays and any(array.has_changed() for array in self._arrays))
        )

    def add_to(self, facts: Facts) -> bool:
        """Have the compiled part look at the same. False if there is what it never finds as it was, or an array."""
        if not self._is_possible or self._had_hooks or self._parameters or self._arrays:
            return False
        if any(value is GONE for value in self._values):
            return False
        for hooks in self._module_hooks:
            facts.size(hooks, 0)
        for owner, size in zip(self._sized, self._sizes, strict=True):
            facts.size(owner, size)
        for owner, name, value in zip(self._attributes, self._names, self._values, strict=True):
            facts.entry(owner, name, value)
        in_whole, elements = iter(self._in_whole), iter(self._elements)
        for owner in self._whole:
            facts.whole(owner, tuple(islice(in_whole, len(owner))))
        for sequence in self._sequences:
            facts.elements(sequence, tuple(islice(elements, len(sequence))))
        for owner, name, value in zip(self._slot_owners, self._slot_names, self._slot_values, strict=True):
            if value is GONE:
                return False
            facts.slot(owner, name, value)
        return True
