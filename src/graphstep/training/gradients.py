"""Gradients at fixed addresses: one flat buffer per dtype, of which every parameter's gradient is a view.

A recorded backward writes to the addresses it saw, so gradients are allocated once, for the whole run, and are zeroed
instead of dropped. fp32 (and fp64) parameters use ``p.grad`` itself. Parameters in bf16 or fp16 accumulate into an fp32
view, ``p.main_grad``: a hook that autograd calls after it has accumulated adds ``p.grad`` to the view and drops it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

ALIGNMENT_BYTES = 16
"""Every view starts on a multiple of this, so that kernels can use their widest loads."""

_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class GradientSlot:
    """One parameter and the view that holds its gradient."""

    name: str
    """Qualified name of the parameter in the model."""
    parameter: nn.Parameter
    view: Tensor
    """Same shape as the parameter; fp32 for half-precision parameters, else the parameter's dtype."""
    is_main_grad: bool
    """True when the view is ``parameter.main_grad``, False when it is ``parameter.grad``."""


class GradientBuffers:
    """Owner of all gradients of a model, in one contiguous flat buffer per gradient dtype.

    The buffers keep the model's parameters alive and the other way round; :meth:`close` removes the hooks and detaches
    the gradients from the parameters.

    Args:
        model: its parameters that require a gradient get one; a parameter used under several names gets one.
        device: where the buffers live; the parameters must be there too.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        offsets: dict[torch.dtype, int] = {}
        places: list[tuple[str, nn.Parameter, torch.dtype, int]] = []
        for name, parameter in named:
            dtype = _gradient_dtype(parameter)
            start = offsets.get(dtype, 0)
            places.append((name, parameter, dtype, start))
            offsets[dtype] = start + _padded(parameter.numel(), dtype)
        self._flat = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in offsets.items()}
        self.slots: tuple[GradientSlot, ...] = tuple(
            GradientSlot(
                name=name,
                parameter=parameter,
                view=self._flat[dtype][start : start + parameter.numel()].view(parameter.shape),
                is_main_grad=parameter.dtype in _HALF_DTYPES,
            )
            for name, parameter, dtype, start in places
        )
        self._hooks: list[RemovableHandle] = []
        for slot in self.slots:
            if slot.is_main_grad:
                # The attribute is Megatron's protocol for fp32 gradients, and is what a recorder of backward looks for.
                slot.parameter.main_grad = slot.view  # type: ignore[attr-defined]
                hook: RemovableHandle = slot.parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
                self._hooks.append(hook)
        self.install()

    @property
    def flat_buffers(self) -> tuple[Tensor, ...]:
        """The flat buffers, one per dtype; padding between views is zero and stays zero."""
        return tuple(self._flat.values())

    def install(self) -> None:
        """Make ``.grad`` of every fp32 parameter its view again, whatever it was set to (``None``, another tensor)."""
        for slot in self.slots:
            wanted = None if slot.is_main_grad else slot.view
            if slot.parameter.grad is not wanted:
                slot.parameter.grad = wanted

    def zero(self) -> None:
        """Set all gradients to zero in place: one kernel per buffer, no address changes."""
        self.install()
        for flat in self._flat.values():
            flat.zero_()

    def norm(self) -> Tensor:
        """Return the global L2 norm of all gradients: fp32 scalar on the device, without a host read."""
        norms = [torch.linalg.vector_norm(flat).float() for flat in self._flat.values()]
        if not norms:
            return torch.zeros((), dtype=torch.float32, device=self.device)
        total: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        return total

    def norms(self) -> Tensor:
        """Return the L2 norm of each parameter's gradient, [number of slots] fp32 on the device, in their order."""
        if not self.slots:
            return torch.zeros(0, dtype=torch.float32, device=self.device)
        return torch.stack([norm.float() for norm in torch._foreach_norm([slot.view for slot in self.slots])])

    @staticmethod
    def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
        """What to divide all gradients by: ``max(1, (norm + 1e-6) / max_norm)``, computed on the device.

        Args:
            norm: scalar, as :meth:`norm` returned it.
            max_norm: largest norm to keep, > 0.

        Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1, with the
        epsilon of ``torch.nn.utils.clip_grad_norm_``. As a divisor, because the fused kernel of AdamW takes one: a pass
        over the gradients less.
        """
        return ((norm + 1e-6) / max_norm).clamp(min=1.0)

    def close(self) -> None:
        """Remove the hooks and take the gradients off the parameters. May be called twice."""
        while self._hooks:
            self._hooks.pop().remove()
        for slot in self.slots:
            if slot.is_main_grad:
                if getattr(slot.parameter, "main_grad", None) is slot.view:
                    del slot.parameter.main_grad  # type: ignore[attr-defined]
            elif slot.parameter.grad is slot.view:
                slot.parameter.grad = None


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.float32 if parameter.dtype in _HALF_DTYPES else parameter.dtype


def _padded(numel: int, dtype: torch.dtype) -> int:
    step = max(1, ALIGNMENT_BYTES // dtype.itemsize)
    return -(-numel // step) * step


def _add_to_main_grad(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
