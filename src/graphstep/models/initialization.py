"""Weights at the start of training: a function of the seed only, the same on every device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class WeightInitializer:
    """Fills parameters in place.

    Numbers are drawn in float32 on the generator's device and then copied to the parameter's device and dtype, so
    that a CPU generator gives the same weights to a model on the CPU and to one on a GPU. Parameters on the meta
    device are left alone and draw nothing.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3 (weights of
    residual layers scaled by 1/sqrt(number of residual layers)); Shoeybi et al. 2019, "Megatron-LM", section 4.1
    (standard deviation divided by sqrt(2 * num_layers)).
    """

    std: float
    """Standard deviation of embeddings and of projections into a block."""
    num_layers: int
    """Number of transformer layers; each adds to the residual stream twice."""
    generator: torch.Generator | None = None
    """Source of the random numbers; the CPU's default generator if None."""

    @property
    def residual_std(self) -> float:
        """Standard deviation of projections that write to the residual stream."""
        return self.std / math.sqrt(2.0 * self.num_layers)

    def normal_(self, weight: Tensor) -> None:
        """Fill ``weight`` with N(0, std^2)."""
        self._fill_normal(weight, self.std)

    def residual_normal_(self, weight: Tensor) -> None:
        """Fill ``weight`` with N(0, residual_std^2)."""
        self._fill_normal(weight, self.residual_std)

    def _fill_normal(self, weight: Tensor, std: float) -> None:
        if weight.is_meta:
            return
        device = torch.device("cpu") if self.generator is None else self.generator.device
        values = torch.empty(weight.shape, device=device, dtype=torch.float32)
        with torch.no_grad():
            weight.copy_(values.normal_(0.0, std, generator=self.generator))


@runtime_checkable
class Initializable(Protocol):
    """A module that knows how to fill its parameters and buffers, and maybe weights of its children.

    A parent runs before its children.
    """

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Fill parameters and buffers in a fixed order."""


def initialize_weights(module: nn.Module, initializer: WeightInitializer) -> None:
    """Let every `Initializable` below ``module``, itself included, fill its weights, in the order of definition.

    Modules of this package allocate their parameters without filling them; this is what gives them values.
    Also needed after ``to_empty()``: it fills the rotary tables too.
    """
    for child in module.modules():
        if isinstance(child, Initializable):
            child.init_weights(initializer)
