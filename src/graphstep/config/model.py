"""Shape of the reference GPT. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from graphstep.config.choices import Normalization, PositionEmbedding
from graphstep.config.validation import settle


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape, activation and initialisation of a decoder-only transformer.

    A field whose default is 0 is worked out from the others, and holds the result from then on;
    ``dataclasses.replace(config, hidden_size=256, kv_channels=0)`` works it out again.

    Raises:
        ConfigError: sizes that do not fit each other; all problems at once.
    """

    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 128
    """Width of the residual stream, H."""
    num_attention_heads: int = 4
    """Query heads of an attention."""
    num_query_groups: int = 0
    """Key and value heads; equal to ``num_attention_heads`` without grouped-query attention. 0: equal."""
    kv_channels: int = 0
    """Channels of one head. 0: ``hidden_size / num_attention_heads``."""
    ffn_hidden_size: int = 0
    """Width inside the MLP. 0: 4 H, or with SwiGLU 8 H / 3 rounded down to a multiple of 64, not below 64."""
    seq_length: int = 128
    """Tokens of a training sequence, S."""
    max_position_embeddings: int = 0
    """Positions the model can be given, >= ``seq_length``. 0: ``seq_length``."""
    vocab_size: int = 0
    """Rows of the embedding, padded. 0 until the tokenizer is known."""
    swiglu: bool = False
    """MLP with a SiLU-gated linear unit instead of GELU (Shazeer 2020, "GLU Variants Improve Transformer")."""
    normalization: Normalization = "LayerNorm"
    """Normalisation before attention, before the MLP, and at the end."""
    norm_epsilon: float = 1e-5
    """Added to the variance in a normalisation, > 0."""
    position_embedding_type: PositionEmbedding = "learned_absolute"
    """Learned table, rotation of queries and keys (Su et al. 2021, "RoFormer"), or none."""
    rotary_base: float = 10000.0
    """Base of the rotation frequencies."""
    rotary_percent: float = 1.0
    """Share of a head's channels that is rotated, in (0, 1]."""
    attention_dropout: float = 0.1
    """Dropout of the attention probabilities, in [0, 1)."""
    hidden_dropout: float = 0.1
    """Dropout of embeddings and of what a layer adds to the residual stream, in [0, 1)."""
    add_bias_linear: bool = True
    """Linear layers have a bias."""
    add_qkv_bias: bool = False
    """The query-key-value projection has a bias even when ``add_bias_linear`` is off."""
    qk_layernorm: bool = False
    """Normalise the queries and keys of each head before they rotate, as ``normalization`` says; all heads share the
    weights (Henry et al. 2020, "Query-Key Normalization for Transformers")."""
    untie_embeddings_and_output_weights: bool = False
    """The output projection has weights of its own instead of those of the embedding."""
    init_method_std: float = 0.02
    """Standard deviation of the normal initialisation, > 0."""

    def __post_init__(self) -> None:
        settle(self)

    def options(self) -> Mapping[str, Any]:
        """Return the values under the names of their options, as the rules know them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
