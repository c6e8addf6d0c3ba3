"""``graphstep train --cuda-graph-report`` and ``--cuda-graph-trace``."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from graphstep.cli.train import run
from graphstep.errors import UserInputError
from graphstep.training.loop import Trainer

TINY = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
    *("--micro-batch-size", "2", "--train-iters", "12", "--eval-iters", "0", "--log-interval", "12"),
    *("--device", "cpu", "--mock-data"),
)
LOCAL = ("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn", "--cuda-graph-warmup-steps", "1")
FULL = ("--cuda-graph-impl", "full_iteration", "--no-check-for-nan-in-loss-and-grad")


def output_of(*argv: str) -> str:
    text = io.StringIO()
    assert run([*TINY, *argv], console=Console(file=text, width=200)) == 0
    return text.getvalue()


def states_of(document: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    nodes = [document["tree"]]
    while nodes:
        node = nodes.pop()
        found[node["path"]] = node["coverage"]
        nodes += node["children"]
    return found


def test_page_and_trace_are_written_beside_the_usual_output(tmp_path: Path) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    output = output_of(*LOCAL, "--cuda-graph-report", str(page), "--cuda-graph-trace", str(trace))
    assert f"report: {page}" in output
    assert f"trace: {trace}" in output
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "layers.1.attention" in text
    names = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert {"eager: host", "graphed: host"} <= names


@pytest.mark.parametrize("impl", [LOCAL, FULL], ids=["local", "full_iteration"])
def test_the_data_has_both_times_and_the_tree(impl: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    output_of(*impl, "--cuda-graph-report", str(path), "--compare-with-eager", "4")
    document = json.loads(path.read_text(encoding="utf-8"))
    for arm in ("before", "after"):
        assert document[arm]["step_ms"] > 0
        assert document[arm]["timeline"]["num_steps"] == 3
        assert document[arm]["timeline"]["num_launches"] > 50
    states = states_of(document)
    assert states["layers.0.attention"] == states["layers.1.attention_norm"] == "captured"
    assert states["head"] == ("captured" if impl is FULL else "eager")
    assert document["report"]["pool_bytes"] > 0
    assert any(fact["name"] == "command" and "--cuda-graph-impl" in fact["value"] for fact in document["facts"])


def test_an_eager_run_is_its_own_before(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    output_of("--cuda-graph-report", str(path))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["before"]["timeline"]["num_launches"] > 50
    assert document["after"] is None
    assert set(states_of(document).values()) == {"eager"}


def test_the_report_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    def losses(*argv: str) -> list[str]:
        return [
            line
            for line in output_of(*LOCAL, "--log-interval", "1", *argv).splitlines()
            if line.startswith("iteration")
        ]

    def without_times(lines: list[str]) -> list[str]:
        return [line.partition("grad norm")[0] for line in lines]

    plain, reported = losses(), losses("--cuda-graph-report", str(tmp_path / "report.html"))
    assert without_times(plain) == without_times(reported)
    assert len(plain) == 12


def test_a_short_run_has_one_step_profiled_and_a_single_one_none(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    output_of(*LOCAL, "--train-iters", "4", "--cuda-graph-report", str(path))
    assert json.loads(path.read_text())["after"]["timeline"]["num_steps"] == 1
    output_of(*LOCAL, "--train-iters", "1", "--cuda-graph-report", str(path))
    assert json.loads(path.read_text())["after"]["timeline"] is None


def test_wrong_files_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as caught:
        output_of("--cuda-graph-report", "report.pdf", "--cuda-graph-trace", "trace.txt")
    assert {problem.code for problem in caught.value.problems} == {
        "cuda-graph-report-range",
        "cuda-graph-trace-range",
    }
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserInputError, match="is not a folder"):
        output_of("--cuda-graph-report", str(tmp_path / "file" / "report.html"))


def test_missing_folders_do_not_cost_the_report_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.json"
    output_of(*LOCAL, "--train-iters", "2", "--cuda-graph-report", str(path))
    assert json.loads(path.read_text(encoding="utf-8"))["report"]["num_recordings"] == 4


def test_an_interrupted_run_has_a_report_of_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after_step = Trainer._after_step

    def interrupt(trainer: Trainer) -> None:
        after_step(trainer)
        if trainer.iteration == 10:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "_after_step", interrupt)
    path, text = tmp_path / "report.json", io.StringIO()
    words = [*TINY, *LOCAL, "--cuda-graph-report", str(path), "--cuda-graph-trace", str(tmp_path / "trace.json")]
    assert run(words, console=Console(file=text, width=200)) == 130
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["before"] is None
    assert document["after"]["step_ms"] > 0
    assert states_of(document)["layers.0.attention"] == "captured"
    monkeypatch.undo()
    # The profiler ran when the run was interrupted: it can be started again.
    output_of(*LOCAL, "--cuda-graph-report", str(path))
