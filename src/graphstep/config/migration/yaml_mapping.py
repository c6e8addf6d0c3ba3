"""The entries of one YAML mapping that say what is captured, and the edits that write them anew."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphstep.config.migration.occurrences import (
    ENABLE,
    EXTERNAL,
    IMPL,
    INFERENCE_SCOPE,
    LISTS,
    MODULES,
    OLD_SCOPE,
    RENAMED,
    SPELLINGS,
    SWITCHES,
)
from graphstep.config.migration.words import Edit
from graphstep.config.migrations import OLD_MODULES

if TYPE_CHECKING:
    from yaml.nodes import Node

_NAMES = frozenset(SPELLINGS.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value."""

    name: str
    key: Node
    value: Node
    start: int
    end: int
    """End of the value, without what follows it."""
    given: Any
    """The value in the form of the table of migrations; None if it cannot be read."""

    @property
    def is_option(self) -> bool:
        """Is the key written as on a command line?"""
        return str(self.key.value).startswith("--")

    @property
    def is_old(self) -> bool:
        """Is it an old option, or has it an old value?"""
        given = self.given if isinstance(self.given, tuple) else ()
        return self.name in (ENABLE, EXTERNAL, OLD_SCOPE, *RENAMED) or not set(OLD_MODULES).isdisjoint(given)


class NoPlaceError(Exception):
    """An entry cannot be removed or added without touching its neighbours."""


