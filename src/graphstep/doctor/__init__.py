"""Says what of a user's step a graph cannot capture, would repeat wrongly, or makes slow, with line and fix."""

from __future__ import annotations

from graphstep.doctor.diagnosis import Diagnosis
from graphstep.doctor.examination import diagnose
from graphstep.doctor.findings import Effect, Finding, Severity, SourceLine

__all__ = ["Diagnosis", "Effect", "Finding", "Severity", "SourceLine", "diagnose"]
