from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.training.doubles import MemoryLog, tiny_config

from graphstep.training.logging import (
    ConsoleLog,
    JsonLinesLog,
    LogFanout,
    TensorBoardLog,
    make_logs,
    tensorboard_problem,
)

TRAIN = {
    "iteration": 10,
    "train_iters": 40,
    "loss": 2.5,
    "learning_rate": 1e-3,
    "grad_norm": 0.75,
    "step_ms": 12.5,
    "tokens_per_second": 4096.0,
}


def feed(log) -> None:
    log.write("start", {"iteration": 0, "train_iters": 40})
    log.write("train", TRAIN)
    log.write("validation", {"iteration": 10, "loss": 2.25})
    log.write("warning", {"iteration": 10, "message": "something [odd]"})
    log.write("checkpoint", {"iteration": 10, "path": "runs/iter_0000010"})
    log.write("end", {"iteration": 10})
    log.close()
    log.close()


def test_the_console_prints_plain_lines_when_nobody_watches() -> None:
    text = io.StringIO()
    feed(ConsoleLog(Console(file=text, width=40)))
    assert text.getvalue().splitlines() == [
        "iteration      10/40 | loss 2.5000 | lr 1.000e-03 | grad norm 0.750 | 12.5 ms/step | 4,096 tokens/s",
        "validation at iteration 10 | loss 2.2500",
        "warning: something [odd]",
        "checkpoint of iteration 10 written to runs/iter_0000010",
    ]


def test_the_console_redraws_a_line_on_a_terminal() -> None:
    text = io.StringIO()
    feed(ConsoleLog(Console(file=text, width=120, force_terminal=True)))
    assert "loss 2.5000" in text.getvalue()
    assert "iteration 10/40" in text.getvalue()
    assert "validation at iteration 10 | loss 2.2500" in text.getvalue()


def test_json_lines_are_appended_and_readable_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    first = JsonLinesLog(path)
    assert not path.exists(), "nothing is created before the first event"
    first.write("train", TRAIN)
    assert json.loads(path.read_text())["loss"] == 2.5, "flushed without close"
    first.close()
    feed(JsonLinesLog(path))
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert events == ["train", "start", "train", "validation", "warning", "checkpoint", "end"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    log = JsonLinesLog(tmp_path / "run.jsonl")
    log.write("train", {"loss": float("nan"), "grad_norm": float("inf"), "iteration": 1})
    log.close()
    assert json.loads((tmp_path / "run.jsonl").read_text()) == {
        "event": "train",
        "loss": None,
        "grad_norm": None,
        "iteration": 1,
    }


def test_tensorboard_scalars_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra graphstep[report]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "board"
    log = TensorBoardLog(folder)
    log.write("start", {"iteration": 0})
    assert not folder.exists()
    feed(log)
    events = EventAccumulator(str(folder))
    events.Reload()
    assert "train/loss" in events.Tags()["scalars"]
    (scalar,) = events.Scalars("validation/loss")
    assert (scalar.step, scalar.value) == (10, 2.25)


def test_a_missing_tensorboard_is_a_problem_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = tensorboard_problem()
    assert problem is not None
    assert "graphstep[report]" in problem.fix


def test_fanout_reaches_all_and_options_choose(tmp_path: Path) -> None:
    logs = [MemoryLog(), MemoryLog()]
    feed(LogFanout(logs))
    assert logs[0].events == logs[1].events
    assert len(logs[0].events) == 8
    training = tiny_config(log_jsonl=str(tmp_path / "a.jsonl"), tensorboard_dir=str(tmp_path / "b")).training
    kinds = [type(log).__name__ for log in make_logs(training, Console(file=io.StringIO()))._logs]
    assert kinds == ["ConsoleLog", "JsonLinesLog", "TensorBoardLog"]
    assert list(tmp_path.iterdir()) == []
