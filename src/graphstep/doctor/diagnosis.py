"""What a look at a step has found, and the exit code for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from graphstep.doctor.findings import Finding, Severity

EXIT_CLEAN, EXIT_ERRORS, EXIT_WARNINGS = 0, 1, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The findings of one target, the worst first."""

    target: str
    """Its name."""
    file: str = ""
    """Where it is defined."""
    findings: tuple[Finding, ...]
    num_runs: int
    """How often the step ran under observation."""
    num_operations: int
    """Operations of one run, forward, backward and optimizer."""
    seconds: float
    written_buffers: tuple[str, ...] = ()
    """Buffers of modules that each run writes in place: a replay repeats that."""

    def counts(self) -> dict[Severity, int]:
        """Number of findings by severity, all severities named."""
        found = Counter(finding.severity for finding in self.findings)
        return {severity: found[severity] for severity in Severity}

    def exit_code(self, fail_on: Severity | None = Severity.warning) -> int:
        """0 for nothing to change, 1 with an error, 3 with a warning and no error.

        Args:
            fail_on: the least severity that counts; ``None``: nothing does.
        """
        if fail_on is None:
            return EXIT_CLEAN
        worst = min((f.severity.rank for f in self.findings if f.severity.rank <= fail_on.rank), default=None)
        if worst is None:
            return EXIT_CLEAN
        return EXIT_ERRORS if worst == Severity.error.rank else EXIT_WARNINGS

    def as_json(self) -> dict[str, Any]:
        """What a program needs of it."""
        return {
            "target": self.target,
            "findings": [
                {
                    "code": finding.code,
                    "severity": str(finding.severity),
                    "effect": str(finding.effect),
                    "title": finding.kind.title,
                    "file": finding.where.file,
                    "line": finding.where.line,
                    "function": finding.where.function,
                    "text": finding.where.text,
                    "operation": finding.operation,
                    "detail": finding.detail,
                    "part": finding.part,
                    "has_run": finding.has_run,
                    "num_times": finding.num_times,
                    "why": finding.kind.why,
                    "fix": finding.fix,
                }
                for finding in self.findings
            ],
            "counts": {str(severity): number for severity, number in self.counts().items()},
            "num_runs": self.num_runs,
            "num_operations": self.num_operations,
            "written_buffers": list(self.written_buffers),
            "seconds": round(self.seconds, 3),
        }
