"""The comparison of graphed and eager training, on the CPU: a tiny model, one combination of each strategy."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
    *("--mock-data", "--device", "cpu", "--quick", "--num-steps", "6"),
]


def test_all_strategies_equal_eager_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("train_equality")
    assert program.main([*TINY, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(printed.splitlines()[-1])
    assert len(record["runs"]) == len(program.STRATEGIES)
    for run in record["runs"]:
        assert run["is_equal"], run["difference"]
        assert run["num_steps"] == 6
        assert run["num_recordings"] > 0
        assert run["num_replays"] > 0
    assert str(tmp_path) not in printed
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == record
