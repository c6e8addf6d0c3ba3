"""The count of static buffer sets, on the CPU: all ranks, with few microbatches."""

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
    "--device",
    "cpu",
]


def test_as_many_as_microbatches_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("order_buffers")
    assert program.main([*TINY, "--num-microbatches", "4", "12", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(printed.splitlines()[-1])
    assert len(record["runs"]) == len(program.ARMS) * 4 * 2
    for run in record["runs"]:
        assert run["num_buffer_sets"] == run["num_in_flight"] == 4 - run["rank"]
        assert run["static_bytes"] > 0
    few, many = (
        {(run["arm"], run["rank"]): run["static_bytes"] for run in record["runs"] if run["num_microbatches"] == number}
        for number in (4, 12)
    )
    assert few == many
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == record
