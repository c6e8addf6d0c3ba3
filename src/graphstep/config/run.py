"""The whole configuration of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphstep.config.data import DataConfig
from graphstep.config.model import ModelConfig
from graphstep.config.switches import CudaGraphConfig
from graphstep.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that a training run is told. Two runs with equal configurations do the same."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the model."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Batches, schedule, optimizer, outputs."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data set and tokenizer."""
    graphs: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    """What is captured, and how."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """What the user should know and that is no error: options without effect, discouraged values."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where a value came from, by option name: ``option``, ``derived``; the rest are defaults."""
