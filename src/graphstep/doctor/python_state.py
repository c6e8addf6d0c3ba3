"""What Python keeps from run to run: attributes, variables, weights and buffers, and random numbers of the host.

One run shows what changes; in the next ones each of these places is looked at after every line of the user's, which
tells the line that changes it.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.capture.attributes import Attributes
from graphstep.capture.places import GONE, PLAIN, Place, join, storage_of
from graphstep.capture.randomness import state_of
from graphstep.doctor.findings import SourceLine
from graphstep.doctor.lines import Spot
from graphstep.doctor.notes import Notes

Named = tuple[str, nn.Module]


@dataclass(slots=True)
class Change:
    """A place whose content differs after a run."""

    code: str
    path: str
    detail: str
    read: Callable[[], Any]
    """What is there now, to be compared."""


class PythonState:
    """The state of Python at one moment.

    Args:
        modules: all of the step, with their paths.
        places: variables and attributes that its code reads.
        optimizers: those that step.
    """

    def __init__(self, modules: Sequence[Named], places: Sequence[Place], optimizers: Sequence[Optimizer]) -> None:
        modules = [each for each in modules if not isinstance(each[1], torch.jit.ScriptModule)]
        self._modules = modules
        self._attributes = Attributes(modules, places=[place for place in places if place.key not in _SKIPPED])
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._rates = [dict(group) for group in self._groups]
        self._tensors = list(_own_tensors(modules))
        self._trained = [(path, tensor, tensor.requires_grad) for path, _, _, tensor, _ in self._tensors]
        self._children = [(path, module._modules, dict(module._modules)) for path, module in modules]
        self._random = _host_random()
        self._generators = [
            (place.path, generator, state)
            for place in places
            if (state := state_of(generator := place.value())) is not None
        ]

    def changes(self, used: set[int]) -> list[Change]:
        """What differs by now.

        Args:
            used: storages that the run has used and not made.
        """
        return [
            *self._weights(),
            *self._children_set(),
            *self._rates_set(),
            *self._drawn(),
            *self._attributes_set(used),
        ]

    def _weights(self) -> Iterator[Change]:
        for path, owner, key, tensor, storage in self._tensors:
            now = owner.get(key)
            if now is tensor and storage_of(now) == storage:
                continue
            code = "GS-W001" if isinstance(tensor, nn.Parameter) else "GS-W003"
            yield Change(code, path, path, _reader_of_tensor(owner, key))
        for path, tensor, before in self._trained:
            if tensor.requires_grad != before:
                name = f"{path}.requires_grad"
                detail = f"{name}: {before} before, {tensor.requires_grad} after"
                yield Change("GS-Y001", name, detail, partial(getattr, tensor, "requires_grad"))

    def _children_set(self) -> Iterator[Change]:
        for path, owner, before in self._children:
            detail = f"{path}: {len(before)} modules before, {len(owner)} after"
            if len(owner) != len(before):
                yield Change("GS-Y002", path, detail, _reader_of_size(owner))
            for key in before.keys() & owner.keys():
                if owner[key] is not before[key]:
                    yield Change("GS-W001", join(path, key), f"{join(path, key)}, a module", _reader(owner, key))

    def _rates_set(self) -> Iterator[Change]:
        for group, before in zip(self._groups, self._rates, strict=True):
            for key, value in before.items():
                now = group.get(key)
                if isinstance(value, int | float) and isinstance(now, int | float) and value != now:
                    yield Change("GS-O002", key, f"{key}: {value!r} before, {now!r} after", _reader(group, key))

    def _drawn(self) -> Iterator[Change]:
        now = _host_random()
        for name, read in _HOST_RANDOM.items():
            if now[name] != self._random[name]:
                yield Change("GS-R001", name, name, read)
        for path, generator, state in (*self._generators, *self._attributes.noted.generators):
            if state_of(generator) != state:
                yield Change("GS-R001", path, path, partial(state_of, generator))

    def _attributes_set(self, used: set[int]) -> Iterator[Change]:
        before, now = self._attributes.noted, self._attributes.again().noted
        readers = {path: _reader(owner, key) for path, owner, key, _ in (*before.entries, *before.slots)}
        for path, owner, elements in before.sequences:
            if isinstance(owner, list | deque):
                readers.update((f"{path}[{index}]", _reader(owner, index)) for index in range(len(elements)))
        for path, value in before.values.items():  # Of a tuple in a tuple the outer one comes first.
            if isinstance(value, tuple) and path in readers:  # It is replaced as a whole.
                read = readers[path]
                readers.update((f"{path}[{index}]", _reader_of_entry(read, index)) for index in range(len(value)))
        _read_from_above(readers, before.values, now.values)
        for path, array, _ in (each for each in before.arrays if each.has_changed()):
            yield Change("GS-Y001", path, f"{path}: another content after", array.tobytes)
        for path, value in before.values.items():
            after = now.values.get(path, GONE)
            if path in readers and isinstance(value, _COMPARED) and isinstance(after, _COMPARED) and value != after:
                yield Change("GS-Y001", path, f"{path}: {value!r} before, {after!r} after", readers[path])
            elif isinstance(value, Tensor | None) and isinstance(after, Tensor) and after is not value:
                yield from self._tensor_set(path, value, after, used, readers)
        for path, size in before.sizes.items():
            if path in readers and now.sizes.get(path, size) != size and before.values[path] is not now.values[path]:
                yield Change("GS-Y002", path, f"{path}: {size} entries before, {now.sizes[path]} after", readers[path])
        held = [(path, owner, len(elements)) for path, owner, elements in (*before.sequences, *before.dicts)]
        for path, owner, size in (*held, *before.large):
            if len(owner) != size:
                detail = f"{path}: {size} entries before, {len(owner)} after"
                yield Change("GS-Y002", path, detail, _reader_of_size(owner))

    def _tensor_set(
        self, path: str, value: Tensor | None, after: Tensor, used: set[int], readers: dict[str, Callable[[], Any]]
    ) -> Iterator[Change]:
        if path not in readers or any(value is tensor for _, _, _, tensor, _ in self._tensors):
            return
        storage = storage_of(value)
        if storage is not None and storage in used and storage != storage_of(after):
            yield Change("GS-Y004", path, path, readers[path])
        elif after.requires_grad and after.grad_fn is not None:
            yield Change("GS-Y003", path, path, readers[path])


class LineFinder:
    """Finds the lines that change some places, by looking after each line."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._changes: list[Change] = []
        self._seen: list[Any] = []
        self._found: set[int] = set()
        self._num_watched = 0

    def watch(self, changes: Iterable[Change]) -> None:
        """Look at these from now on."""
        known = {(change.code, change.path) for change in self._changes}
        self._changes += [change for change in changes if (change.code, change.path) not in known]

    def begin(self) -> None:
        """A run begins."""
        self._seen = [change.read() for change in self._changes]
        self._num_watched = len(self._changes)

    def after_line(self, line: SourceLine | None) -> None:
        """A line has run."""
        if line is None or not self._seen:
            return
        for index, change in enumerate(self._changes):
            now = change.read()
            if not _is_same(now, self._seen[index]):
                self._seen[index] = now
                self._found.add(index)
                self._add(change, line)

    def finish(self) -> None:
        """Name what changed in the last run only, at the step itself. What did not change again has settled."""
        for index, change in enumerate(self._changes):
            if index not in self._found and index >= self._num_watched:
                self._add(change, self._notes.ground.fallback)

    def _add(self, change: Change, line: SourceLine) -> None:
        spot = Spot(line, True, True, "", frozenset(), frozenset(), False)
        self._notes.add(change.code, _operation(change), detail=change.detail, spot=spot, part="")


