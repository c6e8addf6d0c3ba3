"""The long job in short, on both engines: alternating microbatches, validation, a resume, and a checkpoint loaded."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("device", "options"),
    [
        pytest.param("cpu", [], id="cpu fp32"),
        pytest.param("cuda", [], id="cuda fp32", marks=pytest.mark.gpu),
        pytest.param("cuda", ["--bf16"], id="cuda bf16", marks=pytest.mark.gpu),
    ],
)
def test_a_short_job_equals_the_eager_one(
    device: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    program = importlib.import_module("soak")
    monkeypatch.setattr(program, "STEPS_OF_A_KIND", 8)
    monkeypatch.setattr(program, "VALIDATED_EVERY", 4)
    arguments = ["--num-steps", "60", "--device", device, "--output", str(tmp_path), *options]
    assert program.main(arguments) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    eager, *graphed = record["arms"]
    assert eager["num_replays"] == 0
    assert [arm["name"] for arm in graphed] == ["full_iteration", "graph_step"]
    for arm in graphed:
        assert arm["is_equal"], arm["difference"]
        assert arm["num_recordings"] == 6  # two numbers of microbatches and validation, before and after the resume
        assert arm["num_replays"] > 30
        assert arm["eager_calls"]["warmup after a change of the state of an optimizer"] > 0
        if device == "cuda":
            early, late = arm["allocated_bytes"].values()
            assert late <= early * 1.02 + 2**20
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == record


def test_a_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("soak")
    job = program.Job("eager", program.torch.device("cpu"), bf16=False, seed=1)
    mine = {name: value.clone() for name, value in job.model.state_dict().items()}
    theirs = {name: value.clone() for name, value in mine.items()}
    assert program.first_difference(mine, theirs) is None
    name = list(mine)[1]
    theirs[name].view(-1)[0] += 1e-6
    assert program.first_difference(mine, theirs) == name
    job.close()
