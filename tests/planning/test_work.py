"""Launches and waits out of a marked profile."""

from __future__ import annotations

from typing import Any

import pytest

from graphstep.planning.work import Work, read_work

SCOPES = {0: "outside", 1: "layers.0", 2: "layers.1"}


def mark(time: float, name: str) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": time, "dur": 1.0, "pid": 1, "tid": 1}


def call(time: float, length: float, name: str, correlation: int) -> dict[str, Any]:
    arguments = {"correlation": correlation}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "ts": time,
        "dur": length,
        "pid": 1,
        "tid": 1,
        "args": arguments,
    }


def kernel(time: float, length: float, correlation: int) -> dict[str, Any]:
    arguments = {"correlation": correlation, "stream": 7}
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": time, "dur": length, "pid": 0, "tid": 7, "args": arguments}


def events() -> list[dict[str, Any]]:
    return [
        mark(0.0, "graphstep step"),
        call(5.0, 5.0, "cudaLaunchKernel", 1),
        kernel(12.0, 3.0, 1),
        mark(100.0, "graphstep step"),
        mark(101.0, "graphstep part 0 0 0"),
        call(105.0, 5.0, "cudaLaunchKernel", 2),
        kernel(112.0, 4.0, 2),
        mark(111.0, "graphstep part 1 0 1"),
        call(115.0, 5.0, "cudaLaunchKernel", 3),
        {**call(116.0, 3.0, "cuLaunchKernel", 3), "cat": "cuda_driver"},
        kernel(121.0, 6.0, 3),
        mark(121.0, "graphstep part 2 1 1"),
        call(130.0, 5.0, "cudaGraphLaunch", 4),
        kernel(136.0, 7.0, 4),
        kernel(143.0, 8.0, 4),
        call(140.0, 50.0, "cudaStreamSynchronize", 5),
        call(195.0, 5.0, "cudaMemcpyAsync", 6),
        {**kernel(200.0, 2.0, 6), "cat": "gpu_memcpy"},
        call(205.0, 90.0, "cudaDeviceSynchronize", 7),
        call(300.0, 9.0, "cudaDeviceSynchronize", 8),
    ]


def test_only_the_last_step_counts_and_times_follow_each_other() -> None:
    work = read_work(events(), SCOPES)
    assert work == (
        Work("outside", False, 10.0, 4.0, 1),
        Work("layers.0", False, 10.0, 6.0, 1, microbatch=1),
        Work("layers.1", True, 15.0, 15.0, 2, microbatch=1),
        Work("layers.1", True, 5.0, 0.0, 0, waits=True, microbatch=1),
        Work("layers.1", True, 10.0, 2.0, 1, microbatch=1),
    )


def test_the_wait_at_the_end_belongs_to_the_measurement() -> None:
    assert not read_work(events(), SCOPES)[-1].waits


def test_a_trace_without_marks_is_outside() -> None:
    plain = [event for event in events() if event["cat"] != "user_annotation"]
    assert {each.scope for each in read_work(plain, {})} == {"outside"}


def test_an_empty_trace() -> None:
    assert read_work([], SCOPES) == ()


@pytest.mark.gpu
def test_on_a_gpu_every_part_is_seen_forward_and_backward() -> None:
    import torch
    from tests.coverage.documents import Loop, Model

    from graphstep.planning import parts_of
    from graphstep.planning.operations import log_step
    from graphstep.planning.scopes import Scopes
    from graphstep.planning.work import profile_work

    loop = Loop(Model(3), "cuda")
    for _ in range(3):
        loop()

    def run(scopes: Scopes) -> None:
        with scopes.installed(loop.model, [part.path for part in parts_of(loop.model)]):
            loop()

    device = torch.device("cuda")
    work = profile_work(run, device)
    log = log_step(run, device, loop.model.parameters())
    seen = {(each.scope, each.is_backward) for each in work if not each.waits}
    for layer in range(3):
        for part in (f"layers.{layer}.up", f"layers.{layer}.down"):
            assert {(part, False), (part, True)} <= seen
    assert {(each.scope, each.is_backward) for each in log.operations} >= {pair for pair in seen if "layers" in pair[0]}
    assert sum(each.device_us for each in work) > 0
    num_launches = sum(each.num_nodes > 0 for each in work)
    assert 0.5 * num_launches <= len(log.operations) <= 2 * num_launches
