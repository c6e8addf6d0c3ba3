"""What one step has left behind by graphs and eagerly, compared: one row for each module and kind of state."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphstep.capture.tree import flatten, tensor_paths, unflatten, values_of
from graphstep.verification.compare import Difference, Tolerances, difference
from graphstep.verification.report import Part, Row
from graphstep.verification.state import Key, StateCopy, same_state


class Results(NamedTuple):
    """What a step has returned, copied to the host."""

    tensors: Mapping[Key, Tensor]
    """By name; gradients of the batch as well."""
    values: tuple[Any, ...]
    """What else is in the result."""


def run_step(step: Callable[[Any], Any], batch: Any) -> Results:
    """Run a step, on a copy of the batch where that wants a gradient."""
    given = fresh(batch)
    found = result_tensors(step(given))
    tensors, structure = flatten(given)
    names = tensor_paths(structure, "batch")
    gradients = {f"{n}.grad": t.grad for n, t in zip(names, tensors, strict=True) if t.is_leaf and t.grad is not None}
    own = {Key("", Part.GRADIENT, name): g.detach().to("cpu", copy=True) for name, g in gradients.items()}
    return Results({**found.tensors, **own}, found.values)


def fresh(batch: Any) -> Any:
    """The batch, or a copy where it wants a gradient: gradients of its own do not add up."""
    tensors, structure = flatten(batch)
    if not any(tensor.requires_grad for tensor in tensors):
        return batch
    return unflatten(structure, [t.detach().clone().requires_grad_() if t.requires_grad else t for t in tensors])


def result_tensors(result: Any) -> Results:
    """Copies of the tensors of a result on the host, by name, and its other values."""
    tensors, structure = flatten(result)
    names = tensor_paths(structure, "result")
    pairs = zip(names, tensors, strict=True)
    found = {Key("", Part.FORWARD, name): tensor.detach().to("cpu", copy=True) for name, tensor in pairs}
    return Results(found, tuple(values_of(structure)))


class Rows:
    """The rows of all steps so far.

    Args:
        tolerances: how far replays may be from eager, by module.
    """

    def __init__(self, tolerances: Tolerances) -> None:
        self._tolerances = tolerances
        self._rows: dict[tuple[str, Part], Row] = {}

    def all(self) -> tuple[Row, ...]:
        """Every row, those of the step itself first."""
        return tuple(self._rows.values())

    def different(self) -> tuple[Row, ...]:
        """Those that differ by more than is allowed."""
        return tuple(row for row in self._rows.values() if not row.is_equal)

    def add(
        self, step: int, eager: Results, replayed: Results, after_eager: StateCopy, after_replay: StateCopy
    ) -> None:
        """Compare one step: results, tensors of the state, generators."""
        self.add_tensors(step, eager.tensors, replayed.tensors)
        if eager.values != replayed.values:
            found = _of_values("result", str(eager.values), str(replayed.values))
            self._note(("", Part.FORWARD), 0, found, step)
        self.add_tensors(step, after_eager.tensors, after_replay.tensors)
        self.add_generators(step, after_eager.generators, after_replay.generators)

    def add_tensors(self, step: int, eager: Mapping[Key, Tensor], replayed: Mapping[Key, Tensor]) -> None:
        """Compare tensors by name; one row for each module and part."""
        counts: dict[tuple[str, Part], int] = {}
        worst: dict[tuple[str, Part], Difference] = {}
        for key in dict.fromkeys((*eager, *replayed)):
            place = key.module, key.part
            counts[place] = counts.get(place, 0) + 1
            found = difference(key.name, eager.get(key), replayed.get(key), self._tolerances.of(key.module))
            if found is not None and (place not in worst or _rank(found) > _rank(worst[place])):
                worst[place] = found
        for place, number in counts.items():
            self._note(place, number, worst.get(place), step)

    def add_generators(self, step: int, eager: Mapping[str, Any], replayed: Mapping[str, Any]) -> None:
        """Compare the states of generators of random numbers."""
        for name, state in eager.items():
            other = replayed[name]
            found = None if same_state(state, other) else _of_values(name, _digest(state), _digest(other))
            self._note(("", Part.RANDOM), len(eager), found, step)

    def note_other_rank(self, step: int) -> None:
        """Another rank has found a difference in this step."""
        self._note(("", Part.OTHER), 1, _of_values("state of another rank", "one thing", "another"), step)

    def _note(self, key: tuple[str, Part], number: int, found: Difference | None, step: int) -> None:
        row = self._rows.get(key, Row(key[0], key[1], number))
        is_worse = found is not None and (row.difference is None or _rank(found) > _rank(row.difference))
        row = replace(row, difference=found, step=step) if is_worse else row
        self._rows[key] = replace(row, num_tensors=max(number, row.num_tensors))


def _rank(found: Difference) -> tuple[bool, float]:
    return not found.is_within, found.max_error


def _of_values(name: str, eager: str, replayed: str) -> Difference:
    return Difference(name, math.inf, (), eager, replayed, 0, 0)


def _digest(state: Any) -> str:
    """A short name for the state of a generator."""
    raw = bytes(state.flatten().tolist()) if isinstance(state, torch.Tensor) else repr(state).encode()
    return f"state {hashlib.sha256(raw).hexdigest()[:8]}"