_COMPARED: Final = (*PLAIN, Enum)
_SKIPPED: Final = frozenset({"__defaults__", "__kwdefaults__"})


def _operation(change: Change) -> str:
    if change.code == "GS-R001":
        return f"a number from {change.path}"
    if change.code == "GS-Y002":
        return f"{change.path} gets longer or shorter"
    return f"{change.path} is set"


def _read_from_above(readers: dict[str, Callable[[], Any]], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Watch the place of an object that a run replaces, not what lay in it: there is the line that replaces it."""
    for path in list(readers):
        ends = (end for end, sign in enumerate(path) if sign in ".[" and path[:end] in readers)
        above = next((path[:end] for end in ends if before.get(path[:end]) is not now.get(path[:end], GONE)), None)
        if above is not None and not isinstance(before.get(above), (*PLAIN, Tensor, tuple)):
            readers[path] = readers[above]


def _own_tensors(modules: Iterable[Named]) -> Iterator[tuple[str, dict[str, Any], str, Tensor, int | None]]:
    for path, module in modules:
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None:
                    yield join(path, key), owner, key, tensor, storage_of(tensor)


def _reader(owner: Any, key: Any) -> Callable[[], Any]:
    if isinstance(owner, dict):
        return lambda: owner.get(key, GONE)
    if isinstance(owner, list | deque):
        return lambda: owner[key] if key < len(owner) else GONE
    return lambda: getattr(owner, key, GONE)


def _reader_of_entry(read: Callable[[], Any], index: int) -> Callable[[], Any]:
    def entry() -> Any:
        held = read()
        return held[index] if isinstance(held, tuple) and index < len(held) else GONE

    return entry


def _reader_of_tensor(owner: dict[str, Any], key: str) -> Callable[[], Any]:
    return lambda: (id(owner.get(key)), storage_of(owner.get(key)))


def _reader_of_size(held: Any) -> Callable[[], Any]:
    return lambda: len(held)


def _is_same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, (*PLAIN, tuple, bytes)) and type(now) is type(before):
        return bool(now == before)
    return False


def _python_random() -> Any:
    return random.getstate()


def _numpy_random() -> Any:
    return pickle.dumps(np.random.get_state(legacy=False))


_HOST_RANDOM: Final = {"Python's random module": _python_random, "numpy.random": _numpy_random}


def _host_random() -> dict[str, Any]:
    return {name: read() for name, read in _HOST_RANDOM.items()}
