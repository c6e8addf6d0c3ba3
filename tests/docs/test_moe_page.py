"""docs/moe.md, its commands and its examples run, and print what they say."""

from __future__ import annotations

import re
import shlex

import pytest
from tests.docs.pages import run_blocks, text_of

from graphstep.cli.main import main

PAGE = text_of("moe.md")
COMMANDS = re.findall(r"^graphstep train (.*)$", PAGE, re.MULTILINE)
SMALLER = shlex.split("--mock-data --train-iters 6 --eval-iters 1 --hidden-size 64 --seq-length 16")


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    number, expected = run_blocks("moe.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_equals_eager(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    words[words.index("--compare-with-eager") + 1] = "6"
    shape = "--mamba-state-dim 16" if "--hybrid-layer-pattern" in words else "--num-layers 2"
    assert main(["train", *words, *SMALLER, *shape.split()]) == 0, capsys.readouterr().err
    shown = " ".join(capsys.readouterr().out.split())
    assert "equal: all losses of 6 steps" in shown
    assert "0 recordings" not in shown


def test_the_last_command_says_whether_experts_are_inside(capsys: pytest.CaptureFixture[str]) -> None:
    [command] = re.findall(r"^graphstep (config .*)$", PAGE, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert "experts: in graphs, and no token is dropped" in " ".join(capsys.readouterr().out.split())


def test_options_of_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [option for option in set(re.findall(r"`(--[a-z][\w-]+)", PAGE)) if option not in shown] == []
