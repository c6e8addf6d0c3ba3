"""Proof that replay equals eager: before training, or beside it."""

from __future__ import annotations

from graphstep.verification.beside import shadow
from graphstep.verification.compare import Difference, Tolerance
from graphstep.verification.report import Culprit, Part, Row, VerifyReport
from graphstep.verification.run import verify

__all__ = ["Culprit", "Difference", "Part", "Row", "Tolerance", "VerifyReport", "shadow", "verify"]
