"""Reinforcement learning with graphs. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.choices import KvCacheMode
from graphstep.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class RLConfig(Section):
    """What becomes of graphs, key-value cache and weights between rollout and training.

    Raises:
        ConfigError: values that contradict each other; all problems at once.
    """

    perform_rl_step: bool = False
    """Train with reinforcement learning: rollouts, then updates."""
    rl_training_cuda_graphs: bool = False
    """Graphs in training, too."""
    rl_persist_cuda_graphs: bool = False
    """Keep inference graphs while training instead of capturing them again."""
    rl_kv_cache_management_mode: KvCacheMode = "persist"
    """While training: keep the key-value cache, move it to the CPU, or drop and recompute it."""
    rl_inference_model_unified_memory_level: int = 0
    """1: weights of the inference model in managed memory, whose addresses never change."""
    rl_offload_inference_model_weights_when_idle: bool = False
    """Move the weights of the inference model to the CPU while training."""
    rl_offload_optimizer_during_inference: bool = False
    """Move the optimizer state to the CPU during rollouts."""
