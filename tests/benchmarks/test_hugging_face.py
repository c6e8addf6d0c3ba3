"""The benchmark of transformers models, on the CPU: tiny. Its numbers are no concern of this test."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ["--quick", "--device", "cpu", "--fp32", "--seq-length", "8", "--micro-batch-size", "2"]


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("hugging_face")


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_arms(program: ModuleType, model: str, tmp_path: Path) -> None:
    assert program.main([*TINY, "--model", model, "--output", str(tmp_path)]) == 0
    (written,) = tmp_path.iterdir()
    arms = {arm["name"]: arm for arm in json.loads(written.read_text())["arms"]}
    assert set(arms) == set(program.JOBS)
    for name, arm in arms.items():
        if name == "graph_step_compile" or (name == "attach_whole" and model == "tiny-llama"):
            assert arm["status"] == "unavailable"
            continue
        assert arm["status"] == "ok"
        assert arm["step_ms"]["count"] == 3
        if name != "graph_step":  # transformers makes a mask in the capture, and the kernels round differently
            assert arm["equals_eager"] == [True] * 6, name
        if "eager" not in name:
            assert sum(row["num_replays"] for row in arm["passes"][0]["report"]["regions"]) > 0


def test_a_difference_is_shown(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = program.AttachJob.step

    def wrong(self: object, tokens: object) -> object:
        return step(self, tokens) + 1

    monkeypatch.setattr(program.AttachJob, "step", wrong)
    arms = ["--arms", "eager", "attach"]
    assert program.main([*TINY, *arms, "--model", "tiny-llama", "--output", str(tmp_path)]) == 0
    (written,) = tmp_path.iterdir()
    _, attached = json.loads(written.read_text())["arms"]
    assert attached["equals_eager"] == [False] * 6
