"""Decide which words of a command are written anew. What old forms mean is known to the table of migrations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphstep.config.migration.occurrences import (
    ENABLE,
    EXTERNAL,
    IMPL,
    INFERENCE_SCOPE,
    LISTS,
    MODULES,
    OLD_SCOPE,
    RENAMED,
    Occurrence,
)
from graphstep.config.migration.takers import would_take
from graphstep.config.migration.words import Word
from graphstep.config.migrations import (
    FULL_ITERATION,
    FULL_ITERATION_INFERENCE,
    NEW_NAMES,
    OLD_MODULES,
    Migration,
    migrate,
)
from graphstep.errors import Problem

_OPTION_OF = dict(zip(NEW_NAMES.values(), NEW_NAMES, strict=True)).get
_GRAPH_NAMES = frozenset({ENABLE, EXTERNAL, OLD_SCOPE, MODULES, IMPL, INFERENCE_SCOPE})


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known about the rest of the command line that some words are a part of."""

    is_whole: bool = True
    """There is no rest."""
    implementations: frozenset[str] = frozenset()
    """The implementations that the rest of the file names; ``?`` stands for one that cannot be read."""


@dataclass(slots=True)
class Plan:
    """What to do with the words of a command."""

    changed: dict[Word, list[str]] = field(default_factory=dict)
    """Words, and what to write instead; nothing removes the word."""
    applied: list[tuple[Migration, Word]] = field(default_factory=list)
    """Rows of the table that applied, each with an option it applied to."""
    left: list[tuple[Word, str]] = field(default_factory=list)
    """Old options that cannot be rewritten safely, and why."""
    problems: list[tuple[Word, Problem]] = field(default_factory=list)
    """Mixes that can mean two things, each with an option that takes part."""


def plan(words: Sequence[Word], occurrences: Sequence[Occurrence], surroundings: Surroundings) -> Plan:
    """Return what to do with the options of one command.

    Args:
        words: the command.
        occurrences: its options of CUDA graphs, in order.
        surroundings: what is known about the rest of the command line.
    """
    made = Plan()
    if not any(occurrence.is_old for occurrence in occurrences):
        return made
    kept, implied = _rewritable(occurrences, surroundings, made)
    given = {occurrence.name: occurrence.value for occurrence in kept}
    outcome = migrate({**({IMPL: implied} if implied else {}), **given})
    if outcome.problems:
        first = next(occurrence.word for occurrence in kept if occurrence.is_old)
        made.problems += [(first, problem) for problem in outcome.problems]
        return made
    for row in outcome.applied:
        names = LISTS if row.reads[0] == MODULES else (row.reads[0],)
        touched = [o.word for o in kept if o.name in names and o.is_old]
        made.applied.append((row, touched[0] if touched else kept[0].word))
    _Writer(made, kept, dict(outcome.values)).write(given, implied)
    taken = would_take(words, made.changed)
    if taken is None:
        return made
    taker, value = taken
    reason = f"without what is between them, {taker.value} would take {value.value} for its value"
    reported = dict(made.left)
    return Plan(left=[(o.word, reported.get(o.word, reason)) for o in occurrences if o.is_old])


def _rewritable(
    occurrences: Sequence[Occurrence], surroundings: Surroundings, made: Plan
) -> tuple[list[Occurrence], str]:
    """Return the options to work with, and the implementation that stands elsewhere; report the others."""
    faulty = {o.name for o in occurrences if o.unreadable}
    others = surroundings.implementations
    is_uncertain = not faulty.isdisjoint((IMPL, INFERENCE_SCOPE))
    has_impl = any(o.name in (IMPL, ENABLE, EXTERNAL) for o in occurrences)
    kept: list[Occurrence] = []
    implied = ""
    for occurrence in occurrences:
        parts = set(occurrence.parts) if occurrence.name in LISTS else set()
        reason = occurrence.unreadable
        if not reason and occurrence.name in LISTS and not faulty.isdisjoint(LISTS):
            reason = "another part of the same option cannot be read"
        only_renamed = occurrence.name not in _GRAPH_NAMES or (parts and parts.isdisjoint(OLD_MODULES))
        if not reason and is_uncertain and occurrence.is_old and not only_renamed:
            reason = "its meaning depends on an option whose value is known only when the script runs"
        if not reason and not has_impl and not surroundings.is_whole:
            if FULL_ITERATION_INFERENCE in parts:
                implied = next(iter(others)) if len(others) == 1 else ""
                if implied != "local":
                    reason = (
                        "full_iteration_inference has a meaning with --cuda-graph-impl local, which is not found here"
                    )
            elif FULL_ITERATION in parts and others - {FULL_ITERATION}:
                reason = "another part of the script names an implementation, and which one counts depends on the order"
        if not reason:
            kept.append(occurrence)
        elif occurrence.is_old:
            made.left.append((occurrence.word, reason))
    return kept, implied if implied == "local" else ""


