"""What a session says about itself."""

from __future__ import annotations

import json

import torch
from rich.console import Console

from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.capture.session import GraphSession


def rows() -> tuple[RegionStats, ...]:
    first = RegionStats("layers.0", "layer", num_recordings=2, num_operations=30, capture_seconds=0.25, num_replays=7)
    second = RegionStats("layers.1.mlp", "mlp", num_recordings=2, num_operations=12, capture_seconds=0.5)
    second.eager_calls.update({"warmup": 3, "another signature": 1})
    return first, second


def text_of(report: CaptureReport) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.render())
    return console.export_text()


def test_sums() -> None:
    report = CaptureReport("tape", rows(), 4096)
    assert report.num_recordings == 4
    assert report.capture_seconds == 0.75


def test_the_table_names_regions_counts_and_reasons() -> None:
    text = text_of(CaptureReport("tape", rows(), 4096))
    for part in ("layers.0", "layers.1.mlp", "tape", "4 recordings", "3 warmup", "1 another signature", "0.25"):
        assert part in text


def test_json_has_every_count_and_survives_a_round_trip() -> None:
    plain = CaptureReport("cuda", rows(), 4096).to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["pool_bytes"] == 4096
    assert plain["num_recordings"] == 4
    assert plain["regions"][1]["eager_calls"] == {"warmup": 3, "another signature": 1}
    assert plain["regions"][0]["num_replays"] == 7


def test_an_empty_report_renders() -> None:
    report = CaptureReport("none", (), 0)
    assert "0 recordings" in text_of(report)
    assert report.to_json()["regions"] == []


def test_names_with_brackets_are_printed_as_they_are() -> None:
    assert "model[red].layer" in text_of(CaptureReport("tape", (RegionStats("model[red].layer", "layer"),), 0))


def test_a_report_is_a_snapshot(session: GraphSession, device: torch.device) -> None:
    stats = session.stats("region", "layer")
    x = torch.ones(3, device=device)
    session.capture(stats, lambda: x + 1)
    before = session.report()
    assert before.num_recordings == 1
    assert before.engine == session.engine.name
    session.capture(stats, lambda: x + 2)
    stats.num_replays += 5
    stats.eager_calls["warmup"] += 1
    assert before.num_recordings == 1
    assert before.rows[0].num_replays == 0
    assert not before.rows[0].eager_calls
    assert session.report().num_recordings == 2


def test_a_closed_session_reports_what_it_did(session: GraphSession, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    stats = session.stats("region", "layer")
    session.capture(stats, lambda: x + 1)
    stats.num_replays += 1
    session.close()
    report = session.report()
    assert report.pool_bytes == 0
    assert report.rows[0].num_replays == 1
