"""The short causal convolution of each channel, in whole-tensor operations.

Shapes: B batch, S sequence, W channels, K width of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(x_BSW: Tensor, weight_KW: Tensor, bias_W: Tensor) -> Tensor:
    """y[t] = bias + sum over j of weight[j] * x[t - j], with zeros before the first token.

    Cost: K kernels. A library convolution would want channels before tokens: copies there and back.
    """
    y_BSW = torch.addcmul(bias_W, x_BSW, weight_KW[0])
    for back in range(1, min(len(weight_KW), x_BSW.shape[1])):
        y_BSW[:, back:].addcmul_(x_BSW[:, :-back], weight_KW[back])
    return y_BSW


def convolve_backward(
    grad_BTW: Tensor, x_BSW: Tensor, weight_KW: Tensor, *, grad_x_BSW: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradient of the input into ``grad_x_BSW``; return those of weight and bias.

    Args:
        grad_BTW: gradient of the output, followed by K - 1 zeros: T = S + K - 1.
        x_BSW: the input.
        weight_KW: the weight.
        grad_x_BSW: is written, in any memory layout.

    Cost: 5 kernels, and twice K times the memory of x for a moment.
    """
    windows_BSKW = grad_BTW.unfold(1, len(weight_KW), 1).transpose(2, 3)
    torch.sum(windows_BSKW * weight_KW, dim=2, out=grad_x_BSW)
    grad_weight_KW = (windows_BSKW * x_BSW[:, :, None]).sum(dim=(0, 1))
    return grad_weight_KW, grad_BTW.sum(dim=(0, 1))
