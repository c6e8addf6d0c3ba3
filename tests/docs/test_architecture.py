"""docs/architecture.md lists every file of the package with its subject."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def lister() -> ModuleType:
    spec = importlib.util.spec_from_file_location("list_files", ROOT / "scripts" / "list_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_has_its_line() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert text == lister().page(), "run: python scripts/list_files.py --write"
    assert text.count("\n- `") > 40
