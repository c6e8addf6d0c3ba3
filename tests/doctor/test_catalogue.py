"""Every broken program of the catalogue is found at its line with its class, and the right ones are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doctor.programs import BROKEN, RIGHT, diagnosis_of, expected_in, found_in

from graphstep.doctor.kinds import KINDS


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_broken_program_is_found(path: Path) -> None:
    diagnosis = diagnosis_of(path)
    assert found_in(diagnosis, path) == expected_in(path), "\n".join(map(str, diagnosis.findings))


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_right_program_has_no_finding(path: Path) -> None:
    assert diagnosis_of(path).findings == ()


def test_catalogue_is_large_and_has_every_code() -> None:
    expected = [expected_in(path) for path in BROKEN]
    assert len(BROKEN) >= 60
    assert len(RIGHT) >= 30
    assert all(expected)
    assert {code for marks in expected for code, _ in marks} == KINDS.keys()
    assert not any(expected_in(path) for path in RIGHT)
