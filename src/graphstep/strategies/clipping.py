"""Clipping of gradients by a threshold that lies on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from graphstep.errors import ConfigError, Problem


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, which also takes a threshold in a tensor, and does not read it back.

    A graph follows what is written into that tensor (``fill_``, ``copy_``); a number is a part of the graph. Gradients
    have the bits that torch leaves with the number.

    Args:
        parameters: a parameter or several; those without a gradient are left out.
        max_norm: a number, or a tensor with one entry on the device of the gradients, fp32 or fp64.
        norm_type: order of the norm.
        error_if_nonfinite: raise where the norm is not finite; this reads it on the host, and cannot be captured.
        foreach: several gradients in a launch; by default where torch can.

    Returns:
        [] norm of all gradients, before they are clipped; 0 on the host if there are none.

    Raises:
        ConfigError: the tensor has several entries, another type, or is on another device. Nothing has been clipped.
        RuntimeError: ``error_if_nonfinite``, and the norm is not finite. Nothing has been clipped.

    Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1, with the
    epsilon of torch, and rounded as there: torch divides a number by a tensor as a product with the reciprocal.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not isinstance(max_norm, Tensor):
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    _check(max_norm, gradients[0].device)
    with torch.no_grad():
        norm = nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
        # A number is rounded to what is computed in: single precision for half precision too.
        kind = torch.promote_types(norm.dtype, torch.float32)
        share = (norm + 1e-6).reciprocal().to(kind) * max_norm.reshape(()).to(kind)
        factor = share.to(norm.dtype).clamp(max=1.0)
        for device, dtype in dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients):
            here = [gradient for gradient in gradients if (gradient.device, gradient.dtype) == (device, dtype)]
            if foreach is False:
                for gradient in here:
                    gradient.mul_(factor.to(device))
            else:
                torch._foreach_mul_(here, factor.to(device))
    return norm


def _check(max_norm: Tensor, device: torch.device) -> None:
    if max_norm.numel() == 1 and max_norm.device == device and max_norm.dtype in (torch.float32, torch.float64):
        return
    found = f"{list(max_norm.shape)} {max_norm.dtype} on {max_norm.device}"
    raise ConfigError(
        Problem(
            "clip-threshold",
            f"a threshold in a tensor has one entry, fp32 or fp64, and is on {device} as gradients are; got {found}",
            "clip_grad_norm_, max_norm",
            f"torch.tensor(1.0, device={str(device)!r})",
        )
    )
