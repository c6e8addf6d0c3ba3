"""AdamW over fp32 main weights, with all state allocated once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from graphstep.errors import CheckpointError
from graphstep.training.gradients import GradientBuffers
from graphstep.training.tensors import differences, spec_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MainWeightAdamW:
    """AdamW that updates fp32 weights from the views of a :class:`GradientBuffers`.

    fp32 parameters are updated in place. For a half-precision parameter the optimizer keeps an fp32 copy, the main
    weight; it updates that copy from ``main_grad`` and rounds it back into the parameter after each step. Weight decay
    applies to tensors of two or more dimensions only: biases and norm weights are not decayed. All state exists from
    the start, at fixed addresses, and loading copies into it.

    Args:
        gradients: owner of the gradients, which also says which parameters are trained.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.

    Source: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2. Fused kernel on CPU and
    CUDA.
    """

    def __init__(
        self, gradients: GradientBuffers, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self._gradients = gradients
        self._trained: dict[str, Tensor] = {}
        self._half: list[Tensor] = []
        self._half_main: list[Tensor] = []
        for slot in gradients.slots:
            if slot.is_main_grad:
                main = slot.parameter.detach().float().clone()
                main.grad = slot.view
                self._half.append(slot.parameter.detach())
                self._half_main.append(main)
            else:
                main = slot.parameter
            self._trained[slot.name] = main
        tensors = list(self._trained.values())
        groups = [
            {"params": [t for t in tensors if t.ndim > 1], "is_decayed": True},
            {"params": [t for t in tensors if t.ndim <= 1], "is_decayed": False},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, weight_decay=0.0, fused=True
        )
        """What updates the main weights. Its learning rate is that of :meth:`set_rates`."""
        for tensor in tensors:
            self.adamw.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                **{moment: torch.zeros_like(tensor.detach()) for moment in _MOMENTS},
            }

    def set_rates(self, lr: float, weight_decay: float) -> None:
        """Say what the next updates use. Numbers of the host; nothing is launched.

        Args:
            lr: learning rate; rounded to fp32, which is what it is in a graph.
            weight_decay: decoupled decay factor, for tensors of two or more dimensions.
        """
        for group in self.adamw.param_groups:
            group["lr"] = _as_fp32(lr)
            group["weight_decay"] = weight_decay if group["is_decayed"] else 0.0

    def update(self, divisor: Tensor | None = None, is_skipped: Tensor | None = None) -> None:
        """Update the weights from the gradients, by kernels alone: nothing is read back to the host.

        Args:
            divisor: scalar, fp32, by which the kernel divides the gradients before it uses them, and leaves them so.
            is_skipped: scalar, fp32: 1 leaves the weights and all state as they are, 0 does not.
        """
        # The attributes are torch's protocol for loss scales; the fused kernels of Adam take them as arguments.
        self.adamw.grad_scale, self.adamw.found_inf = divisor, is_skipped  # type: ignore[attr-defined]
        try:
            self.adamw.step()
        finally:
            del self.adamw.grad_scale, self.adamw.found_inf  # type: ignore[attr-defined]
        self._write_back()

    def step(self, lr: float, weight_decay: float) -> None:
        """The two together, for gradients as they are."""
        self.set_rates(lr, weight_decay)
        self._gradients.install()
        self.update()

    def main_weights(self) -> dict[str, Tensor]:
        """Return the fp32 copies of half-precision parameters by parameter name; empty in fp32."""
        return {slot.name: self._trained[slot.name] for slot in self._gradients.slots if slot.is_main_grad}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state as flat names, ``exp_avg.<parameter>`` and so on; clone to keep."""
        state = {f"main.{name}": tensor for name, tensor in self.main_weights().items()}
        for name, tensor in self._trained.items():
            for key, value in self.adamw.state[tensor].items():
                state[f"{key}.{name}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state of :meth:`state_dict` into the live tensors, whose addresses stay.

        Raises:
            CheckpointError: names, shapes or dtypes differ; nothing was changed.
        """
        problems = differences(
            {name: spec_of(tensor) for name, tensor in self.state_dict().items()},
            {name: spec_of(tensor) for name, tensor in state.items()},
            code="optimizer-mismatch",
            where="state of the optimizer",
            fix="load the state of an optimizer of the same model and precision",
        )
        if problems:
            raise CheckpointError(problems)
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                tensor.copy_(state[name])
        self._write_back()

    def _write_back(self) -> None:
        if self._half:
            # One launch instead of one per parameter. The underscore is only in its name: optimizers built on torch
            # rely on it, and there is no other spelling.
            torch._foreach_copy_(self._half, self._half_main)


def _as_fp32(number: float) -> float:
    return float(np.float32(number))
