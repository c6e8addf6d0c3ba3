"""How the losses of routers get their gradient without leaving their layer.

A model returns the loss that people log, the cross entropy alone. A router's loss is hung on one of the tensors that
the layer passes on anyway. In the backward it gets the gradient that came into the returned loss, times its
coefficient, so that it follows whatever the returned loss was scaled by: microbatches, or the scale of fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphstep.models.float32_buffers import Float32Buffers
from graphstep.models.initialization import WeightInitializer


class GradientScale(Float32Buffers):
    """The gradient of the returned loss, kept on the device between :func:`mark_loss` and the layers' backward.

    One belongs to a model, which registers it; the routers hold it without registering it again. Outside of a backward
    its value means nothing: it is written anew at the start of each one.
    """

    value: Tensor

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones((), device=device, dtype=torch.float32), persistent=False)

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Set the value to 1, which is right without :func:`mark_loss` as well."""
        self.value.fill_(1.0)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: GradientScale) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        # Compiled layers have saved it for their backward before; this write is the value that they are to read.
        ctx.scale.value.data.copy_(grad_outputs[0])
        return grad_outputs[0], None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: GradientScale, coefficient: float) -> Tensor:
        ctx.scale = scale
        ctx.coefficient = coefficient
        ctx.dtype = loss.dtype
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None, None]:
        value = ctx.scale.value
        if torch.compiler.is_compiling():
            # A compiler computes in the forward what it can, and this buffer is right in the backward only.
            value = value + 0.0 * grad_outputs[0].flatten()[0]
        # A product even with 1: the buffer itself must not become a gradient.
        return grad_outputs[0], (value * ctx.coefficient).to(ctx.dtype), None, None


def mark_loss(loss: Tensor, scale: GradientScale) -> Tensor:
    """Return the loss of a model such that its backward starts by writing the incoming gradient into ``scale``.

    Args:
        loss: a scalar, computed from all layers whose losses use ``scale``.
        scale: that of the model.
    """
    function: Callable[..., Tensor] = _Mark.apply
    return function(loss, scale)


def attach_loss(tensor: Tensor, loss: Tensor, scale: GradientScale, coefficient: float = 1.0) -> Tensor:
    """Return ``tensor`` such that its backward gives ``loss`` the gradient ``scale.value * coefficient``.

    Args:
        tensor: what is passed on; its gradient is left alone. Nothing happens if it gets none.
        loss: a scalar.
        scale: that of the model.
        coefficient: weight of this loss relative to the returned one.

    Cost: nothing in the forward, one kernel of one number in the backward.
    """
    function: Callable[..., Tensor] = _Attach.apply
    return function(tensor, loss, scale, coefficient)
