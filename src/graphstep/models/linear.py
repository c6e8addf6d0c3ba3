"""A linear layer that does not draw random numbers when it is built."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphstep.models.delayed_scaling import DelayedScaling
from graphstep.models.float8_linear import Float8Linear
from graphstep.models.initialization import WeightInitializer
from graphstep.models.weight_gradients import AddsWeightGradients, linear


class Linear(nn.Linear, AddsWeightGradients):
    """``torch.nn.Linear`` whose weight is drawn by its parent, which knows the scale, see `initialize_weights`.

    Building a model so takes no numbers from the default generator and does not fill each weight twice.
    """

    def reset_parameters(self) -> None:
        """Leave the parameters as allocated."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., K] by the weight [N, K]."""
        return linear(input, self.weight, self.bias, self.weight_gradients)

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Set the bias, if there is one, to zero."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _UndrawnFloat8Linear(Linear, Float8Linear):
    """The same in fp8, with a weight that is kept for a step. Autograd adds its gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., K] by the weight [N, K], in fp8."""
        return Float8Linear.forward(self, input)

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Set the bias to zero, and forget the histories."""
        super().init_weights(initializer)
        self.reset_fp8_state()


def build_linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    fp8: DelayedScaling | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Linear:
    """A linear layer whose parent draws its weight; in fp8 if there is a recipe.

    Raises:
        ConfigError: fp8 kernels do not take its size.
    """
    if fp8 is None:
        return Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
    return _UndrawnFloat8Linear(
        in_features, out_features, bias, recipe=fp8, caches_weight=True, device=device, dtype=dtype
    )
