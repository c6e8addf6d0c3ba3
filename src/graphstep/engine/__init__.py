"""Engines run recordings on a device: real CUDA graphs, or a tape of ATen operations on the CPU."""

from __future__ import annotations

from graphstep.engine.cuda import CudaEngine
from graphstep.engine.protocol import Engine, Recording
from graphstep.engine.select import engine_for
from graphstep.engine.tape import TapeEngine

__all__ = ["CudaEngine", "Engine", "Recording", "TapeEngine", "engine_for"]
