"""The feed-forward block: SwiGLU or GELU.

Shapes: B batch, S sequence, H hidden, F inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.models.delayed_scaling import DelayedScaling
from graphstep.models.initialization import WeightInitializer
from graphstep.models.linear import build_linear


class MLP(nn.Module):
    """down(act(up(x))), with act either GELU or, on a doubled inner projection, SwiGLU.

    With SwiGLU the first F rows of the weight of ``up`` are the gate and the last F rows the value: one GEMM for both.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", equation in section 2 (exact, not the tanh
    approximation); Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        fp8: DelayedScaling | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gated = config.swiglu
        bias = config.add_bias_linear
        inner = config.ffn_hidden_size
        self.up = build_linear(
            config.hidden_size, inner * (2 if self.gated else 1), bias=bias, fp8=fp8, device=device, dtype=dtype
        )
        self.down = build_linear(inner, config.hidden_size, bias=bias, fp8=fp8, device=device, dtype=dtype)

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Draw normal weights, those of the down projection scaled by depth."""
        initializer.normal_(self.up.weight)
        initializer.residual_normal_(self.down.weight)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Transform normalised hidden states [B, S, H] to the update [B, S, H], before its dropout."""
        inner_BSF = self.up(x_BSH)
        inner_BSF = swiglu(inner_BSF) if self.gated else functional.gelu(inner_BSF)
        update_BSH: Tensor = self.down(inner_BSF)
        return update_BSH


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * value, whose backward writes both gradients side by side: no concatenation afterwards."""

    @staticmethod
    def forward(ctx: Any, x_BS2F: Tensor) -> Tensor:
        result_BSF, activated_BSF = swiglu_forward(x_BS2F)
        ctx.save_for_backward(x_BS2F, activated_BSF)
        return result_BSF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        return swiglu_backward(grad_outputs[0], *ctx.saved_tensors)


def swiglu_forward(x_BS2F: Tensor) -> tuple[Tensor, Tensor]:
    """Give silu(gate) * value, and silu(gate), which the backward needs: for nodes with a derivative of their own."""
    gate_BSF, value_BSF = x_BS2F.chunk(2, dim=-1)
    activated_BSF = functional.silu(gate_BSF)
    return activated_BSF * value_BSF, activated_BSF


def swiglu_backward(grad_BSF: Tensor, x_BS2F: Tensor, activated_BSF: Tensor) -> Tensor:
    """Give the gradient [..., 2F] of what :func:`swiglu_forward` was given."""
    gate_BSF, value_BSF = x_BS2F.chunk(2, dim=-1)
    grad_BS2F = torch.empty_like(x_BS2F)
    grad_gate_BSF, grad_value_BSF = grad_BS2F.chunk(2, dim=-1)
    torch.mul(grad_BSF, activated_BSF, out=grad_value_BSF)
    torch.ops.aten.silu_backward.grad_input(grad_BSF * value_BSF, gate_BSF, grad_input=grad_gate_BSF)
    return grad_BS2F


def swiglu(x_BS2F: Tensor) -> Tensor:
    """silu(gate) * value, with [gate, value] = x split in two along the last dimension.

    Args:
        x_BS2F: [..., 2F], gate first.

    Returns:
        [..., F]. Differentiable once.

    Cost: two kernels forward, three backward; keeps the input and silu(gate).
    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """
    if torch.compiler.is_compiling():
        # A compiler fuses the plain formula and its derivative, and refuses results written into views.
        gate_BSF, value_BSF = x_BS2F.chunk(2, dim=-1)
        return functional.silu(gate_BSF) * value_BSF
    function: Callable[[Tensor], Tensor] = _SwiGLU.apply
    return function(x_BS2F)
