"""docs/inference.md, its commands and its example run, and print what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.docs.pages import run_blocks, text_of

from graphstep.cli.main import main

PAGE = text_of("inference.md")
COMMANDS = re.findall(r"^graphstep (.*)$", PAGE, re.MULTILINE)
SMALLER = {
    "train": "--mock-data --train-iters 2 --eval-iters 1 --hidden-size 64 --seq-length 96 --num-layers 1 --device cpu",
    "generate": "--inference-dynamic-batching-max-requests 2 --inference-dynamic-batching-max-tokens 16 --device cpu",
}


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    number, expected = run_blocks("inference.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number == 2


def test_the_commands_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = []
    for command in COMMANDS:
        words = shlex.split(command)
        kinds.append(words[0])
        more = shlex.split(SMALLER[words[0]])
        if "local" in words:
            more += ["--inference-dynamic-batching-num-cuda-graphs", "2"]
        assert main([*words, *more]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    assert kinds == ["train", "generate", "generate", "generate"]
    assert ">>> import os" in shown.out
    assert re.search(r"graph hits +│ (\d+) of \1 steps \(100 %\)", shown.err)


def test_options_of_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [option for option in set(re.findall(r"`(--[a-z][\w-]+)", PAGE)) if option not in shown] == []
