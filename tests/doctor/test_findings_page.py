"""docs/findings.md is made from the table, and its programs are what it says they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doctor.programs import diagnosis_of, found_in

from graphstep.doctor.findings import Kind
from graphstep.doctor.findings_page import HERE, PRELUDE, findings_page
from graphstep.doctor.kinds import KINDS, SUBJECTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "findings.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == findings_page(), "run: graphstep doctor --codes > docs/findings.md"


def test_codes_are_unique_and_in_order() -> None:
    codes = [kind.code for kinds in SUBJECTS.values() for kind in kinds]
    assert len(codes) == len(set(codes)) == len(KINDS)
    for kinds in SUBJECTS.values():
        for letter in {kind.code[3] for kind in kinds}:
            mine = [kind.code for kind in kinds if kind.code[3] == letter]
            assert mine == [f"GS-{letter}{number:03}" for number in range(1, len(mine) + 1)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.code)
def test_broken_program_has_it(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(PRELUDE + kind.broken, encoding="utf-8")
    lines = path.read_text(encoding="utf-8").splitlines()
    expected = {(kind.code, number) for number, line in enumerate(lines, 1) if line.endswith(HERE)}
    assert expected
    assert found_in(diagnosis_of(path), path) == expected


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.code)
def test_mended_program_has_none(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "mended.py"
    path.write_text(PRELUDE + kind.mended, encoding="utf-8")
    assert diagnosis_of(path).findings == ()