@dataclass(slots=True)
class MappingEdits:
    """The entries of one mapping that say what is captured, and what they are to become."""

    text: str
    is_flow: bool
    num_keys: int
    entries: list[Entry]
    new: Mapping[str, Any]
    _edits: list[Edit] = field(default_factory=list)
    _num_removed: int = 0

    def edits(self) -> list[Edit]:
        """Return what to write.

        Raises:
            NoPlaceError: an entry cannot be removed or added without touching its neighbours.
        """
        found = {entry.name: entry for entry in self.entries}
        modules = found.get(OLD_SCOPE) or found.get(MODULES)
        if modules is not None and OLD_SCOPE in found and MODULES in found:  # one of them says nothing
            silent = found[OLD_SCOPE] if not found[OLD_SCOPE].given else found[MODULES]
            modules = found[MODULES] if silent is modules else modules
            self._remove(silent)
        if modules is not None and modules.is_old and self.new.get(MODULES):
            self._rename(modules, MODULES)
            self._keep_only(modules, self.new[MODULES])
        free = self._scope(found, modules, self._impl(found, modules))
        for entry in free:
            if entry is modules and self.new.get(IMPL) != "full_iteration" and not entry.is_option:
                self._become(entry, MODULES, "[]")
            else:
                self._remove(entry)
        for name, new_name in RENAMED.items():
            if name != OLD_SCOPE and name in found:
                self._rename(found[name], new_name)
                if new_name in found:
                    self._remove(found[new_name])
        return self._edits

    def _impl(self, found: Mapping[str, Entry], modules: Entry | None) -> list[Entry]:
        """Write the implementation; returns the entries that have nothing to say any more."""
        impl = self.new.get(IMPL)
        switches = [found[name] for name in (ENABLE, EXTERNAL) if name in found]
        is_free = modules is not None and modules.is_old and not self.new.get(MODULES)
        free = [*switches, *([modules] if modules is not None and is_free else [])]
        if IMPL in found:
            if impl is not None and impl != found[IMPL].given:
                self._set_value(found[IMPL], impl)
        elif impl is not None or switches:
            home = next((entry for entry in free if entry.given is True), free[0])
            free.remove(home)
            self._become(home, IMPL, impl or "none")
        return free

    def _scope(self, found: Mapping[str, Entry], modules: Entry | None, free: list[Entry]) -> list[Entry]:
        """Write the inference scope; returns the entries that are still free."""
        scope = self.new.get(INFERENCE_SCOPE)
        if modules is None or scope is None or scope == "" or INFERENCE_SCOPE in found:
            return free
        if modules not in free:
            self._add_behind(modules, INFERENCE_SCOPE, scope)
            return free
        self._become(modules, INFERENCE_SCOPE, scope)
        return [entry for entry in free if entry is not modules]

    def _key(self, entry: Entry, name: str) -> str:
        raw = self.text[entry.key.start_mark.index : entry.key.end_mark.index]
        bare = raw.strip("\"'")
        styled = name if "_" in bare else name.replace("_", "-")
        return raw.replace(bare, ("--" if entry.is_option else "") + styled)

    def _rename(self, entry: Entry, name: str) -> None:
        self._edits.append(Edit(entry.key.start_mark.index, entry.key.end_mark.index, self._key(entry, name)))

    def _set_value(self, entry: Entry, value: str) -> None:
        start = entry.value.start_mark.index
        raw = self.text[start : entry.end]
        quote = raw[0] if raw[:1] in ("'", '"') and value != "[]" else ""
        if not raw:  # ``key:`` with nothing behind it
            value = f" {value}"
        self._edits.append(Edit(start, entry.end, f"{quote}{value}{quote}"))

    def _become(self, entry: Entry, name: str, value: str) -> None:
        self._rename(entry, name)
        if entry.value.id == "sequence" and not entry.value.flow_style:
            key_end = entry.key.end_mark.index
            behind = self.text.index(":", key_end) + 1
            comments = self._comments(entry)
            self._edits.append(Edit(behind, entry.end, f" {value}{comments}"))
        else:
            self._set_value(entry, value)

    def _comments(self, entry: Entry) -> str:
        """Return the comments between a key and the list below it, with the white space before them."""
        list_start = entry.value.start_mark.index
        if re.search(r"(?:^|\s)#", self.text[list_start : entry.end]):
            raise NoPlaceError  # a comment between the items
        return self.text[self.text.index(":", entry.key.end_mark.index) + 1 : list_start].rstrip()

    def _keep_only(self, entry: Entry, modules: tuple[str, ...]) -> None:
        if entry.value.id == "scalar":
            if tuple(_split(entry.value.value)) != modules:
                separator = "," if "," in entry.value.value else " "
                self._set_value(entry, separator.join(modules))
            return
        dropped = [item for item in entry.value.value if item.value not in modules]
        for item in dropped:
            if entry.value.flow_style:
                self._cut_from_flow(item.start_mark.index, item.end_mark.index)
            else:
                dash = self.text.rindex("-", 0, item.start_mark.index)
                self._cut_lines(dash, item.end_mark.index)

    def _remove(self, entry: Entry) -> None:
        self._num_removed += 1
        if self._num_removed >= self.num_keys:
            raise NoPlaceError  # an empty mapping is another thing: null
        is_block_list = entry.value.id == "sequence" and not entry.value.flow_style
        comments = self._comments(entry) if is_block_list else ""
        if self.is_flow:
            self._cut_from_flow(entry.start, entry.end)
        elif comments:
            line_start = self.text.rfind("\n", 0, entry.start) + 1
            if self.text[line_start : entry.start].strip():
                raise NoPlaceError
            behind = self.text.index(":", entry.key.end_mark.index) + 1
            self._edits.append(Edit(entry.start, behind + len(comments) - len(comments.lstrip()), ""))
            self._edits.append(Edit(behind + len(comments), entry.end, ""))
        else:
            self._cut_lines(entry.start, entry.end)

    def _cut_from_flow(self, start: int, end: int) -> None:
        behind = re.compile(r"\s*,\s*").match(self.text, end)
        before = re.search(r",\s*\Z", self.text[:start])
        if behind:
            self._edits.append(Edit(start, behind.end(), ""))
        elif before and not any(edit.end > before.start() for edit in self._edits):
            self._edits.append(Edit(before.start(), end, ""))
        else:
            raise NoPlaceError

    def _cut_lines(self, start: int, end: int) -> None:
        line_start = self.text.rfind("\n", 0, start) + 1
        rest = re.compile(r"[ \t]*(?:(#[^\r\n]*)|(\r?\n)|\Z)").match(self.text, end)
        before = self.text[line_start:start]
        if before.strip(" \t-") or rest is None:
            raise NoPlaceError
        if before.strip(" \t") and self.text[start] != "-":  # behind the dash of a list: the next key moves up
            upwards = re.compile(rf"[ \t]*\r?\n {{{len(before)}}}(?=[\w\"'])").match(self.text, end)
            if upwards is None:
                raise NoPlaceError
            self._edits.append(Edit(start, upwards.end(), ""))
            return
        if before.strip(" \t"):
            raise NoPlaceError
        if rest[1]:  # a comment stays, on its own line
            self._edits.append(Edit(start, rest.start(1), ""))
        else:
            self._edits.append(Edit(line_start, rest.end(), ""))

    def _add_behind(self, entry: Entry, name: str, value: str) -> None:
        pair = f"{self._key(entry, name)}: {value}"
        if self.is_flow:
            self._edits.append(Edit(entry.end, entry.end, f", {pair}"))
            return
        line_start = self.text.rfind("\n", 0, entry.start) + 1
        indent = re.sub(r"\S", " ", self.text[line_start : entry.start])
        end = self.text.find("\n", entry.end)
        end = len(self.text) if end < 0 else end
        is_crlf = self.text[:end].endswith("\r")
        end -= is_crlf
        self._edits.append(Edit(end, end, ("\r\n" if is_crlf else "\n") + indent + pair))


