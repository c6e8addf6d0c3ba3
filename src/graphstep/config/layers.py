"""Which layers a model has, and which kernels run them. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.choices import CrossEntropyFusion, TransformerImpl
from graphstep.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersConfig(Section):
    """Layers other than those of a plain decoder, and the kernels of all of them.

    Raises:
        ConfigError: a pattern that cannot be read; all problems at once.
    """

    hybrid_layer_pattern: str | None = None
    """One letter a layer: ``M`` Mamba, ``*`` attention, ``-`` MLP, ``E`` experts, ``G`` gated delta net. ``|``
    separates pipeline stages, ``/`` begins the layers of multi-token prediction. None: attention and MLP in each."""
    mtp_num_layers: int | None = None
    """Layers that predict tokens further ahead."""
    multi_latent_attention: bool = False
    """Attention with compressed keys and values (DeepSeek-AI 2024, "DeepSeek-V2")."""
    transformer_impl: TransformerImpl = "transformer_engine"
    """Whose kernels Megatron-LM uses; ``inference_optimized`` is for decoding."""
    cross_entropy_loss_fusion: bool = False
    """Compute the loss in one kernel."""
    cross_entropy_fusion_impl: CrossEntropyFusion = "native"
    """Whose kernel that is."""
    gradient_accumulation_fusion: bool = True
    """Add weight gradients to the accumulated ones inside the matrix multiplication."""
    te_rng_tracker: bool = False
    """Generators that a graph can replay. Ours always can: accepted, and without effect."""
    inference_rng_tracker: bool = False
    """Generators for inference. Accepted, and without effect."""
