"""What every arm is given: the same weights, the same data, gradients at fixed addresses.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graphstep.config import RunConfig
from graphstep.models import GPTModel
from graphstep.strategies import ForwardBackward
from graphstep.training.gradients import GradientBuffers, GradientSlot
from graphstep.training.setup import build_model
from graphstep.training.step import forward_backward_no_pipelining

Batch = Mapping[str, Tensor]
"""``tokens`` and ``labels``, int64 [B, S], on the device."""
StepBatches = tuple[Batch, ...]
"""The microbatches of one step."""


class Gradients(Protocol):
    """Gradients of a model in flat buffers."""

    slots: tuple[GradientSlot, ...]

    @property
    def flat_buffers(self) -> tuple[Tensor, ...]:
        """The buffers that the slots are views of."""

    def zero(self) -> None:
        """One memset a buffer."""

    def close(self) -> None:
        """Take the gradients off the parameters."""


class FlatGradients:
    """``.grad`` of every parameter is a view of one flat buffer in the dtype of the parameters, also for bf16.

    That is what plain PyTorch has, with addresses that stay. The project's own training keeps fp32 gradients of bf16
    parameters instead: :class:`graphstep.training.gradients.GradientBuffers`.

    Args:
        model: all its parameters have one dtype and one device.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        first = named[0][1]
        step = max(1, 16 // first.dtype.itemsize)  # views start on multiples of 16 bytes
        starts, size = [], 0
        for _, parameter in named:
            starts.append(size)
            size += -(-parameter.numel() // step) * step
        self._flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.slots = tuple(
            GradientSlot(
                name=name,
                parameter=parameter,
                view=self._flat[start : start + parameter.numel()].view(parameter.shape),
                is_main_grad=False,
            )
            for (name, parameter), start in zip(named, starts, strict=True)
        )
        self._install()

    @property
    def flat_buffers(self) -> tuple[Tensor, ...]:
        """The one buffer."""
        return (self._flat,)

    def zero(self) -> None:
        """Zero all gradients in place: one memset."""
        self._install()
        self._flat.zero_()

    def close(self) -> None:
        """Take the gradients off the parameters. May be called twice."""
        for slot in self.slots:
            if slot.parameter.grad is slot.view:
                slot.parameter.grad = None

    def _install(self) -> None:
        for slot in self.slots:
            if slot.parameter.grad is not slot.view:
                slot.parameter.grad = slot.view


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question: a model, its weights, its data. Arms copy the model and leave the case alone."""

    config: RunConfig
    device: torch.device
    has_main_grads: bool
    """Keep fp32 gradients of bf16 parameters in ``main_grad``, as the project's training does."""
    origin: GPTModel
    """The model that every arm gets a copy of. It stays on the CPU."""
    steps: tuple[StepBatches, ...]
    """Different data for successive steps; after the last, the first again."""

    @classmethod
    def make(cls, config: RunConfig, *, device: torch.device, has_main_grads: bool, num_steps: int = 8) -> Case:
        """Draw weights and data from the seed of the configuration.

        Args:
            config: with a vocabulary size.
            device: where the arms run and the data lies.
            has_main_grads: see the field.
            num_steps: different steps of data.
        """
        training = config.training
        origin = build_model(config, device=torch.device("cpu"))
        generator = torch.Generator().manual_seed(training.seed + 1)
        shape = (training.micro_batch_size, config.model.seq_length + 1)

        def batch() -> Batch:
            text_BS = torch.randint(config.model.vocab_size, shape, generator=generator)
            return {
                "tokens": text_BS[:, :-1].contiguous().to(device),
                "labels": text_BS[:, 1:].contiguous().to(device),
            }

        steps = tuple(tuple(batch() for _ in range(training.num_microbatches)) for _ in range(num_steps))
        return cls(config=config, device=device, has_main_grads=has_main_grads, origin=origin, steps=steps)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return self.config.training.num_microbatches

    def new_model(self) -> GPTModel:
        """A copy of the model on the device, in training mode, without gradients."""
        return copy.deepcopy(self.origin).to(self.device)

    def new_gradients(self, model: nn.Module) -> Gradients:
        """Gradients for a copy of the model, zero."""
        if self.config.training.bf16 and not self.has_main_grads:
            return FlatGradients(model)
        return GradientBuffers(model, self.device)

    @property
    def gradient_kind(self) -> str:
        """Dtype and place of the gradients, in words."""
        if not self.config.training.bf16:
            return "fp32 .grad"
        return "fp32 main_grad" if self.has_main_grads else "bf16 .grad"

    def batches(self, step: int) -> StepBatches:
        """The data of a step, counted from 0."""
        return self.steps[step % len(self.steps)]


def zeroing_step(gradients: Gradients) -> ForwardBackward:
    """The step that is measured: zero the gradients, then forward and backward of every microbatch.

    Every arm runs this function; the arms differ in what they capture or compile of it.
    """

    def step(
        *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        if not forward_only:
            gradients.zero()
        return forward_backward_no_pipelining(
            data_iterator=data_iterator, model=model, num_microbatches=num_microbatches, forward_only=forward_only
        )

    return step
