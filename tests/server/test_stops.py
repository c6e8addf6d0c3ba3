"""Stop texts: found wherever they lie, and nothing is shown that would have to be taken back."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from graphstep.inference.text import ByteText
from graphstep.server.stops import StoppedText


def pieces_of(text: str, stop: list[str]) -> tuple[list[str], bool]:
    stopped = StoppedText(ByteText().stream(), stop)
    pieces = [stopped.add(token) for token in text.encode()]
    return [*pieces, stopped.finish()], stopped.is_stopped


def before_first(text: str, stop: list[str]) -> str:
    """The text before the stop text that is complete first: tokens come one by one."""
    for end in range(len(text) + 1):
        starts = [end - len(each) for each in stop if text[:end].endswith(each)]
        if starts:
            return text[: min(starts)]
    return text


@given(st.text("abä", max_size=24), st.lists(st.text("abä", min_size=1, max_size=5), max_size=3))
def test_text_ends_before_the_first_stop_text(text: str, stop: list[str]) -> None:
    pieces, is_stopped = pieces_of(text, stop)
    assert "".join(pieces) == before_first(text, stop)
    assert is_stopped == any(each in text for each in stop)


class Words:
    """A stream whose tokens are texts of any length."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def add(self, token: int) -> str:
        return self._words[token]

    def finish(self) -> str:
        return ""


@given(st.lists(st.text("ab", max_size=5), max_size=6), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
@example(["xab", "c"], ["abc", "b"]).via("the shorter one is complete, the longer one begins before it")
@example(["xabc"], ["abc", "b"]).via("the same in one token")
def test_text_does_not_depend_on_the_length_of_tokens(words: list[str], stop: list[str]) -> None:
    stopped = StoppedText(Words(words), stop)
    pieces = [stopped.add(token) for token in range(len(words))]
    assert "".join([*pieces, stopped.finish()]) == before_first("".join(words), stop)


@given(st.text("abä", max_size=24))
def test_without_stop_texts_everything_is_shown_at_once(text: str) -> None:
    pieces, is_stopped = pieces_of(text, [])
    assert "".join(pieces) == text
    assert not is_stopped
    assert pieces[-1] == ""


def test_only_what_may_begin_a_stop_text_is_held() -> None:
    assert pieces_of("xaabz", ["aac"])[0] == ["x", "", "", "aab", "z", ""]
    assert pieces_of("xaa", ["aac"])[0] == ["x", "", "", "aa"]


def test_incomplete_characters_are_shown_at_the_end() -> None:
    stopped = StoppedText(ByteText().stream(), ["x"])
    assert stopped.add(0xE2) == ""
    assert stopped.finish() == "\ufffd"
    assert stopped.length == 1
