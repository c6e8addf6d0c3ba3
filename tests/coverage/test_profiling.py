"""Times of steps and profiles of a few."""

from __future__ import annotations

import time

import pytest
import torch
from tests.coverage.documents import Loop

import graphstep
from graphstep.coverage import StepProfiler, measure_steps, start_profiler
from graphstep.coverage.profiling import spread_of
from graphstep.errors import LifecycleError, UserInputError


def test_every_step_runs_and_operations_are_seen() -> None:
    loop = Loop()
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        loop()

    measured = measure_steps(step, "cpu", num_warmup=1, num_timed=4, num_profiled=2)
    assert len(calls) == 7
    assert measured.step_ms is not None
    assert measured.host_ms is not None
    assert 0 < measured.host_ms <= measured.step_ms
    assert measured.timeline is not None
    names = {span.name for span in measured.timeline.spans(is_device=False)}
    assert {"aten::linear", "aten::relu"} <= names
    assert measured.timeline.num_steps == 2
    assert not measured.timeline.has_device


def test_times_are_medians_of_what_was_slept() -> None:
    measured = measure_steps(lambda: time.sleep(0.01), "cpu", num_warmup=0, num_timed=3, num_profiled=0)
    assert measured.step_ms is not None
    assert 10 <= measured.step_ms < 200
    assert measured.timeline is None
    assert measured.to_json()["timeline"] is None


def test_nothing_to_time_and_devices_that_are_not_there_are_told_before_a_step_runs() -> None:
    calls: list[int] = []
    with pytest.raises(UserInputError, match="at least 1 step, got 0"):
        measure_steps(lambda: calls.append(1), "cpu", num_timed=0)
    if not torch.cuda.is_available():
        with pytest.raises(UserInputError, match="no CUDA device"):
            measure_steps(lambda: calls.append(1), "cuda")
    assert calls == []


def test_the_spread_is_that_of_the_quartiles() -> None:
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert spread_of([7.0]) == 0.0


def test_a_profiler_is_started_once_and_stopped_once() -> None:
    with StepProfiler("cpu") as profiler:
        with pytest.raises(LifecycleError, match="does not run"):
            profiler.stop(num_steps=1)
        profiler.start()
        with pytest.raises(LifecycleError, match="runs already"):
            profiler.start()
        torch.ones(3).add_(1)
        assert profiler.stop(num_steps=1).num_launches >= 1
    profiler.close()
    assert not profiler.is_running


def test_an_error_inside_ends_the_profiler() -> None:
    profiler = StepProfiler("cpu")

    def failing() -> None:
        with profiler:
            profiler.start()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        failing()
    assert not profiler.is_running


@pytest.mark.gpu
def test_on_a_gpu_graphs_take_the_place_of_launches() -> None:
    start_profiler("cuda")
    loop = Loop(device="cuda")
    before = measure_steps(loop, "cuda")
    with graphstep.attach(loop.model, regions={"layers.*": "layer"}):
        after = measure_steps(loop, "cuda")
    assert before.timeline is not None
    assert after.timeline is not None
    assert before.timeline.num_graph_launches == 0
    assert after.timeline.num_graph_launches >= 6
    assert after.timeline.num_launches < before.timeline.num_launches
    assert before.timeline.busy_ms is not None
    assert before.step_ms is not None
    assert 0 < before.timeline.busy_ms < before.step_ms
    kernels, captured = before.timeline.num_kernels, after.timeline.num_kernels
    assert kernels is not None
    assert captured is not None
    assert captured >= 0.5 * kernels  # The nodes of graphs are seen.
