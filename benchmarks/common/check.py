"""Does an arm compute what eager computes? Losses and all gradients, bit for bit or by how much not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.arms import Arm, EagerArm
from common.case import Case

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Losses and gradients of one step, on the CPU."""

    losses: Tensor
    flats: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far an arm is from eager, over several steps with different data."""

    num_steps: int
    losses_equal: bool
    """Bit for bit, in all steps."""
    gradients_equal: bool
    """Bit for bit, in all steps and parameters."""
    largest_loss_error: float
    """Relative to eager's loss."""
    largest_gradient_error: float
    """Of a parameter: norm of the difference over the norm of eager's gradient; NaN if anything is not finite."""
    worst_parameter: str
    """The parameter with that error; empty if all gradients are equal. Of an arm whose parameters are laid out
    otherwise, only the norm of all gradients is compared."""

    @property
    def is_equal(self) -> bool:
        """Everything bit for bit."""
        return self.losses_equal and self.gradients_equal


def run_steps(arm: Arm, case: Case, *, num_steps: int) -> Iterator[StepResult]:
    """Run an arm on the first steps of data. Gradients are made NaN before each step: what is not zeroed shows."""
    for index in range(num_steps):
        for flat in arm.gradients().flat_buffers:
            flat.fill_(math.nan)
        losses = arm.step(case.batches(index))
        flats = arm.gradients().flat_buffers
        yield StepResult(losses=losses.to("cpu", copy=True), flats=tuple(flat.to("cpu", copy=True) for flat in flats))


def eager_results(case: Case, *, num_steps: int) -> list[StepResult]:
    """What eager computes, in a model of its own: what the arms, eager among them, are compared with."""
    arm = EagerArm()
    try:
        arm.build(case)
        return list(run_steps(arm, case, num_steps=num_steps))
    finally:
        arm.close()


def compare(arm: Arm, case: Case, expected: list[StepResult]) -> Agreement:
    """Run the arm on the same data and compare."""
    losses_equal = gradients_equal = True
    loss_errors, gradient_errors = [0.0], [(0.0, "")]
    for found, wanted in zip(run_steps(arm, case, num_steps=len(expected)), expected, strict=True):
        if not _same_bits(found.losses, wanted.losses):
            losses_equal = False
            loss_errors.append(_relative(found.losses, wanted.losses))
        if not arm.has_our_parameters:
            gradients_equal = False
            gradient_errors.append((abs(gradient_norm(found) / gradient_norm(wanted) - 1.0), "norm of all gradients"))
        elif not all(_same_bits(a, b) for a, b in zip(found.flats, wanted.flats, strict=True)):
            gradients_equal = False
            gradient_errors.append(_worst(arm, found, wanted))
    error, name = max(gradient_errors, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    return Agreement(
        num_steps=len(expected),
        losses_equal=losses_equal,
        gradients_equal=gradients_equal,
        largest_loss_error=max(loss_errors),
        largest_gradient_error=error,
        worst_parameter=name,
    )


def gradient_norm(result: StepResult) -> float:
    """L2 norm of all gradients of a step."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(flat.double())) ** 2 for flat in result.flats))


@contextmanager
def deterministic_kernels() -> Iterator[list[str]]:
    """Prefer deterministic kernels in the body; gives a list that names those without one, once the body is done."""
    before = torch.are_deterministic_algorithms_enabled()
    warned_before = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    fills_before = filling.fill_uninitialized_memory
    named: list[str] = []
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling memory with NaN would add kernels to every arm.
        filling.fill_uninitialized_memory = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield named
    finally:
        filling.fill_uninitialized_memory = fills_before
        torch.use_deterministic_algorithms(before, warn_only=warned_before)
    messages = [str(warning.message).split(" (Triggered", maxsplit=1)[0] for warning in caught]
    named += sorted({text.split(". ", maxsplit=1)[0] for text in messages if "determinis" in text})


def _same_bits(first: Tensor, second: Tensor) -> bool:
    kind = _BITS[first.dtype.itemsize]
    return first.dtype == second.dtype and torch.equal(first.view(kind), second.view(kind))


def _relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in float64; inf where nothing was wanted."""
    wanted = wanted.double()
    difference = float(torch.linalg.vector_norm(found.double() - wanted))
    norm = float(torch.linalg.vector_norm(wanted))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / norm


def _worst(arm: Arm, found: StepResult, wanted: StepResult) -> tuple[float, str]:
    """Largest relative error of a parameter, NaN above all."""
    errors = []
    flat_of = {flat.data_ptr(): index for index, flat in enumerate(arm.gradients().flat_buffers)}
    for slot in arm.gradients().slots:
        index = flat_of[slot.view.untyped_storage().data_ptr()]
        start, size = slot.view.storage_offset(), slot.view.numel()
        part = slice(start, start + size)
        errors.append((_relative(found.flats[index][part], wanted.flats[index][part]), slot.name))
    return max(errors, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
