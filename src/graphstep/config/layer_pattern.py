"""Patterns of layers as ``--hybrid-layer-pattern`` writes them: one letter a layer."""

from __future__ import annotations

import re

_LETTERS, _SEPARATORS = "M*-EGD", "|/"
_NUM_NAMED = 4  # Wrong letters that a message names.


def is_layer_pattern(pattern: str) -> bool:
    """Can ``--hybrid-layer-pattern`` be read?"""
    return re.fullmatch(r"[M*EGD|-]*(/[M*EGD-]+)*", pattern) is not None and len(pattern_layers(pattern)) > 0


def pattern_layers(pattern: str) -> str:
    """Return one letter a layer: without separators and without the layers of multi-token prediction."""
    return pattern.partition("/")[0].replace("|", "")


def pattern_fault(pattern: str) -> str:
    """Return what is wrong with a pattern that cannot be read: the letters and their places, counted from 1."""
    wrong = letters_at(pattern, "".join(set(pattern) - set(_LETTERS + _SEPARATORS)))
    if wrong:
        return wrong
    if not pattern_layers(pattern):
        return "it has no layer"
    if "|" in pattern.partition("/")[2]:
        return "a | stands behind a /"
    return "no layer stands behind a /"


def letters_at(pattern: str, letters: str) -> str:
    """Return where these letters stand in a pattern: ``letter 2 is X, letter 5 is Y``; empty if they do not.

    Args:
        pattern: of layers, separators count as letters.
        letters: those to look for.
    """
    found = [f"letter {place} is {_shown(letter)}" for place, letter in enumerate(pattern, 1) if letter in letters]
    rest = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    return ", ".join(found[:_NUM_NAMED]) + rest


def _shown(letter: str) -> str:
    return repr(letter) if letter.isspace() or letter in ",.;" else letter
