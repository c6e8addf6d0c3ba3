"""docs/coverage.md runs, and prints what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.docs.pages import run_blocks, text_of

from graphstep.cli.main import main

COMMANDS = re.findall(r"^graphstep (.*)$", text_of("coverage.md"), re.MULTILINE)
SMALLER = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --eval-iters 0 --mock-data --device cpu"
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    number, expected = run_blocks("coverage.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number == 3
    assert {path.name for path in workplace.iterdir()} == {"report.html", "report.json", "trace.json"}


def test_the_commands_run(workplace: Path) -> None:
    assert len(COMMANDS) == 2
    for command in COMMANDS:
        assert main([*shlex.split(command), *shlex.split(SMALLER)]) == 0
    assert {path.name for path in workplace.iterdir()} == {"report.html", "report.json", "trace.json"}
