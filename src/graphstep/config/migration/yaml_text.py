"""Rewrite old options in a YAML file by their places in the text; comments and layout stay.

Keys are option names: with underscores as in Megatron-Bridge (``cuda_graph_scope``), with dashes, or as typed on a
command line (``--cuda-graph-scope``). A mapping may say only a part of what a run is told: the rest may be in a recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphstep.config.migration.occurrences import (
    ENABLE,
    EXTERNAL,
    IMPL,
    LISTS,
    MODULE_WORDS,
    MODULES,
    OLD_SCOPE,
    old_texts,
)
from graphstep.config.migration.rewrite import Rewrite
from graphstep.config.migration.words import Edit, apply_edits, line_of
from graphstep.config.migration.yaml_mapping import Entry, MappingEdits, NoPlaceError, name_of, read_entry
from graphstep.config.migrations import FULL_ITERATION_INFERENCE, Migration, migrate
from graphstep.config.validation import Notice
from graphstep.config.yaml_reader import compose_yaml
from graphstep.errors import ConfigError, Problem

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

_BY_HAND = "write the new form by hand"


def migrate_yaml(text: str, source: str = "-") -> Rewrite:
    """Rewrite the mappings of a YAML text.

    Args:
        text: one or more documents.
        source: its name, for messages.

    Raises:
        ConfigError: it cannot be read, PyYAML is missing, or it mixes old and new forms in ways with two meanings.
    """
    work = _Work(text, source)
    for document in compose_yaml(text, source):
        work.visit(document)
    if work.problems:
        raise ConfigError(work.problems)
    return Rewrite(
        source=source,
        before=text,
        after=apply_edits(text, work.edits),
        changes=tuple(
            Notice(row.code, row.notice, f"{source}:{line_of(text, start)}", row.fix) for start, row in work.applied
        ),
        left=tuple(
            Notice("left-alone", f"left alone: {reason}", f"{source}:{line_of(text, start)}", fix)
            for start, reason, fix in sorted(work.left)
        ),
    )


@dataclass(slots=True)
class _Work:
    text: str
    source: str
    edits: list[Edit] = field(default_factory=list)
    applied: list[tuple[int, Migration]] = field(default_factory=list)
    left: list[tuple[int, str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def visit(self, node: Node) -> None:
        """Rewrite a node and everything in it."""
        if node.start_mark.index in self._seen and not isinstance(node.value, str):
            return  # an alias of what was seen
        if isinstance(node.value, str):
            raw = self.text[node.start_mark.index : node.end_mark.index]
            reason = "an old option inside a text"
            self.left += [(node.start_mark.index + place, reason, fix) for place, fix in old_texts(raw)]
            return
        self._seen.add(node.start_mark.index)
        if node.id == "sequence":
            for item in node.value:
                self.visit(item)
            return
        self._mapping(node)

    def _mapping(self, node: MappingNode) -> None:
        entries: list[Entry] = []
        is_merged = False
        for key, value in node.value:
            is_merged |= key.value == "<<"
            name = name_of(key)
            if name is None:
                self.visit(key)
                self.visit(value)
            else:
                entries.append(read_entry(self.text, name, key, value))
        if not any(entry.is_old for entry in entries):
            return
        names = [entry.name for entry in entries]
        unreadable = [entry for entry in entries if entry.given is None or names.count(entry.name) > 1]
        if unreadable:
            reason = "a value here cannot be read, or is given twice"
        elif is_merged and not {IMPL, ENABLE, EXTERNAL}.intersection(names):
            reason = "its meaning depends on the mapping that is merged in"
        else:
            reason = self._rewrite(node, entries)
        if reason:
            self.left += [(entry.start, reason, _BY_HAND) for entry in entries if entry.is_old]

    def _rewrite(self, node: MappingNode, entries: list[Entry]) -> str:
        """Rewrite a mapping, or return why that is not safe."""
        given = {entry.name: entry.given for entry in entries}
        words = {word for name in LISTS for word in given.get(name, ())}
        unknown = sorted(words - MODULE_WORDS)
        if unknown:
            return f"there is no module {unknown[0]}"
        if FULL_ITERATION_INFERENCE in words and not {IMPL, ENABLE, EXTERNAL}.intersection(given):
            return "full_iteration_inference means something only with cuda_graph_impl local, which may stand elsewhere"
        silent = OLD_SCOPE if OLD_SCOPE in given and MODULES in given and not given[OLD_SCOPE] else ""
        outcome = migrate({name: value for name, value in given.items() if name != silent and value != ""})
        old = [entry for entry in entries if entry.is_old]
        if outcome.problems:
            line = line_of(self.text, old[0].start)
            self.problems += [
                Problem(p.code, p.what, f"{self.source}:{line}: {p.where}", p.fix) for p in outcome.problems
            ]
            return ""
        try:
            edits = MappingEdits(self.text, node.flow_style is True, len(node.value), entries, outcome.values).edits()
        except NoPlaceError:
            return "its entry shares a line with another one, or its list has comments inside that would be lost"
        self.edits += edits
        for row in outcome.applied:
            names = LISTS if row.reads[0] == MODULES else (row.reads[0],)
            self.applied.append((next((entry.start for entry in old if entry.name in names), old[0].start), row))
        return ""
