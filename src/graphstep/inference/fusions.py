"""What stands between the products of a layer: adding to the residual stream, normalising, gating.

Shapes: T tokens, H hidden, F inner size.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol

import torch
from torch import Tensor, nn

from graphstep.models import swiglu


class Fusions(Protocol):
    """Operations that a device may run as one kernel each. Rows do not depend on each other. Graphs hold them."""

    def add_and_normalise(self, hidden_TH: Tensor, update_TH: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the residual stream with the update, and that normalised."""

    def gate(self, x_T2F: Tensor) -> Tensor:
        """Return silu(gate) * value [T, F], the gate first in ``x_T2F``."""


class TorchFusions:
    """See :class:`Fusions`; by PyTorch's own operations, on every device."""

    def add_and_normalise(self, hidden_TH: Tensor, update_TH: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """See :class:`Fusions`."""
        if update_TH is not None:
            hidden_TH = hidden_TH + update_TH
        return hidden_TH, norm(hidden_TH)

    def gate(self, x_T2F: Tensor) -> Tensor:
        """See :class:`Fusions`."""
        return swiglu(x_T2F)


def has_hooks(module: nn.Module) -> bool:
    """Would somebody notice if the module was not called?"""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def fusions_for(device: torch.device) -> Fusions:
    """Triton kernels on a GPU where Triton is installed, otherwise PyTorch's operations."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        fusions: Fusions = importlib.import_module("graphstep.inference.triton_fusions").TritonFusions()
        return fusions
    return TorchFusions()
