"""The README of each folder of the package names every file in it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "graphstep"
PAGES = sorted(PACKAGE.rglob("README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_page_names_every_file(page: Path) -> None:
    named = set(re.findall(r"[\w/]+\.py\b", page.read_text(encoding="utf-8")))
    names = [path.name for path in sorted(page.parent.glob("*.py")) if path.name != "__init__.py"]
    assert [name for name in names if name not in named] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_page_has_one_row_a_file(page: Path) -> None:
    rows = [line.split("|")[1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    counts = Counter(name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row))
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_large_folder_has_a_page() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    parts = {folder for folder in folders if folder.parent == PACKAGE}
    assert parts == {page.parent for page in PAGES if page.parent.parent == PACKAGE}
