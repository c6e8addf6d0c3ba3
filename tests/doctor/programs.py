"""Programs of the catalogue and of the page, and what the doctor says of them."""

from __future__ import annotations

import re
from pathlib import Path

from graphstep.doctor import Diagnosis
from graphstep.doctor.examination import examine
from graphstep.doctor.load_target import load_target

CATALOGUE = Path(__file__).parent / "catalogue"
BROKEN = sorted((CATALOGUE / "broken").glob("*.py"))
RIGHT = sorted((CATALOGUE / "right").glob("*.py"))
_EXPECTED = re.compile(r"# expect: (GS-\w+)")

Marks = set[tuple[str, int]]


def expected_in(path: Path) -> Marks:
    """Code and line of every marker."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {(code, number) for number, line in enumerate(lines, 1) for code in _EXPECTED.findall(line)}


def diagnosis_of(path: Path, name: str = "step") -> Diagnosis:
    """What the doctor says of a file, as the command does."""
    return examine(load_target(f"{path}:{name}"))


def found_in(diagnosis: Diagnosis, path: Path) -> Marks:
    """Code and line of every finding; a finding in another file has line 0."""
    return {(f.code, f.where.line if Path(f.where.file) == path.resolve() else 0) for f in diagnosis.findings}
