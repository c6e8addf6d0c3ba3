"""Find words that change hands when others are removed from between an option and them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphstep.config.migration.words import Word
from graphstep.config.options import OPTIONS

_NUM_VALUES: Mapping[str, int | str] = {spelling: o.nargs for o in OPTIONS for spelling in o.spellings}


def would_take(words: Sequence[Word], changed: Mapping[Word, Sequence[str]]) -> tuple[Word, Word] | None:
    """Return an option, and a word that would become its value because the words between them go; None: there is none.

    Args:
        words: a command.
        changed: words, and what to write instead; nothing removes the word.
    """
    before: list[Word] = []
    has_gap = False
    for index, word in enumerate(words):
        if word in changed and not changed[word]:
            has_gap = True
            continue
        if has_gap and word.value is not None and not word.is_option:
            taker = _open_option(before)
            if taker is not None and taker is not _open_option(words[:index]):
                return taker, word
        has_gap = False
        before.append(word)
    return None


def _open_option(before: Sequence[Word]) -> Word | None:
    """Return the option that takes the next word, if there is one."""
    for num_values, word in enumerate(reversed(before)):
        if not word.is_option or word.value is None:
            continue
        wanted = 0 if "=" in word.value else _NUM_VALUES.get(word.value, 1)  # of others, most take one value
        return word if wanted == "+" or (isinstance(wanted, int) and num_values < wanted) else None
    return None
