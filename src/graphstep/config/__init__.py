"""What a run is told: frozen dataclasses, Megatron-LM's options, rules. Imports no torch."""

from __future__ import annotations

from graphstep.config.arguments import from_argv, from_options
from graphstep.config.data import DataConfig
from graphstep.config.environment import Environment, Machine
from graphstep.config.files import from_file
from graphstep.config.inference import InferenceConfig
from graphstep.config.layers import LayersConfig
from graphstep.config.loop import LoopConfig
from graphstep.config.mamba import MambaConfig
from graphstep.config.memory import MemoryConfig
from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.config.parallel import ParallelConfig
from graphstep.config.precision import PrecisionConfig
from graphstep.config.rl import RLConfig
from graphstep.config.run import RunConfig
from graphstep.config.switches import (
    CapturePolicy,
    CudaGraphConfig,
    CudaGraphImpl,
    CudaGraphModule,
    InferenceCudaGraphScope,
    MismatchPolicy,
)
from graphstep.config.training import TrainingConfig
from graphstep.config.validation import Notice

__all__ = [
    "CapturePolicy",
    "CudaGraphConfig",
    "CudaGraphImpl",
    "CudaGraphModule",
    "DataConfig",
    "Environment",
    "InferenceConfig",
    "InferenceCudaGraphScope",
    "LayersConfig",
    "LoopConfig",
    "Machine",
    "MambaConfig",
    "MemoryConfig",
    "MismatchPolicy",
    "MoEConfig",
    "ModelConfig",
    "Notice",
    "ParallelConfig",
    "PrecisionConfig",
    "RLConfig",
    "RunConfig",
    "TrainingConfig",
    "from_argv",
    "from_file",
    "from_options",
]
