"""What README.md shows is run: its command lines with fewer steps, and its Python."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from graphstep.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FEWER_STEPS = {
    "train": shlex.split("--train-iters 8 --eval-interval 8 --eval-iters 1 --num-layers 1 --seq-length 32"),
    "config": [],
    "plan": shlex.split("--num-layers 1 --seq-length 32"),
    "doctor": [],
}
FINDINGS = {"doctor": 1}
"""Exit code of commands that find what they are shown to find."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("graphstep ")]


def test_the_readme_shows_commands_and_python() -> None:
    assert len(commands()) >= 3
    assert len(blocks("python")) == 2


@pytest.mark.parametrize("command", commands())
def test_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[1:]
    if "--cuda-graph-report" in words:
        words[words.index("--cuda-graph-report") + 1] = str(tmp_path / "report.html")
    if "--compare-with-eager" in words:
        words[words.index("--compare-with-eager") + 1] = "6"
    assert main([*words, *FEWER_STEPS[words[0]]]) == FINDINGS.get(words[0], 0), capsys.readouterr().err
    assert capsys.readouterr().out


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_attach(capsys: pytest.CaptureFixture[str]) -> None:
    """Every step but the first replays, microbatch for microbatch."""
    manager = run(blocks("python")[0])["manager"]
    rows = manager.report().rows
    assert [row.name for row in rows] == [f"layers.{index}" for index in range(4)]
    assert [(row.num_replays, dict(row.eager_calls)) for row in rows] == [(9 * 2, {"observed": 2})] * 4
    assert "4 of 4 regions" in capsys.readouterr().out


def test_full_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(blocks("python")[1])
    shown = capsys.readouterr().out
    assert shown.startswith(str(names["losses"]))
    assert "3 warmup" in shown
    assert names["losses"].shape == (2,)
