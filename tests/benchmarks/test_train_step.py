"""The benchmark of a training step, on the CPU: a tiny model, few repeats. Its numbers are no concern of this test."""

from __future__ import annotations

import importlib
import io
import json
import math
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
    *("--seq-length", "8", "--micro-batch-size", "2", "--device", "cpu", "--quick"),
]


@pytest.fixture(scope="module")
def train_step() -> Iterator[ModuleType]:
    """The program, imported as it imports its helpers when it is run: its own folder first on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("train_step")


@pytest.fixture
def common(train_step: ModuleType) -> ModuleType:
    for name in ("clocks", "device_time", "environment", "record", "table"):
        importlib.import_module(f"common.{name}")
    return importlib.import_module("common")


def results_of(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


def test_arms_agree_and_results_are_written(
    train_step: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = ["eager", "full_iteration", "local", "local_merged", "transformer_engine", "graphed_callables"]
    arms = [*ours, "make_graphed_callables", "compile_reduce_overhead"]
    argv = [*TINY, "--num-microbatches", "2", "--arms", *arms, "--output", str(tmp_path)]
    assert train_step.main(argv) == 0
    printed = capsys.readouterr().out
    results = results_of(printed)
    found = {arm["name"]: arm for arm in results["arms"]}
    assert list(found) == arms
    for name in ours:
        assert found[name]["status"] == "ok"
        for mode in ("normal", "deterministic"):
            agreement = found[name]["compared_with_eager"][mode]
            assert agreement["losses_equal"], (name, mode)
            assert agreement["gradients_equal"], (name, mode)
        assert found[name]["step_ms"]["median"] > 0.0
        assert len(found[name]["passes"]) == 2
    for name in arms[len(ours) :]:
        assert found[name] == {
            "name": name,
            "is_ours": False,
            "status": "unavailable",
            "reason": "needs a CUDA device",
        }
        assert f"{name}: unavailable: needs a CUDA device" in printed
    assert results["config"]["gradients"] == "bf16 .grad"
    assert results["config"]["num_microbatches"] == 2
    assert results["reference"]["first_gradient_norm"] > 0.0
    assert str(tmp_path) not in printed
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("train_step-cpu-2")
    full = json.loads(written.read_text())
    details = {arm["name"]: arm["passes"][0]["details"] for arm in full["arms"] if arm["passes"]}
    assert details["full_iteration"]["engine"] == "tape"
    assert details["full_iteration"]["eager_calls"] == {"warmup": 3}
    assert details["local"]["eager_calls"] == {"observed": 2}
    assert details["full_iteration"]["num_replays"] > 10
    assert len(details["local_merged"]["first_step_seconds"]) == 5


def test_main_gradients_and_a_failing_arm(train_step: ModuleType, common: ModuleType) -> None:
    options = train_step.read_options([*TINY, "--main-grads", "--no-deterministic-check", "--arms", "eager", "local"])

    class Broken(common.arms.LocalArm):  # type: ignore[name-defined,misc]
        def step(self, batches: Any) -> torch.Tensor:
            raise ValueError("no such thing in " + "/" + "somewhere/deep/file.py")

    class Forgetful(common.arms.EagerArm):  # type: ignore[name-defined,misc]
        def build(self, case: Any) -> None:
            super().build(case)
            self._parts.gradients.zero = lambda: None

    benchmark = train_step.Benchmark(options, torch.device("cpu"), arms={"eager": Forgetful, "local": Broken})
    benchmark.run()
    eager, local = benchmark.records
    assert local.status == "failed"
    assert local.reason == "timing: ValueError: no such thing in file.py"
    assert eager.status == "ok"
    assert not eager.normal.gradients_equal
    assert math.isnan(eager.normal.largest_gradient_error)
    assert benchmark.case.gradient_kind == "fp32 main_grad"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lr", "1"], "--lr has no effect"),
        (["--global-batch-size", "4"], "use --num-microbatches"),
        (["--hidden-dropout", "0.1"], "arms draw different numbers"),
        (["--hidden-sizes", "4", "--fp32", "--main-grads"], "did you mean --hidden-size?"),
        (["--fp32", "--main-grads"], "contradict each other"),
    ],
)
def test_bad_options(
    train_step: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert train_step.main(words) == 2
    assert expected in capsys.readouterr().err


def test_defaults_are_the_model_of_the_bar(train_step: ModuleType) -> None:
    options = train_step.read_options([])
    model, training = options.config.model, options.config.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (12, 768, 12)
    assert (model.ffn_hidden_size, model.vocab_size, model.seq_length) == (3072, 32768, 512)
    assert (training.micro_batch_size, training.num_microbatches, training.bf16) == (1, 1, True)
    assert options.num_steps >= 100
    assert options.enough_ms is not None
    assert options.arms == tuple(importlib.import_module("common.arms").ARMS)
    assert options.output == BENCHMARKS / "results"


def test_larger_model_and_options_that_come_before_it(train_step: ModuleType) -> None:
    options = train_step.read_options(["--model", "350m", "--steps", "3", "--num-layers", "2"])
    model, training = options.config.model, options.config.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (2, 1024, 16)
    assert (model.ffn_hidden_size, model.vocab_size, model.seq_length) == (4096, 32768, 1024)
    assert (training.micro_batch_size, options.num_steps, options.enough_ms) == (1, 3, None)
    assert train_step.read_options(["--model", "350m"]).config.model.num_layers == 24


def test_slow_steps_are_few_and_rounds_long(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        def __init__(self, device: object) -> None:
            del device
            self.num_steps = 0

        def start(self) -> None:
            self.num_steps = 0

        def stop_ms(self) -> float:
            rounds.append(50.0 + 10.0 * (self.num_steps - 1))  # the first step after a wait takes longer
            return rounds[-1]

    rounds: list[float] = []
    watch = Watch(None)
    monkeypatch.setattr(common.clocks, "_CudaWatch", lambda _: watch)

    def run(_: int) -> None:
        watch.num_steps += 1

    times = common.clocks.measure_steps(run, torch.device("cuda"), num_steps=200, enough_ms=1500.0)
    assert times.step == [50.0] * 30
    assert len(times.launch) == 30
    assert len(times.back_to_back) == 5
    assert all(round_ms >= common.clocks.ROUND_MS for round_ms in rounds[-5:])
    assert times.back_to_back[0] == pytest.approx(10.0 * rounds[-1] / (rounds[-1] - 40.0))
    assert len(common.clocks.measure_steps(run, torch.device("cuda"), num_steps=200, enough_ms=1.0).step) == 20
    assert len(common.clocks.measure_steps(run, torch.device("cuda"), num_steps=40).step) == 40


def event(category: str, name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": 1, **more}


def test_trace_is_added_up_once(common: ModuleType) -> None:
    events = [
        event("kernel", "gemm", 0.0, 1000.0),
        event("kernel", "gemm", 500.0, 1000.0),
        event("kernel", "add", 2000.0, 500.0),
        event("gpu_memcpy", "Memcpy DtoD", 3000.0, 100.0),
        event("gpu_memset", "Memset", 3200.0, 100.0),
        event("gpu_user_annotation", "range", 0.0, 9000.0),
        event("cpu_op", "aten::mm", 0.0, 9000.0),
        event("cuda_runtime", "cudaLaunchKernel", 0.0, 5.0),
        event("cuda_driver", "cuLaunchKernel", 1.0, 2.0),
        event("cuda_driver", "cuLaunchKernelEx", 10.0, 2.0),
        event("cuda_runtime", "cudaGraphLaunch", 20.0, 2.0),
        event("cuda_runtime", "cudaMemcpyAsync", 30.0, 2.0),
        event("cuda_runtime", "cudaDeviceSynchronize", 40.0, 2.0),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 0.0},
    ]
    found = common.device_time.read_trace(events, num_steps=2)
    assert found.sum_ms == pytest.approx(1.35)
    assert found.busy_ms == pytest.approx(1.1)
    assert (found.kernel_ms, found.copy_ms, found.memset_ms) == pytest.approx((1.25, 0.05, 0.05))
    assert (found.num_kernels, found.num_copies, found.num_memsets) == (1.5, 0.5, 0.5)
    assert (found.num_launches, found.num_transfers) == (1.5, 0.5)
    assert found.top_kernels[0] == {"name": "gemm", "ms": 1.0, "count": 1.0}


def test_table_shows_ratios_and_remarks(common: ModuleType) -> None:
    device_time = common.device_time.read_trace([event("kernel", "gemm", 0.0, 2000.0)], num_steps=1)

    def record(name: str, step_ms: float, peak: int) -> Any:
        times = common.clocks.StepTimes(step=[step_ms], launch=[0.5], back_to_back=[step_ms])
        memory = common.clocks.MemoryUse(peak_allocated=peak, peak_reserved=peak, not_freed=4 * 2**20)
        timed = common.record.PassRecord(times=times, memory=memory, ready_seconds=2.0, capture_seconds=1.5, details={})
        slower = common.record.PassRecord(
            times=common.clocks.StepTimes(step=[step_ms * 1.2], launch=[0.5], back_to_back=[step_ms]),
            memory=memory,
            ready_seconds=2.0,
            capture_seconds=0.5,
            details={},
        )
        return common.record.ArmRecord(name=name, is_ours=True, passes=[timed, slower], device_time=device_time)

    records = [record("eager", 8.0, 100 * 2**20), record("full_iteration", 2.0, 105 * 2**20)]
    assert records[1].to_json()["step_over_device_time"] == pytest.approx(1.1)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(common.table.render(records, title="title"))
    text = console.export_text()
    assert "105 (1.05x)" in text
    assert "1.10x" in text
    results = {"machine": {"device": "cuda"}, "kernels_without_deterministic_variant": ["scatter"]}
    remarks = list(common.table.remarks(records, results))
    assert "full_iteration: passes differ: 2.000 ms, 2.400 ms" in remarks
    assert "eager: 4.0 MiB were not given back" in remarks
    assert "not deterministic even when asked: scatter" in remarks


def test_spread(common: ModuleType) -> None:
    spread = common.clocks.Spread.of([float(n) for n in range(11)])
    assert (spread.median, spread.p10, spread.p90, spread.count) == (5.0, 1.0, 9.0, 11)
    assert common.clocks.Spread.of([2.0]).p90 == 2.0


def test_results_say_nothing_of_folders(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = common.environment
    assert (
        environment.without_paths('File "/a/b c.py", --output=/x/y, n/a, a://b/c')
        == 'File "b c.py", --output=y, n/a, a://b/c'
    )
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc-dirty")
    assert environment.commit() == {"commit": "abc", "is_dirty": True}
    command = environment.command_line("benchmarks/train_step.py", ["--output", "/x/y"], {})
    assert command.endswith("benchmarks/train_step.py --output y")
