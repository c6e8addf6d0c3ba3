"""The capture core: sessions, regions, signatures, static tensors, graph pairs, plans, manifests and reports."""

from __future__ import annotations

from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.manifest import Manifest
from graphstep.capture.plan import Plan, PlanGuard, PlanObserver
from graphstep.capture.region import Region
from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import StaticInputs

__all__ = [
    "CaptureReport",
    "GraphPair",
    "GraphSession",
    "Manifest",
    "Plan",
    "PlanGuard",
    "PlanObserver",
    "Region",
    "RegionStats",
    "Signature",
    "StaticInputs",
]
