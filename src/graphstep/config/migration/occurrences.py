"""Find the options of CUDA graphs, old and new, in the words of a command."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphstep.config.migration.words import Word
from graphstep.config.migrations import MIGRATIONS, NEW_NAMES, OLD_MODULES, OLD_NAMES, REMOVED
from graphstep.config.suggest import suggestion
from graphstep.config.switches import CudaGraphModule

IMPL, MODULES, INFERENCE_SCOPE = "cuda_graph_impl", "cuda_graph_modules", "inference_cuda_graph_scope"
ENABLE, EXTERNAL, OLD_SCOPE = "enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope"
SWITCHES = frozenset({ENABLE, EXTERNAL, "moe_router_padding_for_fp8", "moe_router_padding_for_quantization"})
LISTS = frozenset({OLD_SCOPE, MODULES})

SPELLINGS: Mapping[str, str] = {**OLD_NAMES, **NEW_NAMES}
"""Options as typed, and their names."""
RENAMED: Mapping[str, str] = {
    OLD_SCOPE: MODULES,
    "moe_router_padding_for_fp8": "moe_router_padding_for_quantization",
    "hybrid_override_pattern": "hybrid_layer_pattern",
}
"""Old names of what only changed its name, and the new ones."""
MODULE_WORDS = frozenset(CudaGraphModule) | frozenset(OLD_MODULES)

_OLD_OPTIONS = "|".join(re.escape(spelling) for spelling in (*OLD_NAMES, *(o for o in REMOVED if o.startswith("--"))))
_OLD_TEXT = re.compile(
    rf"(?:(?<![\w-])|(?<=:-))(?:{_OLD_OPTIONS})(?![\w-])"
    rf"|--cuda-graph-modules[ =]+(?:\w+[ ,]+)*?(?:{'|'.join(OLD_MODULES)})(?![\w-])"
)
_IMPL_TEXT = re.compile(r"(?<![\w-])(--enable-cuda-graph|--external-cuda-graph|--cuda-graph-impl(?:[ =]+(\w+))?)")


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An option in a command."""

    name: str
    """Megatron-LM's attribute name."""
    word: Word
    """The option, with its value if that is attached by ``=``."""
    values: tuple[Word, ...]
    """The words behind it that it takes."""
    parts: tuple[str, ...]
    """The values, commas split."""
    unreadable: str
    """Why it cannot be rewritten; empty if it can."""

    @property
    def is_attached(self) -> bool:
        """Is the value attached by ``=``?"""
        return "=" in (self.word.value or "")

    @property
    def is_old(self) -> bool:
        """Is it an old option, or has it an old value?"""
        return self.name in OLD_NAMES.values() or (self.name in LISTS and not set(OLD_MODULES).isdisjoint(self.parts))

    @property
    def value(self) -> Any:
        """The value, in the form of the table of migrations."""
        if self.name in SWITCHES:
            return True
        return self.parts if self.name in LISTS else self.parts[0]


def find_occurrences(words: Sequence[Word], begins_options: Collection[int] = ()) -> list[Occurrence]:
    """Return the options of CUDA graphs in a command, in order.

    Args:
        words: the words of the command.
        begins_options: places of words that only a run can tell and that are known to begin with an option.
    """
    return list(_occurrences(words, begins_options))


def attached_name(word: Word) -> str:
    """Return the name of an option whose value, attached by ``=``, is expanded; empty if this is no such word."""
    found = re.match(r"[\"']?(--[a-z0-9-]+)=", word.raw)
    return SPELLINGS.get(found[1], "") if found and word.value is None else ""


def old_texts(text: str) -> Iterator[tuple[int, str]]:
    """Yield where old options stand in a text that is no list of words, and what to do about them."""
    for found in _OLD_TEXT.finditer(text):
        yield found.start(), _fix_of(found[0])


def _fix_of(old: str) -> str:
    """Return what to do about an old option, or about a list of modules with an old one in it."""
    words = old.replace("=", " ").replace(",", " ").split()
    if words[0] in REMOVED:
        return REMOVED[words[0]]
    wanted = f"{words[0]} {words[-1]}" if len(words) > 1 else words[0]
    return next((row.fix for row in MIGRATIONS if row.old == wanted), "use the new form") + ", by hand"


def implementations_in(text: str) -> frozenset[str]:
    """Return the implementations that options in a text name; ``?`` stands for one that cannot be read."""
    found: set[str] = set()
    for match in _IMPL_TEXT.finditer(text):
        old = {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
        found.add(old.get(match[1]) or match[2] or "?")
    return frozenset(found)


def implementations_of(occurrences: Sequence[Occurrence]) -> frozenset[str]:
    """Return the implementations that options name; ``?`` stands for one that cannot be read."""
    found: set[str] = set()
    for occurrence in occurrences:
        if occurrence.name == ENABLE:
            found.add("local")
        elif occurrence.name == EXTERNAL:
            found.add("transformer_engine")
        elif occurrence.name == IMPL:
            found.add(occurrence.parts[0] if occurrence.parts else "?")
        elif occurrence.name in LISTS and "full_iteration" in occurrence.parts:
            found.add("full_iteration")
    return frozenset(found - {"none"})


def _occurrences(words: Sequence[Word], begins_options: Collection[int]) -> Iterator[Occurrence]:
    for index, word in enumerate(words):
        if word.value is None:
            name = attached_name(word)
            if name:
                yield Occurrence(name, word, (), (), "its value is known only when the script runs")
            continue
        spelling, equals, attached = word.value.partition("=")
        name = SPELLINGS.get(spelling, "")
        if not name:
            continue
        values: list[Word] = []
        following = words[index + 1 :]
        if not equals and name not in SWITCHES:
            for value in following:
                if value.value is None or value.is_option or value.container != word.container:
                    break
                values.append(value)
                if name not in LISTS:
                    break
        texts = [attached] if equals else [value.value or "" for value in values]
        if name in LISTS:
            parts = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
        else:
            parts = tuple(texts)
        behind = following[len(values)] if len(following) > len(values) else None
        unreadable = _fault(name, spelling, bool(equals), parts, behind, begins_options, word)
        yield Occurrence(name, word, tuple(values), parts, unreadable)


def _fault(
    name: str,
    spelling: str,
    is_attached: bool,
    parts: tuple[str, ...],
    behind: Word | None,
    begins_options: Collection[int],
    word: Word,
) -> str:
    if name in SWITCHES:
        return f"{spelling} takes no value" if is_attached else ""
    if not parts:
        is_expanded = behind is not None and not behind.is_option
        return (
            f"the value of {spelling} is known only when the script runs" if is_expanded else f"{spelling} has no value"
        )
    if name not in LISTS:
        return ""
    unknown = [part for part in parts if part not in MODULE_WORDS]
    if unknown:
        fix = REMOVED.get(unknown[0]) or suggestion(unknown[0], MODULE_WORDS, "")
        return f"{spelling} has no value {unknown[0]}" + (f": {fix}" if fix else "")
    open_ended = (
        not is_attached
        and behind is not None
        and not behind.is_option
        and (behind.container != word.container or behind.value is None)
        and behind.start not in begins_options
    )
    if open_ended and not set(OLD_MODULES).isdisjoint(parts):
        return f"{spelling} may take more values from the expansion behind it"
    return ""
