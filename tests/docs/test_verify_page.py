"""docs/verify.md: its blocks run and print what they say, its options exist, its command runs."""

from __future__ import annotations

import re
import shlex

import pytest
from tests.docs.pages import run_blocks, text_of

from graphstep.cli.main import main

PAGE = text_of("verify.md")
COMMANDS = re.findall(r"^(graphstep .*)$", PAGE, re.MULTILINE)
FEWER_STEPS = shlex.split(
    "--train-iters 6 --eval-iters 1 --num-layers 1 --seq-length 16 --hidden-size 32 --compare-with-eager 5"
)


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    number, expected = run_blocks("verify.md")
    printed = capsys.readouterr().out.splitlines()
    shown = re.search(r"^# (\[\('call.*)$", PAGE, re.MULTILINE)
    assert shown is not None
    assert printed == [*expected, shown[1]]
    assert number == 4


def test_the_command_equals_eager(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = COMMANDS
    words = [*shlex.split(command)[1:], *FEWER_STEPS]
    words[words.index("--cuda-graph-shadow-interval") + 1] = "3"
    assert main(words) == 0, capsys.readouterr().err
    printed = " ".join(capsys.readouterr().out.split())
    assert "equal bit for bit" in printed
    assert "replay against eager at iteration 3 | equal" in printed
    assert "equal: all losses of 5 steps" in printed


def test_options_of_the_table_exist(capsys: pytest.CaptureFixture[str]) -> None:
    options = re.findall(r"`(--[\w-]+)`", PAGE)
    assert len(set(options)) == 4
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [option for option in options if option not in shown] == []
