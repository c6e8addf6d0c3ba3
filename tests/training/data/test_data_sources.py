from __future__ import annotations

from pathlib import Path

import pytest

from graphstep.errors import DataError
from graphstep.training.data import IndexedDatasetWriter
from graphstep.training.data.sources import parse_data_path


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        with IndexedDatasetWriter(name) as writer:
            writer.add_document([1])
    for name in ("a.txt", "b.txt", "7", "lone.bin"):
        Path(name).write_text("text")
    Path("folder").mkdir()


def described(*words: str) -> list[tuple[str, bool, float | None]]:
    return [(source.name, source.is_indexed, source.weight) for source in parse_data_path(words)]


def test_prefixes_and_files() -> None:
    assert described("one") == [("one", True, None)]
    assert described("one.idx") == described("one.bin") == described("one")
    assert described("folder") == [("folder", False, None)]
    assert described("a.txt", "one", "b.txt", "folder") == [
        ("one", True, None),
        ("a.txt b.txt folder", False, None),
    ]
    # A lone .bin is a file like any other by its own name, and half an indexed dataset by its prefix.
    assert described("lone.bin") == [("lone.bin", False, None)]
    assert described("lone") == [("lone", True, None)]


def test_weights() -> None:
    assert described("0.3", "one", "7e-1", "a.txt") == [("one", True, 0.3), ("a.txt", False, 0.7)]
    assert described("7", "one") == [("one", True, 7.0)]
    assert described("./7", "one") == [("one", True, None), ("./7", False, None)]
    assert described("7") == [("7", False, None)]


def test_faults_are_reported_together() -> None:
    with pytest.raises(DataError) as caught:
        parse_data_path(["0", "one", "nan", "none", "inf", "two", "-1", "a.txt"])
    assert [problem.code for problem in caught.value.problems] == [
        "data-blend",
        "data-missing",
        "data-blend",
        "data-blend",
        "data-blend",
    ]
    with pytest.raises(DataError) as caught:
        parse_data_path(["0.3", "one", "two", "none"])
    assert [problem.code for problem in caught.value.problems] == ["data-blend", "data-missing"]
    with pytest.raises(DataError, match="no path named"):
        parse_data_path([])
