"""What was captured, seen as a module tree, in memory and on a time axis: one page, one JSON file, one trace."""

from __future__ import annotations

from graphstep.coverage.document import Fact, coverage_document
from graphstep.coverage.files import document_kind, write_document, write_text
from graphstep.coverage.page import html_page
from graphstep.coverage.profiling import StepMeasurement, StepProfiler, measure_steps, start_profiler
from graphstep.coverage.timeline import Span, Timeline, Track, read_timeline
from graphstep.coverage.trace import chrome_trace
from graphstep.coverage.tree import ModuleNode, module_tree

__all__ = [
    "Fact",
    "ModuleNode",
    "Span",
    "StepMeasurement",
    "StepProfiler",
    "Timeline",
    "Track",
    "chrome_trace",
    "coverage_document",
    "document_kind",
    "html_page",
    "measure_steps",
    "module_tree",
    "read_timeline",
    "start_profiler",
    "write_document",
    "write_text",
]