@dataclass(slots=True)
class _Writer:
    made: Plan
    occurrences: list[Occurrence]
    new: dict[str, Any]

    def write(self, given: dict[str, Any], implied: str) -> None:
        """Fill in the words to write."""
        home, freed = self._modules()
        if self._of(ENABLE, EXTERNAL) or self.new.get(IMPL) != given.get(IMPL, implied or None):
            freed = self._one(self._of(IMPL) or self._of(ENABLE, EXTERNAL), IMPL, freed, None, (IMPL, ENABLE, EXTERNAL))
        if self.new.get(INFERENCE_SCOPE) != given.get(INFERENCE_SCOPE):
            freed = self._one(self._of(INFERENCE_SCOPE), INFERENCE_SCOPE, freed, home, (INFERENCE_SCOPE,))
        if freed is not None:
            self._remove(freed)
        for old, name in RENAMED.items():
            if old != OLD_SCOPE and (found := self._of(old)):
                for occurrence in self._of(old, name):
                    if occurrence is not found[-1]:
                        self._remove(occurrence)
                self._rename(found[-1], name)

    def _of(self, *names: str) -> list[Occurrence]:
        return [occurrence for occurrence in self.occurrences if occurrence.name in names]

    def _modules(self) -> tuple[Occurrence | None, Occurrence | None]:
        """Write the modules; returns their option, or one that is free because no module is left."""
        found = self._of(*LISTS)
        if not any(occurrence.is_old for occurrence in found):
            return None, None
        for occurrence in found[:-1]:
            self._remove(occurrence)
        last = found[-1]
        if not self.new.get(MODULES):
            return None, last
        self._rename(last, MODULES)
        self._keep_only(last, self.new[MODULES])
        return last, None

    def _one(
        self,
        candidates: Sequence[Occurrence],
        name: str,
        freed: Occurrence | None,
        beside: Occurrence | None,
        group: Collection[str],
    ) -> Occurrence | None:
        """Write an option of one value in one place; returns the free place, if it is still free."""
        value = self.new.get(name)
        home = candidates[-1] if candidates else freed
        for occurrence in self._of(*group):
            if occurrence is not home:
                self._remove(occurrence)
        if value is None:
            return freed
        if home is not None:
            self._set(home, name, value)
        elif beside is not None:
            last = [w for w in (beside.word, *beside.values) if self.made.changed.get(w, ["kept"])][-1]
            words = self.made.changed.get(last, [last.value or ""])
            self.made.changed[last] = [*words, str(_OPTION_OF(name)), value]
        return None if home is freed else freed

    def _rename(self, occurrence: Occurrence, name: str) -> None:
        spelling, value = str(_OPTION_OF(name)), (occurrence.word.value or "").partition("=")[2]
        words = [f"{spelling}={value}" if occurrence.is_attached else spelling]
        if words != [occurrence.word.value]:
            self.made.changed[occurrence.word] = words

    def _keep_only(self, occurrence: Occurrence, modules: Collection[str]) -> None:
        for word in (occurrence.word,) if occurrence.is_attached else occurrence.values:
            text = (word.value or "").rpartition("=")[2] if occurrence.is_attached else word.value or ""
            parts = [part.strip() for part in text.split(",") if part.strip()]
            left = [part for part in parts if part in modules]
            if left == parts:
                continue
            if occurrence.is_attached:
                self.made.changed[word] = [f"{_OPTION_OF(MODULES)}={','.join(left)}"]
            else:
                self.made.changed[word] = [",".join(left)] if left else []

    def _set(self, occurrence: Occurrence, name: str, value: str) -> None:
        self._rename(occurrence, name)
        if occurrence.is_attached:
            self.made.changed[occurrence.word] = [f"{_OPTION_OF(name)}={value}"]
        elif not occurrence.values:
            self.made.changed[occurrence.word] = [str(_OPTION_OF(name)), value]
        else:
            for index, word in enumerate(occurrence.values):
                words = [value] if index == 0 else []
                if words != [word.value]:
                    self.made.changed[word] = words

    def _remove(self, occurrence: Occurrence) -> None:
        for word in (occurrence.word, *occurrence.values):
            self.made.changed[word] = []
