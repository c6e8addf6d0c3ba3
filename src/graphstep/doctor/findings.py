"""What the doctor says: findings with a code, a severity, a line of the user's code, a reason and a fix."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters."""

    error = "error"
    """The step cannot be captured, or its replay computes something else."""
    warning = "warning"
    """The same in some runs or for some ways to capture, or it costs time or memory."""
    note = "note"
    """To know, and nothing that has to change."""

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


class Effect(StrEnum):
    """What happens if nothing is changed."""

    capture_fails = "capture fails"
    silently_wrong = "silently wrong"
    slow = "slow"
    memory = "memory"


@dataclass(frozen=True, slots=True, order=True)
class SourceLine:
    """A line of code; line 0 where the thing at fault is not in a file."""

    file: str
    line: int = 0
    function: str = ""

    @property
    def text(self) -> str:
        """What is written there."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of finding. Its code is stable: a text may change, a code does not."""

    code: str
    title: str
    severity: Severity
    effect: Effect
    why: str
    """Why it breaks, for a reader who knows PyTorch and not CUDA graphs."""
    fix: str
    broken: str
    """A program that has it, on the line that ends with ``# here``."""
    mended: str
    """The same program without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing at one line."""

    kind: Kind
    where: SourceLine
    operation: str
    """What the line does, such as ``Tensor.item``."""
    detail: str = ""
    """What was seen: names, values, where in a library."""
    fix: str = ""
    """What to change; that of the kind unless there is a better one."""
    severity: Severity
    part: str = ""
    """``forward``, ``backward``, ``optimizer`` or ``data``; empty where it makes no difference."""
    has_run: bool = True
    """False for a line that was read and did not run."""
    num_times: int = 1
    """How often it was seen."""

    @property
    def code(self) -> str:
        """The code of its kind, such as ``GS-H001``."""
        return self.kind.code

    @property
    def effect(self) -> Effect:
        """What happens if nothing is changed."""
        return self.kind.effect

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.where}: {self.severity} {self.code} {self.kind.title}: {self.operation}{detail}"


@dataclass(slots=True)
class FindingList:
    """Collects findings, each once for a code and a line."""

    _found: dict[tuple[str, str, int], Finding] = field(default_factory=dict)
    _in_backward: set[str] = field(default_factory=set)
    """Codes seen in a backward, whatever the part of the finding that is kept for the line."""

    def add(
        self,
        kind: Kind,
        where: SourceLine,
        operation: str,
        *,
        detail: str = "",
        fix: str = "",
        part: str = "",
        severity: Severity | None = None,
        has_run: bool = True,
    ) -> None:
        """Note one; the first of a code and line is the one that is kept."""
        key = (kind.code, where.file, where.line)
        if part == "backward":
            self._in_backward.add(kind.code)
        known = self._found.get(key)
        if known is not None:
            self._found[key] = replace(known, num_times=known.num_times + 1)
            return
        self._found[key] = Finding(
            kind=kind,
            where=where,
            operation=operation,
            detail=detail,
            fix=fix or kind.fix,
            severity=severity or kind.severity,
            part=part,
            has_run=has_run,
        )

    def has(self, code: str, where: SourceLine) -> bool:
        """True if it is known."""
        return (code, where.file, where.line) in self._found

    def has_in_backward(self, code: str) -> bool:
        """True if it is known at some line of a forward whose backward it is in."""
        return code in self._in_backward

    def drop(self, code: str, where: SourceLine) -> None:
        """Forget one that another explains better."""
        self._found.pop((code, where.file, where.line), None)

    def sorted(self) -> tuple[Finding, ...]:
        """All of them, the worst first, then in the order of the code."""
        return tuple(
            sorted(self._found.values(), key=lambda f: (f.severity.rank, f.where.file, f.where.line, f.kind.code))
        )
