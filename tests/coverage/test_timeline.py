"""Launches and kernels out of a profiler's trace."""

from __future__ import annotations

import json

import pytest
from tests.coverage.documents import gpu_events, gpu_timeline

from graphstep.coverage import chrome_trace, read_timeline


def test_counts_and_times_of_a_step() -> None:
    timeline = gpu_timeline()
    assert timeline.has_device
    assert timeline.num_launches == 3
    assert timeline.num_graph_launches == 1
    assert timeline.num_kernels == 5
    assert timeline.busy_ms == pytest.approx(0.055)


def test_they_are_divided_by_the_steps() -> None:
    timeline = gpu_timeline(num_steps=2)
    assert (timeline.num_launches, timeline.num_kernels) == (1.5, 2.5)
    assert timeline.longest() == [
        {"name": "gemm", "ms": pytest.approx(0.025), "count": 2.5},
        {"name": "Memcpy DtoH", "ms": pytest.approx(0.0025), "count": 0.5},
    ]


def test_kernels_that_overlap_count_once() -> None:
    events = gpu_events()
    twin = next(event for event in events if event.get("cat") == "kernel")
    events.append({**twin, "ts": twin["ts"] + 5.0, "args": {"correlation": 2, "stream": 8}})
    timeline = read_timeline(events, num_steps=1)
    assert timeline.busy_ms == pytest.approx(0.060)
    assert [track.name for track in timeline.tracks] == ["host thread 1", "device stream 1", "device stream 2"]


def test_waits_and_inner_driver_calls_are_no_launches() -> None:
    names = [span.name for span in gpu_timeline().spans(is_device=False)]
    assert names == ["cudaLaunchKernel", "cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync"]
    assert [span.category for span in gpu_timeline().spans(is_device=False)][2:] == ["graph launch", "transfer"]


def test_times_count_from_the_first_event() -> None:
    timeline = gpu_timeline()
    assert min(span.start_us for track in timeline.tracks for span in track.spans) == 0.0
    first = next(timeline.spans(is_device=True))
    assert (first.start_us, first.end_us, first.correlation) == (10.0, 20.0, 1)


def test_without_a_device_operations_are_shown() -> None:
    operation = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    events = [
        {**operation, "name": "autograd::engine::evaluate_function: AddmmBackward0", "ts": 0.0, "dur": 50.0},
        {**operation, "name": "aten::linear", "ts": 1.0, "dur": 20.0},
        {**operation, "name": "aten::addmm", "ts": 2.0, "dur": 15.0},
        {**operation, "name": "aten::sum", "ts": 30.0, "dur": 5.0},
    ]
    timeline = read_timeline(events, num_steps=1)
    assert [span.name for span in timeline.spans(is_device=False)] == ["aten::linear", "aten::sum"]
    assert (timeline.busy_ms, timeline.num_kernels, timeline.num_launches) == (None, None, 2)


def test_an_empty_trace() -> None:
    timeline = read_timeline([], num_steps=1)
    assert timeline.tracks == ()
    assert timeline.to_json()["tracks"] == []


def test_data_names_everything_once_and_loses_nothing() -> None:
    timeline = gpu_timeline()
    plain = json.loads(json.dumps(timeline.to_json()))
    spans = [
        (plain["names"][name], start, duration, plain["categories"][category], correlation)
        for track in plain["tracks"]
        for start, duration, name, category, correlation in track["spans"]
    ]
    assert spans == [
        (span.name, span.start_us, span.duration_us, span.category, span.correlation)
        for track in timeline.tracks
        for span in track.spans
    ]
    assert len(plain["names"]) == len(set(plain["names"]))


def test_the_trace_has_host_and_device_of_each_timeline() -> None:
    trace = json.loads(
        json.dumps(chrome_trace({"eager": gpu_timeline(), "not profiled": None, "graphed": gpu_timeline()}))
    )
    events = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["eager: host", "eager: device", "graphed: host", "graphed: device"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 * 10
    assert {event["pid"] for event in complete} == set(processes)
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} == threads
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] >= 0


def test_an_arrow_leads_from_a_launch_to_the_first_thing_it_started() -> None:
    events = chrome_trace({"graphed": gpu_timeline()})["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == 4
    assert len([event for event in events if event["ph"] == "f"]) == 4
    graph = next(identity for identity in starts if identity.endswith(".3"))
    assert (starts[graph]["ts"], ends[graph]["ts"]) == (40.0, 50.0)
