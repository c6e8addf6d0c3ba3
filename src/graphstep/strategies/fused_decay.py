"""How torch's fused AdamW decays weights: found by trying, as it rounds differently on each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

Formula = Callable[[Sequence[Tensor], Tensor, Tensor], None]
"""Decays weights, given the learning rate and the weight decay (float64): scalars on the device."""


def in_single_precision(weights: Sequence[Tensor], rate: Tensor, number: Tensor) -> None:
    """``w - (rate * number) * w``, rounded after the product in parentheses and at the end."""
    factor = -(rate.float() * number.float()).reshape(1)
    for weight in weights:
        weight.addcmul_(weight, factor)


def in_double_precision(weights: Sequence[Tensor], rate: Tensor, number: Tensor) -> None:
    """The same in double precision, and rounded to the weight in the end."""
    factor = -(rate.double() * number).reshape(1)
    for weight in weights:
        torch.addcmul(weight, weight, factor, out=weight)


def by_a_factor(weights: Sequence[Tensor], rate: Tensor, number: Tensor) -> None:
    """``w * (1 - rate * number)``, with the factor rounded from double precision."""
    factor = (1 - rate.double() * number).to(weights[0].dtype)
    torch._foreach_mul_(list(weights), factor)


FORMULAS: Final[tuple[Formula, ...]] = (in_single_precision, in_double_precision, by_a_factor)

RATES_AND_DECAYS: Final = ((0.3, 0.9), (0.1, 0.37), (2.0**-6, 0.1), (1e-3, 0.05))
"""What is tried."""
_NUM_WEIGHTS: Final = 2**14
_SIZE_OF_REST: Final = 7
"""Less than a processor does at once: it computes the rest of a tensor by other code, which may round otherwise."""
_NUM_RESTS: Final = 64


def formula_of_kernel(dtype: torch.dtype, device: torch.device) -> Formula | None:
    """The formula that leaves the bits that the kernel leaves, or ``None``. Waits for the device; not in a capture."""
    for formula in FORMULAS:
        if all(_is_right(formula, dtype, device, rate, decay) for rate, decay in RATES_AND_DECAYS):
            return formula
    return None


def tried_on(dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Weights of many magnitudes, a large tensor and small ones, and gradients of them for two steps."""
    sizes = [_NUM_WEIGHTS, *[_SIZE_OF_REST] * _NUM_RESTS]
    numbers = torch.arange(1, sum(sizes) + 1, dtype=torch.float64, device=device)

    def split(values: Tensor) -> list[Tensor]:
        return [each.to(dtype, copy=True) for each in values.split(sizes)]

    weights = split(torch.sin(numbers) * torch.exp2(numbers % 23 - 17))
    return weights, [split(torch.cos(numbers * factor)) for factor in (3, 5)]


def _is_right(formula: Formula, dtype: torch.dtype, device: torch.device, rate: float, decay: float) -> bool:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        own, others = (_weights_after(dtype, device, rate, decay, each) for each in (None, formula))
        return all(map(torch.equal, own, others))


def _weights_after(
    dtype: torch.dtype, device: torch.device, rate: float, decay: float, formula: Formula | None
) -> list[Tensor]:
    """Some weights after a step of the kernel, which decays them, or before which the formula does."""
    weights, (gradients, _) = tried_on(dtype, device)
    lr = torch.tensor(rate, dtype=torch.float32, device=device)
    if formula is not None:
        formula(weights, lr, torch.tensor(decay, dtype=torch.float64, device=device))
    adamw(
        weights,
        gradients,
        [torch.zeros_like(weight) for weight in weights],
        [torch.zeros_like(weight) for weight in weights],
        [],
        [torch.zeros((), dtype=torch.float32, device=device) for _ in weights],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=lr,
        weight_decay=decay if formula is None else 0.0,
        eps=1e-8,
        maximize=False,
    )
    return weights
