"""docs/fp8.md runs, and prints what it says."""

from __future__ import annotations

import pytest
from tests.docs.pages import run_blocks


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    number, expected = run_blocks("fp8.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number == 3
