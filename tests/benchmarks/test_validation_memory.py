"""The comparison of memory with validation, on the CPU: both arms run, and compute the same."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = [
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "8",
    "--vocab-size",
    "64",
    "--device",
    "cpu",
]


def test_both_arms_lose_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("validation_memory")
    assert program.main([*TINY, "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    eager, graphed = record["arms"]
    assert record["is_equal"]
    assert len(set(eager["losses"])) > program.NUM_STEPS // 2, "the model should learn"
    replays = {row["name"]: row["num_replays"] for row in graphed["report"]["regions"]}
    assert replays == {"training": program.NUM_STEPS - 3, "validation": program.NUM_STEPS // 2 - 3}
