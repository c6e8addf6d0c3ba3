"""What one step has left behind by graphs and eagerly, compared: one row for each module and kind of state."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.tree import flatten, tensor_paths, values_of
from graphstep.verification.compare import Difference, Tolerances, difference
from graphstep.verification.report import Part, Row
from graphstep.verification.state import Key, StateCopy, same_state

Results = tuple[Mapping[str, Tensor], tuple[Any, ...]]


def result_tensors(result: Any) -> Results:
    """Copies of the tensors of a result on the host, by name, and its other values."""
    tensors, structure = flatten(result)
    names = tensor_paths(structure, "result")
    return {n: t.detach().to("cpu", copy=True) for n, t in zip(names, tensors, strict=True)}, tuple(
        values_of(structure)
    )


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
        self.add_tensors(
            step,
            {Key("", Part.FORWARD, name): tensor for name, tensor in eager[0].items()},
            {Key("", Part.FORWARD, name): tensor for name, tensor in replayed[0].items()},
        )
        if eager[1] != replayed[1]:
            found = _of_values("result", str(eager[1]), str(replayed[1]))
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
