"""Strategies decide which regions are captured, in which order, and who says so."""

from __future__ import annotations

from graphstep.strategies.build import build_strategy
from graphstep.strategies.clipping import clip_grad_norm_
from graphstep.strategies.full_iteration import FullCudaGraphWrapper
from graphstep.strategies.graphed_callables import make_graphed_callables
from graphstep.strategies.graphed_step import GraphedStep, graph_step
from graphstep.strategies.local import LocalGraphs
from graphstep.strategies.manager import CudaGraphManager, attach
from graphstep.strategies.optimizer_graph import OptimizerGraph
from graphstep.strategies.protocol import ForwardBackward, Strategy
from graphstep.strategies.transformer_engine import TECudaGraphHelper, TransformerEngineGraphs

__all__ = [
    "CudaGraphManager",
    "ForwardBackward",
    "FullCudaGraphWrapper",
    "GraphedStep",
    "LocalGraphs",
    "OptimizerGraph",
    "Strategy",
    "TECudaGraphHelper",
    "TransformerEngineGraphs",
    "attach",
    "build_strategy",
    "clip_grad_norm_",
    "graph_step",
    "make_graphed_callables",
]
