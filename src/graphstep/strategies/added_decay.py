"""How torch's optimizers add weight decay to gradients: found by trying, as it rounds differently on each device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from graphstep.strategies.fused_decay import RATES_AND_DECAYS, tried_on


def with_decay(gradient: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    """``gradient + number * weight``, computed in the widest type of the three and rounded to that of the gradient.

    Args:
        gradient: stays as it is.
        weight: with the same layout.
        number: the weight decay, [1] on the device. With a dimension it takes part in the choice of the type.
    """
    return torch.addcmul(gradient, weight, number, out=torch.empty_like(gradient))


def type_of_number(
    optimizer: str, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """In which type :func:`with_decay` is to be given the number for the bits that a step leaves by itself, if in any.

    Waits for the device; not in a capture.

    Args:
        optimizer: name of its class in torch.
        group: of its parameters.
        dtype: of the parameters and their gradients.
        device: where they are.
    """
    kinds: list[type[_Steps]]
    if not group.get("fused"):
        kinds = [each for is_foreach, each in _BY_SINGLE_OPERATIONS if group.get("foreach") in (is_foreach, None)]
    elif optimizer in _FUSED and dtype in _NOT_ROUNDED_BETWEEN:
        kinds = [_FUSED[optimizer]]
    else:
        return None
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for number in (torch.float32, torch.float64):
            if all(_is_right(each, number, dtype, device) for each in kinds):
                return number
    return None


def _is_right(kind: type[_Steps], number: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    return all(
        all(map(torch.equal, *(_after(kind, each, dtype, device, rate, decay) for each in (None, number))))
        for rate, decay in RATES_AND_DECAYS
    )


def _after(
    kind: type[_Steps], number: torch.dtype | None, dtype: torch.dtype, device: torch.device, rate: float, decay: float
) -> list[Tensor]:
    """What two steps leave that decay by themselves, or that are given gradients with the decay."""
    weights, of_steps = tried_on(dtype, device)
    steps = kind(weights, torch.tensor(rate, dtype=torch.float32, device=device))
    for gradients in of_steps:
        if number is None:
            steps.step(gradients, decay)
        else:
            given = torch.tensor([decay], dtype=number, device=device)
            steps.step([with_decay(g, w, given) for g, w in zip(gradients, weights, strict=True)], 0.0)
    return steps.found


class _Steps:
    """Steps of an optimizer from torch, as far as they have to do with weight decay.

    Args:
        weights: are changed by the steps.
        rate: [] fp32 on the device.
    """

    def __init__(self, weights: list[Tensor], rate: Tensor) -> None:
        self.weights, self.rate = weights, rate
        self.found = [*weights]
        """All that the steps leave."""
        self.counts = [torch.zeros((), dtype=torch.float32, device=rate.device) for _ in weights]

    def step(self, gradients: list[Tensor], decay: float) -> None:
        """One step; what it leaves is in ``found`` then."""
        raise NotImplementedError(f"{type(self).__name__} has to step")

    def zeros(self) -> list[Tensor]:
        """State of the optimizer, a tensor for each weight."""
        made = [torch.zeros_like(weight) for weight in self.weights]
        self.found += made
        return made


class _OneByOne(_Steps):
    def step(self, gradients: list[Tensor], decay: float) -> None:
        for gradient, weight in zip(gradients, self.weights, strict=True):
            self.found.append(gradient.add(weight, alpha=decay) if decay else gradient)


class _Together(_Steps):
    def step(self, gradients: list[Tensor], decay: float) -> None:
        self.found += torch._foreach_add(gradients, self.weights, alpha=decay) if decay else gradients


class _FusedAdam(_Steps):
    def __init__(self, weights: list[Tensor], rate: Tensor) -> None:
        super().__init__(weights, rate)
        self.averages, self.squares = self.zeros(), self.zeros()

    def step(self, gradients: list[Tensor], decay: float) -> None:
        adam(
            self.weights,
            gradients,
            self.averages,
            self.squares,
            [],
            self.counts,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.rate,
            weight_decay=decay,
            eps=1e-8,
            maximize=False,
        )


class _FusedSGD(_Steps):
    def __init__(self, weights: list[Tensor], rate: Tensor) -> None:
        super().__init__(weights, rate)
        self.momenta: list[Tensor | None] = [*self.zeros()]

    def step(self, gradients: list[Tensor], decay: float) -> None:
        sgd(
            self.weights,
            gradients,
            self.momenta,
            fused=True,
            weight_decay=decay,
            momentum=0.9,
            lr=self.rate,  # type: ignore[arg-type]  # The kernel takes a tensor.
            dampening=0.1,
            nesterov=False,
            maximize=False,
        )


class _FusedAdagrad(_Steps):
    def __init__(self, weights: list[Tensor], rate: Tensor) -> None:
        super().__init__(weights, rate)
        self.sums = self.zeros()

    def step(self, gradients: list[Tensor], decay: float) -> None:
        adagrad(
            self.weights,
            gradients,
            self.sums,
            self.counts,
            fused=True,
            lr=self.rate,  # type: ignore[arg-type]  # The kernel takes a tensor.
            weight_decay=decay,
            lr_decay=0.0,
            eps=1e-10,
            maximize=False,
        )


_BY_SINGLE_OPERATIONS: Final[tuple[tuple[bool, type[_Steps]], ...]] = ((False, _OneByOne), (True, _Together))
_FUSED: Final[Mapping[str, type[_Steps]]] = {"Adam": _FusedAdam, "SGD": _FusedSGD, "Adagrad": _FusedAdagrad}
_NOT_ROUNDED_BETWEEN: Final = frozenset({torch.float32, torch.float64})
"""The kernels keep the sum in at least these; a gradient of half precision would be rounded between."""
