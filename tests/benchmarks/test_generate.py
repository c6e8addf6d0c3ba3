"""The benchmark of generation, on the CPU: tiny. Its numbers are no concern of this test."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK = ["--quick", "--device", "cpu", "--batches", "2"]


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("generate")


def test_all_parts(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([*QUICK, "--output", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [arm["name"] for arm in results["arms"]] == list(program.ARMS)
    for arm in results["arms"]:
        if arm["name"].startswith("transformers") and "No module named" in arm.get("reason", ""):
            continue
        assert arm["tokens_per_second"] > 0, arm
        if arm["name"] in ("block", "layer"):
            assert arm["details"]["rows"][0]["num_replays"] > 0
    (traffic,) = results["traffic"]
    assert traffic["decode_hit_rate"] == 1
    assert traffic["num_captures_after_start"] == 0
    assert traffic["blocks_leaked"] == 0
    assert traffic["requests_with_equal_tokens"] == traffic["num_requests"] == 8
    assert results["host_without_forward"]["2"]["step_ms"] > 0
    equality = results["equality_in_float32"]
    if "reason" not in equality:
        assert set(equality["arms"].values()) == {equality["of"]}
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == results


def test_an_arm_that_takes_too_long_is_given_up(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "measure", lambda *_: time.sleep(10))
    parts = ["--arms", "none", "--traffic", "--no-equality", "--arm-seconds", "0.1"]
    assert program.main([*QUICK, *parts]) == 1


def test_other_tokens_in_float32_are_a_failure(program: ModuleType) -> None:
    arms = [{"name": "block"}, {"name": "transformers", "reason": "not installed"}]
    results = {"arms": arms, "traffic": [], "equality_in_float32": {"of": 8, "arms": {"block": 8}}}
    assert not program.has_failed(results)
    results["equality_in_float32"] = {"of": 8, "arms": {"block": 7}}
    assert program.has_failed(results)


def test_tokens_are_counted_up_to_the_first_that_differs(program: ModuleType) -> None:
    found = [
        {"name": "transformers", "batch": 2, "tokens": [[1, 2, 3], [4, 5, 6]]},
        {"name": "block", "batch": 2, "tokens": [[1, 2, 3], [4, 9, 6]]},
        {"name": "none", "batch": 2, "reason": "it broke"},
    ]
    program.compare(found)
    assert found[1]["equal_tokens"] == {"least": 1, "mean": 2, "of": 3}
    assert "equal_tokens" not in found[2]
