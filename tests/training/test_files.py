from __future__ import annotations

from pathlib import Path

import pytest

from graphstep.training.files import unwritable_reason


def test_what_can_be_created_leaves_nothing(tmp_path: Path) -> None:
    assert unwritable_reason(tmp_path / "a" / "b" / ".." / "c", is_folder=True) is None
    assert unwritable_reason(tmp_path / "a" / "b" / "log.jsonl", is_folder=False) is None
    assert unwritable_reason(tmp_path, is_folder=True) is None
    assert list(tmp_path.iterdir()) == []


def test_what_was_made_before_a_failure_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refuse(path: Path) -> None:
        if path.name == "c":
            raise OSError(30, "Read-only file system")
        mkdir(path)

    monkeypatch.setattr(Path, "mkdir", refuse)
    folder = tmp_path / "a" / "b" / "c"
    assert unwritable_reason(folder, is_folder=True) == f"{folder} cannot be created: Read-only file system"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_run_has_begun_to_fill_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def fill(path: Path) -> None:
        mkdir(path)
        if path.name == "b":
            (path / "of-another-run").touch()

    monkeypatch.setattr(Path, "mkdir", fill)
    assert unwritable_reason(tmp_path / "a" / "b", is_folder=True) is None
    assert (tmp_path / "a" / "b" / "of-another-run").exists()
