"""Rewrite the old options in a shell script or a command line; everything else stays as it is, to the byte."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from graphstep.config.migration.occurrences import (
    Occurrence,
    attached_name,
    find_occurrences,
    implementations_in,
    implementations_of,
    old_texts,
)
from graphstep.config.migration.planner import Plan, Surroundings, plan
from graphstep.config.migration.rewrite import Rewrite
from graphstep.config.migration.shell_script import (
    Fragment,
    Kind,
    Script,
    array_reference,
    assigned_texts,
    read_script,
)
from graphstep.config.migration.words import Word, apply_edits, edits_of, line_of
from graphstep.config.options import OPTIONS
from graphstep.config.validation import Notice
from graphstep.errors import ConfigError, Problem

_BY_HAND = "write the new form by hand"


def migrate_shell(text: str, source: str = "-") -> Rewrite:
    """Rewrite the commands and arrays of a shell script.

    Args:
        text: the script.
        source: its name, for messages.

    Raises:
        ConfigError: it cannot be read, or mixes old and new forms in ways that can mean two things; all at once.
    """
    script = read_script(text, source)
    units = list(_units(script))
    plans = [plan(unit.words, unit.occurrences, _surroundings(unit, units, script)) for unit in units]
    changed, problems = _merge(units, plans)
    found = [problem for made in plans for problem in made.problems] + problems
    if found:
        places = [(line_of(text, word.start), problem) for word, problem in found]
        raise ConfigError(
            [
                replace(problem, where=f"{source}:{line}" + (f": {problem.where}" if problem.where else ""))
                for line, problem in sorted(dict.fromkeys(places), key=lambda place: place[0])
            ]
        )
    applied = dict.fromkeys((word.start, row) for made in plans for row, word in made.applied)
    left = dict.fromkeys((word.start, reason, _BY_HAND) for made in plans for word, reason in made.left)
    left |= dict.fromkeys(_mentions(script, units))
    return Rewrite(
        source=source,
        before=text,
        after=apply_edits(text, edits_of(text, list(changed.items()))),
        changes=tuple(
            Notice(row.code, row.notice, f"{source}:{line_of(text, start)}", row.fix)
            for start, row in sorted(applied, key=_start)
        ),
        left=tuple(
            Notice("left-alone", f"left alone: {reason}", f"{source}:{line_of(text, start)}", fix)
            for start, reason, fix in sorted(left)
        ),
    )


def migrate_argv(argv: Sequence[str], source: str = "command line") -> tuple[list[str], Rewrite]:
    """Rewrite the words of one command line.

    Args:
        argv: words; those of the program may stand before the options.
        source: its name, for messages.

    Returns:
        The new words; and the same as two texts, quoted for a shell, one option a line.

    Raises:
        ConfigError: old and new forms mixed in ways that can mean two things; all at once.
    """
    words, position = [], 0
    for value in argv:
        raw = shlex.quote(value)
        words.append(Word(position, position + len(raw), raw, value))
        position += len(raw) + 1
    made = plan(words, find_occurrences(words), Surroundings())
    if made.problems:
        raise ConfigError([problem for _, problem in made.problems])
    new = [text for word in words for text in made.changed.get(word, [word.value or ""])]
    left = [(word, reason, _BY_HAND) for word, reason in made.left]
    for word in words:
        if not _is_exact(word):
            left += [(word, "an old option inside quotes", fix) for _, fix in old_texts(word.value or "")]
    return new, Rewrite(
        source=source,
        before=_one_option_a_line(argv),
        after=_one_option_a_line(new),
        changes=tuple(Notice(row.code, row.notice, word.value or "", row.fix) for row, word in made.applied),
        left=tuple(Notice("left-alone", f"left alone: {reason}", w.value or "", fix) for w, reason, fix in left),
    )


@dataclass(slots=True)
class _Unit:
    """The words of one command, with those of the arrays it uses; or those of an array that stands alone."""

    fragments: list[Fragment]
    words: list[Word] = field(default_factory=list)
    is_whole: bool = True
    begins_options: set[int] = field(default_factory=set)
    occurrences: list[Occurrence] = field(default_factory=list)


def _units(script: Script) -> Iterator[_Unit]:
    arrays: dict[str, list[Fragment]] = {}
    for fragment in script.fragments:
        if fragment.kind is Kind.ARRAY:
            arrays.setdefault(fragment.name, []).append(fragment)
    inlined = {name: found for name, found in arrays.items() if _is_one_list(name, found, script)}
    used: set[str] = set()
    for fragment in script.fragments:
        if fragment.kind is Kind.COMMAND:
            unit = _Unit([fragment])
            _expand(unit, fragment.words, inlined, script, arrays, ())
            used |= {f.name for f in unit.fragments[1:]}
            yield _completed(unit)
    for name, found in arrays.items():
        if name not in used:
            for fragment in found:
                unit = _Unit([fragment], is_whole=False)
                _expand(unit, fragment.words, {}, script, arrays, ())
                yield _completed(unit)


def _completed(unit: _Unit) -> _Unit:
    unit.occurrences = find_occurrences(unit.words, unit.begins_options)
    return unit


def _is_one_list(name: str, found: Sequence[Fragment], script: Script) -> bool:
    """Are the words of this array the same whenever it is used?"""
    whole = not found[0].is_appended and all(fragment.is_appended for fragment in found[1:])
    return whole and name not in script.variables and all(fragment.is_certain for fragment in found)


def _expand(
    unit: _Unit,
    words: Sequence[Word],
    inlined: dict[str, list[Fragment]],
    script: Script,
    arrays: dict[str, list[Fragment]],
    inside: tuple[str, ...],
) -> None:
    for index, word in enumerate(words):
        name = array_reference(word)
        if word.value is None and name in inlined and name not in inside:
            for fragment in inlined[name]:
                unit.fragments += [fragment] if fragment not in unit.fragments else []
                _expand(unit, fragment.words, inlined, script, arrays, (*inside, name))
            continue
        unit.words.append(word)
        if word.value is not None:
            continue
        texts = assigned_texts(script.variables, name) if name else []
        bodies = [fragment.words for fragment in arrays.get(name, ()) if fragment.words]
        if texts + bodies and _begin_with_options(texts, bodies):
            unit.begins_options.add(word.start)
        known = bool(texts + bodies) and None not in texts
        quiet = not any("cuda-graph" in (text or "") for text in texts)
        quiet = quiet and not any("cuda-graph" in item.raw or item.value is None for body in bodies for item in body)
        if not (known and quiet) and _may_hold_options(word, words[index - 1] if index else None):
            unit.is_whole = False


def _begin_with_options(texts: Sequence[str | None], bodies: Sequence[Sequence[Word]]) -> bool:
    return all(text is not None and text.lstrip().startswith("--") for text in texts) and all(
        body[0].is_option for body in bodies
    )


def _may_hold_options(word: Word, before: Word | None) -> bool:
    """May this expansion yield options, and not only the value of the option before it?"""
    if not word.raw.lstrip('"').startswith(("$", "`")):
        return False
    if "@" in word.raw or "*" in word.raw or any(part in word.raw.lower() for part in ("arg", "opt", "flag")):
        return True
    if before is None or not before.is_option or "=" in (before.value or ""):
        return True
    return before.value in _SWITCH_SPELLINGS


_SWITCH_SPELLINGS = frozenset(spelling for option in OPTIONS if option.nargs == 0 for spelling in option.spellings)


def _surroundings(unit: _Unit, units: Sequence[_Unit], script: Script) -> Surroundings:
    if unit.is_whole:
        return Surroundings()
    own = unit.fragments
    found: frozenset[str] = frozenset()
    for other in units:
        alternatives = any(_exclude_each_other(a, b) for a in own for b in other.fragments)
        if other is not unit and not alternatives:
            found |= implementations_of(other.occurrences)
            for word in other.words:
                found |= implementations_in(word.raw) if not _is_exact(word) else frozenset()
    for assigned in script.variables.values():
        for word in assigned:
            found |= implementations_in(word.raw)
    return Surroundings(is_whole=False, implementations=found - {"none"})


def _exclude_each_other(one: Fragment, other: Fragment) -> bool:
    """Do these assign to the same array, so that only one of them counts?"""
    return one.kind is Kind.ARRAY and one.name == other.name and not one.is_appended and not other.is_appended


def _merge(units: Sequence[_Unit], plans: Sequence[Plan]) -> tuple[dict[Word, list[str]], list[tuple[Word, Problem]]]:
    """Put the plans together; arrays that several commands use must be written in one way for all of them."""
    changed: dict[Word, list[str]] = {}
    seen: set[Word] = set()
    problems: list[tuple[Word, Problem]] = []
    for unit, made in zip(units, plans, strict=True):
        for word in unit.words:
            new = made.changed.get(word)
            if word in seen and new != changed.get(word):
                what = "an array with old options is used by commands that need different new ones"
                problems.append((word, Problem("old-shared-array", what, "", "give each command its own array")))
            elif new is not None:
                changed[word] = new
        seen.update(unit.words)
    return changed, problems


def _mentions(script: Script, units: Sequence[_Unit]) -> Iterator[tuple[int, str, str]]:
    """Yield old options in texts that are no lists of words: place, why they stay, what to do."""
    texts: list[tuple[int, str, str]] = []
    for unit in units:
        for word in unit.words:
            if not _is_exact(word):
                where = "an expansion" if word.value is None else "quotes"
                texts.append((word.start, word.raw, f"an old option inside {where}"))
    for fragment in script.fragments:
        if fragment.kind is Kind.OTHER:
            texts += [(w.start, w.raw, "an old option that no program is given here") for w in fragment.words]
    for assigned in script.variables.values():
        texts += [(w.start, w.raw, "an old option inside a variable (an array would be rewritten)") for w in assigned]
    texts += [(d.start, d.text, "an old option in a here-document") for d in script.here_documents]
    for start, text, reason in texts:
        yield from ((start + place, reason, fix) for place, fix in old_texts(text))


def _is_exact(word: Word) -> bool:
    """Is this word an option by itself, with its value or without?"""
    return bool(attached_name(word)) or (
        word.value is not None and word.is_option and not any(blank in word.value for blank in " \t\n")
    )


def _one_option_a_line(argv: Sequence[str]) -> str:
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in lines) + "\n"


def _start(applied: tuple[int, object]) -> int:
    return applied[0]
