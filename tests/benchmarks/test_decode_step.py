"""The benchmark of decode steps, on the CPU: tiny. Its numbers are no concern of this test."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--num-query-groups", "2"),
    *("--ffn-hidden-size", "48", "--vocab-size", "64", "--seq-length", "64", "--max-position-embeddings", "64"),
    *("--quick", "--device", "cpu", "--fp32"),
]


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("decode_step")


def test_scopes_are_timed(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([*TINY, "--requests", "1", "3", "--output", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    arms = [(arm["scope"], arm["num_requests"], arm["status"]) for arm in results["arms"]]
    assert arms == [(scope, number, "ok") for number in (1, 3) for scope in ("none", "layer", "block")]
    for arm in results["arms"]:
        assert arm["step_ms"]["count"] == 2 * 4
        assert (arm["passes"][0]["num_graphs"] > 0) is (arm["scope"] != "none")
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == results


def test_other_tokens_are_a_failure(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = program.measure

    def wrong(model: object, scope: str, *arguments: object, **named: object) -> object:
        timed = measure(model, scope, *arguments, **named)
        if scope == "block":
            timed.tokens[0][0] += 1
        return timed

    monkeypatch.setattr(program, "measure", wrong)
    assert program.main([*TINY, "--requests", "1"]) == 1
