"""The reference GPT and its parts."""

from __future__ import annotations

from graphstep.models.attention import Attention, causal_attention
from graphstep.models.embedding import Embedding
from graphstep.models.gpt import GPTModel
from graphstep.models.head import OutputHead, token_cross_entropy
from graphstep.models.initialization import Initializable, WeightInitializer, initialize_weights
from graphstep.models.layer import TransformerLayer
from graphstep.models.linear import Linear
from graphstep.models.mlp import MLP, swiglu
from graphstep.models.norms import LayerNorm, RMSNorm, build_norm
from graphstep.models.rotary import RotaryTables, apply_rotary, rotary_channels
from graphstep.models.segments import Segment, SegmentedModule

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "GPTModel",
    "Initializable",
    "LayerNorm",
    "Linear",
    "OutputHead",
    "RMSNorm",
    "RotaryTables",
    "Segment",
    "SegmentedModule",
    "TransformerLayer",
    "WeightInitializer",
    "apply_rotary",
    "build_norm",
    "causal_attention",
    "initialize_weights",
    "rotary_channels",
    "swiglu",
    "token_cross_entropy",
]
