"""Garbage is collected before a row of captures, and not again by each of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from graphstep.capture.garbage import collected_once


@pytest.fixture(autouse=True)
def collector_is_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_old_garbage_goes_first_and_the_collector_stays_off() -> None:
    gone: list[str] = []

    class Cycle:
        def __init__(self, name: str) -> None:
            self.name, self.itself = name, self

        def __del__(self) -> None:
            gone.append(self.name)

    Cycle("old")
    with collected_once():
        assert gone == ["old"]
        assert not gc.isenabled()
        Cycle("new")
        assert gone == ["old"]
    assert gc.isenabled()
    gc.collect()
    assert gone == ["old", "new"]


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collected_once():
        pass
    assert not gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="body"), collected_once():
        raise ValueError("body")
    assert gc.isenabled()


def test_what_others_have_frozen_stays_frozen() -> None:
    before = gc.get_freeze_count()
    with collected_once():
        assert gc.get_freeze_count() == before
    assert gc.get_freeze_count() == before
