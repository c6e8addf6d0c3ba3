"""The reference GPT and its parts."""

from __future__ import annotations

from graphstep.models.attention import Attention, causal_attention
from graphstep.models.auxiliary_losses import GradientScale, attach_loss, mark_loss
from graphstep.models.delayed_scaling import DelayedScaling
from graphstep.models.embedding import Embedding
from graphstep.models.float8_linear import Float8Linear, float8_layers, mark_first_microbatch, reduce_amax
from graphstep.models.gpt import GPTModel
from graphstep.models.head import OutputHead, token_cross_entropy
from graphstep.models.initialization import Initializable, WeightInitializer, initialize_weights
from graphstep.models.layer import TransformerLayer
from graphstep.models.layers import build_layers
from graphstep.models.linear import Linear
from graphstep.models.mlp import MLP, swiglu
from graphstep.models.norms import LayerNorm, RMSNorm, build_norm
from graphstep.models.part_layers import AttentionLayer, MLPLayer
from graphstep.models.rotary import RotaryTables, apply_rotary, rotary_channels
from graphstep.models.segments import Segment, SegmentedModule

__all__ = [
    "MLP",
    "Attention",
    "AttentionLayer",
    "DelayedScaling",
    "Embedding",
    "Float8Linear",
    "GPTModel",
    "GradientScale",
    "Initializable",
    "LayerNorm",
    "Linear",
    "MLPLayer",
    "OutputHead",
    "RMSNorm",
    "RotaryTables",
    "Segment",
    "SegmentedModule",
    "TransformerLayer",
    "WeightInitializer",
    "apply_rotary",
    "attach_loss",
    "build_layers",
    "build_norm",
    "causal_attention",
    "float8_layers",
    "initialize_weights",
    "mark_first_microbatch",
    "mark_loss",
    "reduce_amax",
    "rotary_channels",
    "swiglu",
    "token_cross_entropy",
]
