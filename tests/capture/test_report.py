"""What a session says about itself."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from graphstep.capture.reasons import EagerReason
from graphstep.capture.report import CaptureReport, PoolUse, RegionStats
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


def layers(num_layers: int = 24) -> list[RegionStats]:
    """Captured alike, except for what is never quite equal."""
    made = []
    for number in range(num_layers):
        row = RegionStats(f"layers.{number}", "layer", num_recordings=8, num_operations=240, num_replays=400)
        row.num_slots, row.num_signatures, row.num_launches = 4, 1, 400
        row.capture_seconds, row.pool_bytes = 0.05 + number / 1000, (112 if number == 0 else number % 3) * 2**20
        row.eager_calls[EagerReason.OBSERVED] = 4
        made.append(row)
    return made


def lines_of(report: CaptureReport) -> list[str]:
    """The rows of the table: what is between its rule and the notes."""
    lines = str(report).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("─")) + 1
    return lines[start : lines.index("", start)] if "" in lines[start:] else lines[start:]


def test_layers_that_are_alike_share_a_row() -> None:
    report = CaptureReport("cuda", tuple(layers()), 140 * 2**20)
    (line,) = lines_of(report)
    assert line.split("  ")[0] == "layers.0 … layers.23"
    for part in ("yes", " 4 ", " 1 ", " 8 ", "240", "0.05 to 0.07", "0.0 to 112.0", "400"):
        assert part in line
    assert "24 of 24 regions" in str(report)
    assert "eager calls of all regions: 4 observed" in str(report)


def test_what_differs_has_a_row_of_its_own() -> None:
    rows = layers()
    rows[0].static_bytes = 3 * 2**20
    rows[7].num_replays -= 2
    names = [line.split("  ")[0] for line in lines_of(CaptureReport("cuda", tuple(rows), 0))]
    assert names[0] == "layers.0"
    assert " ".join(names[1:-1]) == "layers.1 … layers.6, layers.8 … layers.23"
    assert names[-1] == "layers.7"


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["layers.0", "layers.1"], "layers.0, layers.1"),
        (["a.0.mlp", "a.1.mlp", "a.2.mlp", "a.4.mlp"], "a.0.mlp … a.2.mlp, a.4.mlp"),
        (["l.9", "l.10", "l.11"], "l.9 … l.11"),
        (["l.2", "l.1", "l.0"], "l.2, l.1, l.0"),
        (["l.0.e.0", "l.0.e.1", "l.0.e.2", "l.1.e.2", "l.2.e.2"], "l.0.e.0 … l.0.e.2, l.1.e.2, l.2.e.2"),
        (["l.0.1", "l.1.2", "l.2.3"], "l.0.1, l.1.2, l.2.3"),
        (["", "0"], "0"),
    ],
)
def test_only_names_that_count_up_are_told_by_their_ends(names: list[str], shown: str) -> None:
    lines = lines_of(CaptureReport("tape", tuple(RegionStats(name, "layer") for name in names), 0))
    assert shown in " ".join(line.split("  ")[0] for line in lines)


def test_kinds_and_patterns_do_not_share_a_row() -> None:
    rows = (RegionStats("0.a", "attn"), RegionStats("1.a", "mlp"), RegionStats("1.b", "attn"))
    assert len(lines_of(CaptureReport("tape", rows, 0))) == 3


def test_the_table_says_why_a_region_is_not_captured() -> None:
    rows = layers(3)
    rows[1].num_recordings = rows[1].num_replays = rows[1].num_signatures = 0
    rows[1].why_not_captured = "its capture failed: aten::item at model.py:41 in forward: if scores.max() > limit:"
    rows[1].eager_calls[EagerReason.CAPTURE_FAILED] = 400
    rows[2].eager_calls[EagerReason.CHANGED_ATTRIBUTE] = 1
    rows[2].last_detail = "gain of layers.2"
    text = str(CaptureReport("cuda", tuple(rows), 0))
    assert "2 of 3 regions" in text
    assert "not captured, layers.1: its capture failed: aten::item at model.py:41 in forward: if scores" in text
    assert "eager calls of layers.1: 4 observed, 400 its capture failed" in text
    assert "1 an attribute or hook changed after the capture (last: gain of layers.2)" in text
    assert f"its capture failed: {EagerReason.CAPTURE_FAILED.advice[:40]}" in text
    assert EagerReason.OBSERVED.advice[:40] not in text, "what passes by itself needs no advice"


def test_the_title_has_launches_and_evictions_where_there_are_any() -> None:
    rows = layers(2)
    assert "evicted" not in str(CaptureReport("cuda", tuple(rows), 0))
    rows[0].num_launches = 0
    rows[1].num_evictions = 1
    text = str(CaptureReport("cuda", tuple(rows), 0))
    assert "800 replays in 400 launches, 1 signature evicted" in text
    assert "launches" not in str(CaptureReport("tape", rows_without_slots(), 0))


def rows_without_slots() -> tuple[RegionStats, ...]:
    return (RegionStats("training", "iteration", num_recordings=1, num_replays=7),)


def test_columns_that_a_strategy_does_not_have_are_left_out() -> None:
    assert "flight" in str(CaptureReport("cuda", tuple(layers(1)), 0))
    text = str(CaptureReport("cuda", rows_without_slots(), 0))
    assert "flight" not in text
    assert "captured: 1 recording, cuda engine" in text


def test_hits_misses_and_coverage() -> None:
    row, other = RegionStats("a", "layer", num_recordings=1, num_replays=5), RegionStats("b", "layer")
    row.eager_calls.update({EagerReason.OBSERVED: 3, "evaluation": 2, EagerReason.RESULT_HELD: 1, "warmup": 1})
    assert (row.num_hits, row.num_misses) == (5, 2)
    assert (row.is_captured, other.is_captured) == (True, False)
    assert CaptureReport("tape", (row, other), 0).coverage() == (1, 2)


def test_json_has_a_code_beside_each_reason() -> None:
    row = RegionStats("a", "layer", num_slots=4, num_signatures=2, num_evictions=1, num_launches=9)
    row.why_not_captured, row.last_detail = "its capture failed", "gain"
    row.eager_calls.update({EagerReason.OTHER_SIGNATURE: 2, "observed": 1, "warmup": 3})
    plain = CaptureReport("tape", (row,), 0).to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["coverage"] == {"num_captured": 1, "num_regions": 1}
    (region,) = plain["regions"]
    advice = EagerReason.OTHER_SIGNATURE.advice
    assert region["eager_reasons"] == [
        {"code": "other-signature", "reason": "another signature", "num_calls": 2, "advice": advice},
        {"code": "observed", "reason": "observed", "num_calls": 1, "advice": ""},
        {"code": None, "reason": "warmup", "num_calls": 3, "advice": ""},
    ]
    assert {type(reason) for reason in region["eager_calls"]} == {str}
    fields = {name for name in RegionStats.__slots__ if name not in ("eager_calls", "module")}
    assert fields <= region.keys()
    assert (region["num_slots"], region["num_signatures"], region["num_evictions"]) == (4, 2, 1)
    assert (region["num_launches"], region["num_misses"], region["is_captured"]) == (9, 5, True)
    assert (region["why_not_captured"], region["last_detail"]) == ("its capture failed", "gain")


@pytest.mark.parametrize("width", [40, 80])
def test_numbers_are_whole_on_a_terminal_of_usual_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    rows = layers()
    rows[3].why_not_captured = "a reason " * 20
    with console.capture() as captured:
        console.print(CaptureReport("cuda", tuple(rows), 0).render())
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    assert width == 40 or any("240" in line and "400" in line for line in lines)


def test_a_region_that_is_the_whole_model_is_named() -> None:
    row = RegionStats("", "layer", num_recordings=2)
    row.eager_calls["observed"] = 1
    text = text_of(CaptureReport("tape", (row,), 0))
    assert text.count("the whole model") == 2
    assert "eager calls of the whole model: 1 observed" in text


def test_a_terminal_without_unicode_shows_it_too() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=120)
    rows = layers(3)
    rows[0].why_not_captured = "model.py:3: größe = x.item()"
    console.print(CaptureReport("cuda", tuple(rows), 0).render())
    console.file.flush()
    assert b"layers.0 - layers.2" in raw.getvalue()
    assert b"gr??e = x.item()" in raw.getvalue()


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


def test_memory_is_told_by_those_that_share_it() -> None:
    pools = (PoolUse("forwards of slot 0", 3 * 2**20), PoolUse("backwards", 2**20))
    text = str(CaptureReport("cuda", tuple(layers(1)), 4 * 2**20, pools=pools, workspace_bytes=2**23))
    assert "memory: forwards of slot 0 3.0 MiB, backwards 1.0 MiB, workspaces of libraries 8.0 MiB" in text
    assert "memory:" not in str(CaptureReport("cuda", tuple(layers(1)), 2**20, pools=pools[1:]))
