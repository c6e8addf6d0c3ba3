"""Garbage is collected before a row of captures, and what others have frozen is left alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from graphstep.capture.garbage import collected_once


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def test_old_garbage_goes_and_new_garbage_can_be_collected() -> None:
    gone: list[str] = []

    class Cycle:
        def __init__(self, name: str) -> None:
            self.name, self.itself = name, self

        def __del__(self) -> None:
            gone.append(self.name)

    gc.disable()
    try:
        Cycle("old")
        with collected_once():
            assert gone == ["old"]
            assert gc.get_freeze_count() > 0
            Cycle("new")
            gc.collect()
            assert gone == ["old", "new"]
    finally:
        gc.enable()
    assert gc.get_freeze_count() == 0


def test_what_others_have_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with collected_once():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
