"""Says what in a user's own step a graph cannot capture, would repeat wrongly, or makes slow, with the line and the fix."""

from __future__ import annotations

from graphstep.doctor.diagnose import diagnose
from graphstep.doctor.diagnosis import Diagnosis
from graphstep.doctor.findings import Effect, Finding, Severity, SourceLine

__all__ = ["Diagnosis", "Effect", "Finding", "Severity", "SourceLine", "diagnose"]
