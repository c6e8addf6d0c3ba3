"""The page as text: well formed, escaped, complete, and without anything from outside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.coverage.documents import HOSTILE, Model, hostile_document, measured_document
from tests.coverage.strict_html import StrictReader

from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.coverage import coverage_document, html_page, write_document
from graphstep.errors import UserInputError


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return measured_document({"layers.0": "layer", "layers.2": "layer"})


def empty_document() -> dict[str, Any]:
    return coverage_document(CaptureReport("none", (), 0).to_json())


def test_it_is_well_formed(document: dict[str, Any]) -> None:
    for each in (document, hostile_document(), empty_document()):
        reader = StrictReader.read(html_page(each))
        assert reader.faults == []
        assert reader.has_doctype
        assert reader.of("html") == [{"lang": "en"}]
        assert len(reader.of("h1")) == len(reader.of("main")) == len(reader.of("title")) == 1


def test_the_reader_is_strict() -> None:
    faults = StrictReader.read(
        '<p><b>x</p><li id="a" id="b"></li><a href="#none">y</a><i aria-labelledby="z"></i>'
    ).faults
    assert len(faults) >= 5


def test_nothing_comes_from_outside(document: dict[str, Any]) -> None:
    page = html_page(document)
    reader = StrictReader.read(page)
    for _, attributes in reader.elements:
        for name in ("src", "href", "action", "srcset", "poster", "data"):
            assert not re.match(r"\s*(https?:|//|file:)", str(attributes.get(name, "")))
    assert "@import" not in page
    assert not re.search(r"url\(", page)
    policy = next(meta["content"] for meta in reader.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none';")


def test_names_cannot_become_markup_or_code() -> None:
    page = html_page(hostile_document())
    reader = StrictReader.read(page)
    assert reader.of("img") == []
    assert len(reader.of("script")) == 2
    assert not any("onerror" in attributes for _, attributes in reader.elements)
    shown = [text for tag, text in reader.texts if tag == "b"]
    assert any("onerror" in text for text in shown)
    assert HOSTILE in [text for tag, text in reader.texts if tag == "th"]
    assert HOSTILE in [text for tag, text in reader.texts if tag == "h1"]
    data = next(text for tag, text in reader.texts if tag == "script")
    assert HOSTILE in json.loads(data)["before"]["names"]
    assert "<" not in data


def test_every_module_is_in_the_tree_with_its_state(document: dict[str, Any]) -> None:
    reader = StrictReader.read(html_page(document))
    states = {item["data-path"]: item["data-state"] for item in reader.of("li")}
    assert states["layers.0.up"] == states["layers.2"] == "captured"
    assert states["layers.1"] == states["head"] == "eager"
    assert states["layers"] == states[""] == "partly"
    assert sum(state == "captured" for state in states.values()) == 6


def test_times_memory_and_reasons_are_in_words(document: dict[str, Any]) -> None:
    text = " ".join(text for _, text in StrictReader.read(html_page(document)).texts)
    assert f"eager: {document['before']['step_ms']:.2f} ms" in text
    assert f"graphed: {document['after']['step_ms']:.2f} ms" in text
    assert "forwards of slot 0" in text
    assert "backwards" in text
    assert "static inputs" in text
    assert "workspaces of libraries" in text
    assert "1 observed" in text
    assert "no graph was asked for here" in text
    assert "does not speed steps up" in text


def test_launches_and_kernels_are_in_words() -> None:
    text = " ".join(text for _, text in StrictReader.read(html_page(hostile_document())).texts)
    assert "3 launches a step (1 of graphs), 5 kernels, device busy 0.06 ms" in text
    assert "97%" in text  # idle: 0.055 of 2 ms


def test_memory_of_pools_adds_up(document: dict[str, Any]) -> None:
    report = document["report"]
    pools = [row for row in document["memory"] if row["kind"] == "pool"]
    assert sum(row["bytes"] for row in pools) == report["pool_bytes"] > 0
    assert sum(region["static_bytes"] for region in report["regions"]) == report["static_bytes"]


def test_pool_memory_that_no_lane_claims_is_shown() -> None:
    document = coverage_document(CaptureReport("cuda", (), 4096).to_json())
    assert document["memory"][0] == {"kind": "pool", "name": "all recordings", "bytes": 4096}


def test_a_report_writes_itself(tmp_path: Path) -> None:
    with GraphSession("cpu") as session:
        report = session.report()
    report.write_html(tmp_path / "report.html", title="mine")
    assert "<title>mine</title>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    report.write_html(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["format"] == "graphstep-coverage-1"


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"neither \.html nor \.json"):
        write_document({}, tmp_path / "report.pdf")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserInputError, match="cannot be written"):
        write_document(empty_document(), tmp_path / "file" / "report.html")


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    """As ``graphstep train`` takes for granted when it checks before a run that the file can be written."""
    write_document(empty_document(), tmp_path / "missing" / "too" / "report.html")
    assert (tmp_path / "missing" / "too" / "report.html").is_file()


def test_names_that_no_text_can_hold_are_shown_escaped(tmp_path: Path) -> None:
    """An argument of the command line that is not UTF-8 comes with lone surrogates."""
    document = coverage_document(CaptureReport("none", (), 0).to_json(), title="caf\udce9")
    for name in ("report.html", "report.json"):
        write_document(document, tmp_path / name)
        assert "caf\\udce9" in (tmp_path / name).read_text(encoding="utf-8")


def test_main_gradients_are_memory_too() -> None:
    model = Model(1)
    for parameter in model.parameters():
        parameter.main_grad = parameter.detach().clone()
    document = coverage_document(CaptureReport("none", (), 0).to_json(), model=model)
    sizes = {row["kind"]: row["bytes"] for row in document["memory"]}
    assert sizes["gradients"] == sizes["weights"] == 4 * sum(p.numel() for p in model.parameters())
