"""docs/hugging-face.md runs and prints what it says, and the examples that it names exist."""

from __future__ import annotations

import re

import pytest
from tests.docs.pages import ROOT, run_blocks, text_of


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    number, expected = run_blocks("hugging-face.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number == 4


def test_examples_exist() -> None:
    names = re.findall(r"\(\.\./(examples/\w+\.py)\)", text_of("hugging-face.md"))
    assert len(names) == 2
    assert all((ROOT / name).is_file() for name in names)
