"""The capture core: sessions, regions, signatures, static tensors, graph pairs, plans, manifests and reports."""

from __future__ import annotations

from graphstep.capture.chain import Chain
from graphstep.capture.chain_run import ChainRun
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.lanes import Lane
from graphstep.capture.manifest import Manifest
from graphstep.capture.plan import Plan, PlanObserver
from graphstep.capture.region import Region
from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.static_inputs import StaticInputs

__all__ = [
    "CaptureReport",
    "Chain",
    "ChainRun",
    "GraphPair",
    "GraphSession",
    "Lane",
    "Manifest",
    "Plan",
    "PlanObserver",
    "Region",
    "RegionStats",
    "Signature",
    "StaticInputs",
]