def name_of(key: Node) -> str | None:
    """Return the option that a key names, if it is one of ours."""
    if not isinstance(key.value, str):
        return None
    name = key.value.removeprefix("--").replace("-", "_")
    return name if name in _NAMES else None


def read_entry(text: str, name: str, key: Node, value: Node) -> Entry:
    """Return an entry of a mapping."""
    end = value.end_mark.index
    items = value.value if value.id == "sequence" else []
    if items and not value.flow_style:
        end = items[-1].end_mark.index
    nodes = (value, *items)
    is_plain = re.compile(r"[ \t]*:").match(text, key.end_mark.index) is not None  # no ``? key``
    is_plain &= all(node.start_mark.index >= key.end_mark.index for node in nodes)  # no alias
    is_plain &= not any(text.startswith(("&", "!", "|", ">"), node.start_mark.index) for node in (key, *nodes))
    return Entry(name, key, value, key.start_mark.index, end, _given(name, value) if is_plain else None)


def _given(name: str, value: Node) -> Any:
    """Return a value in the form of the table of migrations; None if it cannot be read."""
    kind = value.tag.rpartition(":")[2]
    if name in SWITCHES:
        is_true = kind == "bool" and value.value.lower() in ("true", "yes", "on")
        return is_true if kind in ("bool", "null") else None
    if name in LISTS:
        return _given_list(kind, value)
    if kind == "null":
        return ""
    is_readable = value.id == "scalar" and (name not in (IMPL, INFERENCE_SCOPE) or _is_plain(value.value))
    return value.value if is_readable else None


def _given_list(kind: str, value: Node) -> tuple[str, ...] | None:
    if kind == "null":
        return ()
    if value.id == "sequence":
        words = [item.value for item in value.value]
        return tuple(words) if all(isinstance(word, str) for word in words) else None
    return tuple(_split(value.value)) if kind == "str" and _is_plain(value.value) else None


def _split(text: str) -> Iterator[str]:
    return (word for word in re.split(r"[,\s]+", text) if word)


def _is_plain(text: str) -> bool:
    """Is this a word or a list of words, and no expression?"""
    return re.fullmatch(r"[\w\s,]*", text) is not None
