"""Memory in reports: by the recordings that share it, and what libraries have set aside."""

from __future__ import annotations

import pytest
import torch
from tests.coverage.documents import Loop, Model

import graphstep
from graphstep.capture.report import lane_name
from graphstep.engine import engine_for

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_pools_are_named_and_add_up(device: str) -> None:
    loop = Loop(Model(3), device)
    with graphstep.attach(loop.model, regions={"layers.*": "layer"}) as manager:
        for _ in range(3):
            loop()
        report = manager.report()
        assert {pool.name for pool in report.pools} == {"forwards of slot 0", "backwards"}
        assert sum(pool.nbytes for pool in report.pools) == report.pool_bytes > 0
        assert report.pool_bytes == manager.session.engine.pool_bytes
        assert report.workspace_bytes == manager.session.engine.workspace_bytes
    assert manager.report().pools == ()


@pytest.mark.parametrize("device", DEVICES)
def test_lanes_of_an_engine_are_told_apart(device: str) -> None:
    engine = engine_for(device)
    x = torch.ones(1024, device=device)
    first = engine.capture(lambda: x * 2, lane="a")
    second = engine.capture(lambda: x * 3, lane="b")
    assert set(engine.lane_bytes) == {"a", "b"}
    assert min(engine.lane_bytes.values()) >= 4096
    assert sum(engine.lane_bytes.values()) == engine.pool_bytes
    first.close()
    assert engine.lane_bytes.get("a", 0) == 0 or device == "cuda"  # An open lane of a GPU keeps its pool.
    second.replay()
    engine.close()
    assert engine.lane_bytes == {}


def test_reports_of_two_sessions_are_joined_with_their_pools() -> None:
    with graphstep.GraphSession("cpu") as one, graphstep.GraphSession("cpu") as other:
        x = torch.ones(8)
        for session in (one, other):
            session.capture(session.stats("a", "layer"), lambda: x + 1)
        joined = one.report().joined(other.report())
        assert len(joined.pools) == 2
        assert sum(pool.nbytes for pool in joined.pools) == joined.pool_bytes == 64


@pytest.mark.parametrize(
    ("lane", "name"),
    [
        (("forward", 0, 1), "forwards of slot 1"),
        (("forward", 2, 0), "forwards of group 2, slot 0"),
        ("backward", "backwards"),
        (0, "recordings"),
        ("iterations", "iterations"),
        (("iterations", "training"), "iterations training"),
    ],
)
def test_lanes_have_names(lane: object, name: str) -> None:
    assert lane_name(lane) == name
