"""Findings in SARIF 2.1.0, the form that code hosts show beside the lines of a change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from graphstep.doctor.diagnosis import Diagnosis
from graphstep.doctor.findings import Finding, Kind, Severity
from graphstep.doctor.kinds import KINDS
from graphstep.version import __version__

_LEVELS: Final[Mapping[Severity, str]] = MappingProxyType(
    {Severity.error: "error", Severity.warning: "warning", Severity.note: "note"}
)
_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(diagnosis: Diagnosis, folder: Path) -> dict[str, Any]:
    """A log with one run.

    Args:
        diagnosis: what was found.
        folder: files below it are named relative to it.
    """
    codes = list(KINDS)
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "graphstep doctor",
                        "semanticVersion": __version__,
                        "rules": [_rule(kind) for kind in KINDS.values()],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(finding, codes, folder, diagnosis.file) for finding in diagnosis.findings],
            }
        ],
    }


def _rule(kind: Kind) -> dict[str, Any]:
    return {
        "id": kind.code,
        "name": "".join(word.capitalize() for word in kind.title.replace(",", "").split()),
        "shortDescription": {"text": kind.title},
        "fullDescription": {"text": kind.why},
        "help": {"text": f"Fix: {kind.fix}."},
        "defaultConfiguration": {"level": _LEVELS[kind.severity]},
        "properties": {"effect": str(kind.effect)},
    }


def _result(finding: Finding, codes: list[str], folder: Path, target: str) -> dict[str, Any]:
    detail = f" ({finding.detail})" if finding.detail else ""
    text = f"{finding.kind.title}: {finding.operation}{detail}. {finding.kind.why} Fix: {finding.fix}."
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
        "properties": {"effect": str(finding.effect), "part": finding.part, "hasRun": finding.has_run},
    }
    # Code hosts refuse a result without a place: what has no line stands at the head of its file, or of the target's.
    file = finding.where.file if finding.where.line or Path(finding.where.file).is_file() else target
    if finding.where.line or Path(file).is_file():
        result["locations"] = [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(file, folder)},
                    "region": {"startLine": finding.where.line or 1},
                }
            }
        ]
    return result


def _uri(file: str, folder: Path) -> str:
    path = Path(file)
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    return path.as_uri() if path.is_absolute() else path.as_posix()
