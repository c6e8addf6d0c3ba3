"""Small mixers for the tests of Mamba-2."""

from __future__ import annotations

from typing import Any

import torch

from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.models import WeightInitializer, initialize_weights
from graphstep.models.mamba import Mamba2

CONFIG = ModelConfig(hidden_size=24, num_attention_heads=4, hidden_dropout=0.0, add_bias_linear=False)
SIZES = MambaConfig(mamba_head_dim=8, mamba_num_groups=2, mamba_state_dim=16)


def built(**options: Any) -> Mamba2:
    """A mixer whose parameters are all different from one another."""
    mixer = Mamba2(CONFIG, SIZES, **options)
    generator = torch.Generator().manual_seed(7)
    initialize_weights(mixer, WeightInitializer(std=0.3, num_layers=1, generator=generator))
    with torch.no_grad():
        for parameter in (mixer.conv_bias, mixer.D, mixer.norm_weight):
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3)
        mixer.dt_bias.add_(3.0)  # Larger steps: the states of some heads decay within a chunk.
    return mixer
