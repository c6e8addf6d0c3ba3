"""What is recomputed or kept on the CPU instead of on the device. Names and meaning are those of Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.choices import RecomputeGranularity, RecomputeMethod
from graphstep.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig(Section):
    """Recomputation of activations, and offloading.

    Raises:
        ConfigError: values out of range or that contradict each other; all problems at once.
    """

    recompute_granularity: RecomputeGranularity | None = None
    """Recompute whole layers or named parts in the backward; None: nothing."""
    recompute_method: RecomputeMethod | None = None
    """Which layers ``full`` recomputes: chunks of equal size, or the first ones of each stage."""
    recompute_num_layers: int | None = None
    """Layers of a chunk, or of a stage."""
    recompute_modules: tuple[str, ...] | None = None
    """Parts that ``selective`` recomputes. None: ``core_attn``."""
    cpu_offloading_num_layers: int = 0
    """Layers whose activations and weights are kept on the CPU; 0: none."""
    fine_grained_activation_offloading: bool = False
    """Keep the inputs of named parts on the CPU."""
    offload_modules: tuple[str, ...] = ()
    """Those parts."""
    fine_grained_offloading_max_inflight_offloads: int | None = None
    """Copies that may be under way at once, >= 0; None: any number."""
    delay_offload_until_cuda_graph: bool = False
    """Copy after the replay of a graph, while the CPU waits for the exchange of tokens (``transformer_engine``)."""
    activation_offload_fraction: float = 1.0
    """Share of the layers that are offloaded, in [0, 1]."""
    min_offloaded_tensor_size: int = 1048576
    """Smallest tensor that is offloaded, in elements, >= 0."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer state on the CPU."""
