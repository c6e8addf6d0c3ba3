"""The benchmark of memory, on the CPU, where there is no memory to read: orders, equality, results."""

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
TINY = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--vocab-size", "128"),
    *("--seq-length", "8", "--device", "cpu", "--quick"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("local_memory")


@pytest.mark.parametrize(
    ("name", "num_in_flight", "expected"),
    [
        ("one_at_a_time", 1, "F0 B0 F1 B1 F2 B2"),
        ("all_forward_all_backward", 3, "F0 F1 F2 B0 B1 B2"),
        ("1f1b", 3, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"),
    ],
)
def test_orders(program: ModuleType, name: str, num_in_flight: int, expected: str) -> None:
    order = program.ORDERS[name](3)
    assert " ".join(f"{half[0].upper()}{index}" for half, index in order.events) == expected
    assert order.name == name
    assert order.num_in_flight == num_in_flight
    assert order.num_microbatches == len(expected.split()) // 2
    assert program.ORDERS[name](1).num_in_flight == 1


@pytest.mark.parametrize("name", ["one_at_a_time", "all_forward_all_backward", "1f1b"])
def test_local_does_the_work_of_eager(program: ModuleType, name: str) -> None:
    options = program.read_options([*TINY, "--in-flight", "2"])
    order = program.ORDERS[name](2)
    eager, local, merged = program.compared(
        [program.measure(options, arm, order, CPU) for arm in ("eager", "local", "local_merged")]
    )
    for result in (eager, local, merged):
        assert result["status"] == "ok", result["reason"]
        assert result["losses_equal"]
        assert len(result["losses"]) == order.num_microbatches
        assert result["memory_bytes"]["peak_reserved"] is None
        assert result["peak_reserved_over_eager"] is None
    assert eager["capture_seconds"] is None
    assert local["capture_seconds"] > 0.0
    assert local["details"]["num_replays"] > 0


def test_processes_of_their_own(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TINY, "--in-flight", "2", "--orders", "1f1b", "--output", str(tmp_path)]
    assert program.main(argv) == 0
    printed = capsys.readouterr().out
    results = json.loads(printed.splitlines()[-1])
    assert [(arm["order"], arm["name"]) for arm in results["arms"]] == [("1f1b", "eager"), ("1f1b", "local")]
    assert all(arm["status"] == "ok" and arm["losses_equal"] and arm["num_in_flight"] == 2 for arm in results["arms"])
    assert results["config"]["orders"] == {"1f1b": "F0 F1 B0 F2 B1 F3 B2 B3"}
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("local_memory-cpu-2")
    assert json.loads(written.read_text()) == results
    assert str(tmp_path) not in printed


def test_arms_that_fail(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    options = program.read_options([*TINY, "--in-flight", "2"])

    def no_step(gradients: object, *, order: object) -> Any:
        del gradients, order
        return lambda **_: None

    monkeypatch.setattr(program, "ordered_step", no_step)
    result = program.measure(options, "eager", program.ORDERS["1f1b"](2), CPU)
    assert (result["status"], result["reason"][:19]) == ("failed", "run: AttributeError")
    died = program.measure_apart([*TINY, "--no-such-option"], "local", program.ORDERS["1f1b"](2))
    assert (died["status"], died["reason"]) == ("failed", "its process ended with code 2")
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(program.render(program.compared([result, died]), title="title"))
    assert console.export_text().count("failed") == 2


def test_ratios_to_eager(program: ModuleType) -> None:
    def result(name: str, size: int) -> dict[str, Any]:
        memory = dict.fromkeys(
            ("peak_reserved", "peak_allocated", "steady_reserved", "steady_allocated", "driver_used"), size * 2**20
        )
        return {
            **{"name": name, "order": "1f1b", "num_in_flight": 4, "is_ours": True, "status": "ok", "reason": ""},
            **{"losses": [1.0, float(size)], "capture_seconds": 1.5, "ready_seconds": 2.0},
            **{"memory_bytes": memory, "details": {"pool_bytes": 3 * 2**20, "static_bytes": 2**20}},
        }

    eager, local, other = program.compared(
        [result("eager", 100), result("local", 105), result("x", 1) | {"order": "y"}]
    )
    assert local["peak_reserved_over_eager"] == pytest.approx(1.05)
    assert (eager["losses_equal"], local["losses_equal"], other["losses_equal"]) == (True, False, None)
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(program.render([eager, local, other], title="title"))
    text = console.export_text()
    for words in ("1.050x", "105.0", "1.50", "3.0", "no"):
        assert words in text


def test_bad_options(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([*TINY, "--lr", "1", "--hidden-dropout", "0.1"]) == 2
    printed = capsys.readouterr().err
    assert "--lr has no effect" in printed
    assert "arms draw different numbers" in printed


def test_defaults_are_the_larger_model(program: ModuleType) -> None:
    options = program.read_options([])
    model = options.config(options.orders[0]).model
    assert (model.num_layers, model.hidden_size, model.seq_length) == (24, 1024, 1024)
    assert options.arms == ("eager", "local")
    assert [order.num_in_flight for order in options.orders] == [1, 4, 4]
    assert [order.num_microbatches for order in options.orders] == [4, 4, 8]
