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

_RATES_AND_DECAYS: Final = ((0.3, 0.9), (0.1, 0.37), (2.0**-6, 0.1), (1e-3, 0.05))
_NUM_WEIGHTS: Final = 2**14


def formula_of_kernel(dtype: torch.dtype, device: torch.device) -> Formula | None:
    """The formula that leaves the bits that the kernel leaves, or ``None``. Waits for the device; not in a capture."""
    for formula in FORMULAS:
        if all(_is_right(formula, dtype, device, rate, decay) for rate, decay in _RATES_AND_DECAYS):
            return formula
    return None


def _is_right(formula: Formula, dtype: torch.dtype, device: torch.device, rate: float, decay: float) -> bool:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return torch.equal(*(_weights_after(dtype, device, rate, decay, each) for each in (None, formula)))


def _weights_after(
    dtype: torch.dtype, device: torch.device, rate: float, decay: float, formula: Formula | None
) -> Tensor:
    """Some weights after a step of the kernel, which decays them, or before which the formula does."""
    numbers = torch.arange(1, _NUM_WEIGHTS + 1, dtype=torch.float64, device=device)
    weight = (torch.sin(numbers) * torch.exp2(numbers % 23 - 17)).to(dtype)
    lr = torch.tensor(rate, dtype=torch.float32, device=device)
    if formula is not None:
        formula([weight], lr, torch.tensor(decay, dtype=torch.float64, device=device))
    adamw(
        [weight],
        [torch.cos(numbers * 3).to(dtype)],
        [torch.zeros_like(weight)],
        [torch.zeros_like(weight)],
        [],
        [torch.zeros((), dtype=torch.float32, device=device)],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=lr,
        weight_decay=decay if formula is None else 0.0,
        eps=1e-8,
        maximize=False,
    )
    return weight
