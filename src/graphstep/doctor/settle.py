"""Of several findings at one line, keeps the one that explains the others."""

from __future__ import annotations

from typing import Final

from graphstep.doctor.findings import FindingList

_EXPLAINS: Final = (
    ("GS-H003", "GS-Y005"),  # A tensor that is printed, and the text.
    ("GS-R003", "GS-R001"),
    ("GS-T005", "GS-T003"),
    ("GS-T005", "GS-T002"),
    ("GS-H007", "GS-H002"),
    ("GS-O004", "GS-O001"),
    ("GS-S002", "GS-S005"),  # The backward of the first writes with the same mask.
)
"""The first makes the second superfluous."""
_READS_RATE: Final = "reads its learning rate"


def settle(findings: FindingList) -> None:
    """Drop what another finding at the same line says better."""
    for better, worse in _EXPLAINS:
        for finding in findings.sorted():
            if finding.code == better:
                findings.drop(worse, finding.where)
    for finding in findings.sorted():
        if finding.code == "GS-O001" and findings.has("GS-O005", finding.where):
            findings.drop("GS-O005" if _READS_RATE in finding.detail else "GS-O001", finding.where)
