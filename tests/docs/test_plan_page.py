"""docs/plan.md runs, and prints what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.docs.pages import run_blocks, text_of

from graphstep.cli.main import main

COMMANDS = re.findall(r"^graphstep (.*)$", text_of("plan.md"), re.MULTILINE)
SMALLER = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --device cpu"


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    number, expected = run_blocks("plan.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number == 2


def test_the_commands_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 3
    for command in COMMANDS:
        assert main([*shlex.split(command), *shlex.split(SMALLER)]) == 0, capsys.readouterr().err
    assert '"recommended":' in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
