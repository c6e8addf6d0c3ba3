"""The benchmark of the host's time of a replay, on the CPU: tiny. Its numbers are no concern of this test."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ["--num-layers", "3", "--hidden-size", "16", "--seq-length", "8", "--device", "cpu", "--quick"]


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("local_host_time")


@pytest.mark.parametrize("more", [[], ["--main-grads", "--position-embedding-type", "rope"]], ids=["bf16", "main"])
def test_layers_are_timed(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert program.main([*TINY, "--replays", "10", *more, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(printed.splitlines()[-1])
    found = {arm["name"]: arm for arm in results["arms"]}
    assert list(found) == ["eager", "local", "local_merged", "make_graphed_callables", "bare_replay"]
    for name in ("eager", "local", "local_merged"):
        assert found[name]["status"] == "ok", found[name]["reason"]
        assert found[name]["num_replays"] == 2 * 4 * 3  # passes, steps, layers
        assert len(found[name]["passes"]) == 2
        for half in ("forward_us", "backward_us"):
            assert found[name][half]["count"] == 8
            assert 0.0 < found[name][half]["p10"] <= found[name][half]["median"] <= found[name][half]["p90"]
    details = found["local"]["passes"][0]["details"]
    assert details["num_regions"] == 3
    assert sum(details["eager_calls"].values()) == 3  # the observed step
    assert details["num_replays"] >= 3 * 9  # layers, steps after the capture
    for name in ("make_graphed_callables", "bare_replay"):
        assert (found[name]["status"], found[name]["reason"]) == ("unavailable", "needs a CUDA device")
    assert results["config"]["gradients"] == ("fp32 main_grad" if more else "bf16 .grad")
    assert results["commit"].keys() == {"commit", "is_dirty"}
    assert str(tmp_path) not in printed
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("local_host_time-cpu-2")
    assert json.loads(written.read_text()) == results


def test_where_the_time_goes(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = ["--arms", "eager", "local", "--split"]
    assert program.main([*TINY, "--replays", "3", *arms, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = {arm["name"]: arm["split_us"] for arm in json.loads(printed.splitlines()[-1])["arms"]}
    assert found["eager"] is None
    assert found["local"].keys() == {"first_layer", "later_layers", "tiny_backward"}, "a tape has no launches"
    assert all(us > 0.0 for us in found["local"].values())
    assert "- local, us: first_layer" in printed


def test_an_arm_that_does_not_replay_fails(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(program.HOST_ARMS["local"]):  # type: ignore[name-defined,misc]
        num_steps = 0

        def details(self) -> dict[str, Any]:
            self.num_steps += 1
            return {**super().details(), "eager_calls": {"observed": self.num_steps}}

    given, config = program.read_options(TINY)
    assert given.replays is None
    case = program.Case.make(config, device=torch.device("cpu"), has_main_grads=False)
    monkeypatch.setattr(program, "HOST_ARMS", {"local": Forgetful, "eager": program.HOST_ARMS["eager"]})
    local, eager = program.run(case, ["local", "eager"], num_replays=2)
    assert local.status == "failed"
    assert "layers ran eagerly while they were timed: {'observed': 2}" in local.reason
    assert eager.status == "ok"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(program.render([local, eager], title="title"))
    assert "failed" in console.export_text()


def test_clock_divides_by_the_layers(program: ModuleType) -> None:
    _, config = program.read_options(TINY)
    case = program.Case.make(config, device=torch.device("cpu"), has_main_grads=False)
    timed = program.measure(program.HOST_ARMS["eager"](), case, num_replays=7)
    assert len(timed.forward_us) == len(timed.backward_us) == 3  # 3 steps of 3 layers are at least 7
    record = program.HostRecord(name="x", is_ours=True, num_layers=3, passes=[timed])
    assert record.to_json()["num_replays"] == 9
    assert program.HostRecord(name="x", is_ours=True, num_layers=3).to_json()["forward_us"] is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--global-batch-size", "4"], "leave it out"), (["--fp32", "--main-grads"], "contradict each other")],
)
def test_bad_options(program: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert program.main([*TINY, *words]) == 2
    assert expected in capsys.readouterr().err


def test_defaults(program: ModuleType) -> None:
    given, config = program.read_options([])
    assert (config.model.num_layers, config.model.hidden_size, config.training.bf16) == (24, 64, True)
    assert set(given.arms) == set(program.HOST_ARMS)
