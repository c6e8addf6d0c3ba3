"""docs/graphed-callables.md and the example that it walks through run, and print what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, run_blocks, text_of

PAGE = text_of("graphed-callables.md")
EXAMPLE = ROOT / "examples" / "custom_loop.py"


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    number, expected = run_blocks("graphed-callables.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number >= 4


def test_the_example_trains() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    *steps, graphs = done.stdout.splitlines()
    losses = [float(line.rsplit(maxsplit=1)[1]) for line in steps]
    assert losses == sorted(losses, reverse=True) or losses[-1] < losses[0]
    assert graphs == "6 graphs"


def test_six_lines_wire_the_example() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert sum(line.endswith("  # graphs") for line in lines) == 6
    assert len(re.findall(r"^\| `", PAGE, re.MULTILINE)) == 6


def test_without_those_lines_the_example_prints_the_same_losses(tmp_path: Path) -> None:
    """Bit for bit: the losses are printed after steps in which gradients, dropout and clipping have had their say."""
    text = EXAMPLE.read_text(encoding="utf-8")
    plain = "\n".join(line for line in text.splitlines() if not line.endswith("  # graphs"))
    # The sample drew random numbers.
    plain = plain.replace("\nfor step in", "\ntorch.randn(BATCH, LENGTH, HIDDEN, device=device)\nfor step in", 1)
    plain = plain.replace("__file__", repr(str(EXAMPLE)))
    copy = tmp_path / "plain.py"
    copy.write_text(plain, encoding="utf-8")
    outputs = [
        subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300).stdout
        for path in (EXAMPLE, copy)
    ]
    assert outputs[0].splitlines()[:-1] == outputs[1].splitlines()
