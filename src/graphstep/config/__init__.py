"""What a run is told: frozen dataclasses, Megatron-LM's options, rules. Imports no torch."""

from __future__ import annotations

from graphstep.config.arguments import from_argv
from graphstep.config.data import DataConfig
from graphstep.config.model import ModelConfig
from graphstep.config.run import RunConfig
from graphstep.config.switches import CudaGraphConfig, CudaGraphImpl, CudaGraphModule, InferenceCudaGraphScope
from graphstep.config.training import TrainingConfig
from graphstep.config.validation import Notice

__all__ = [
    "CudaGraphConfig",
    "CudaGraphImpl",
    "CudaGraphModule",
    "DataConfig",
    "InferenceCudaGraphScope",
    "ModelConfig",
    "Notice",
    "RunConfig",
    "TrainingConfig",
    "from_argv",
]
