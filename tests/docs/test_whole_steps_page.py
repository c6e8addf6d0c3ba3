"""docs/whole-steps.md, its command and the example that it names run, and print what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, run_blocks, text_of

from graphstep.cli.main import main

PAGE = text_of("whole-steps.md")
EXAMPLE = ROOT / "examples" / "graphed_step.py"
COMMANDS = re.findall(r"^(graphstep .*)$", PAGE, re.MULTILINE)
FEWER_STEPS = shlex.split("--train-iters 8 --eval-iters 1 --num-layers 1 --seq-length 32 --compare-with-eager 6")


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    number, expected = run_blocks("whole-steps.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number == 8


@pytest.mark.parametrize("options", ["", "--gradient-accumulation-fusion --parallel-weight-gradients --compile"])
def test_the_command_equals_eager(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = COMMANDS
    assert main([*shlex.split(command)[1:], *shlex.split(options), *FEWER_STEPS]) == 0, capsys.readouterr().err
    assert "equal: all losses of 6 steps" in " ".join(capsys.readouterr().out.split())


def test_options_of_the_table_exist(capsys: pytest.CaptureFixture[str]) -> None:
    options = re.findall(r"^\| `(--[\w-]+)` \|", PAGE, re.MULTILINE)
    assert len(options) == 6
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [option for option in options if option not in shown] == []


def printed(path: Path) -> list[str]:
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    return done.stdout.splitlines()


def test_without_its_graphs_the_example_prints_the_same_losses(tmp_path: Path) -> None:
    """To six places, after steps in which gradients, dropout, clipping and the schedule have had their say."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    plain = [line for line in lines if not line.endswith("  # graphs")]
    assert len(lines) - len(plain) == 4
    copy = tmp_path / "plain.py"
    copy.write_text("\n".join(plain).replace("__file__", repr(str(EXAMPLE))), encoding="utf-8")
    *losses, graphs = printed(EXAMPLE)
    assert losses == printed(copy)
    assert graphs == "37 replays"
    assert float(losses[-1].split()[-1]) < float(losses[0].split()[-1])
