"""What stands around the products of a model: looking up, adding to the residual stream, normalising, gating.

Shapes: T tokens, H hidden, F inner size, V vocabulary, M positions, D channels of a head.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphstep.inference.metadata import StepTensors
from graphstep.models import swiglu


class Fusions(Protocol):
    """Operations that a device may run as one kernel each. Rows do not depend on each other. Graphs hold them."""

    def look_up(
        self, tensors: StepTensors, weight_VH: Tensor, table_2MD: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the rows of the tokens of a step [T, H], and the rows of a table at their positions [T, D] each.

        Those of the table are rounded to the type of the weight; without a table there are none.
        """

    def add_and_normalise(self, hidden_TH: Tensor, update_TH: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the residual stream with the update, and that normalised."""

    def gate(self, x_T2F: Tensor) -> Tensor:
        """Return silu(gate) * value [T, F], the gate first in ``x_T2F``."""


class TorchFusions:
    """See :class:`Fusions`; by PyTorch's own operations, on every device."""

    def look_up(
        self, tensors: StepTensors, weight_VH: Tensor, table_2MD: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :class:`Fusions`."""
        tokens_T = tensors.words.index_select(0, tensors.token_sources)
        rows_TH = functional.embedding(tokens_T, weight_VH)
        if table_2MD is None:
            return rows_TH, ()
        return rows_TH, table_2MD.index_select(1, tensors.positions).to(rows_TH.dtype).unbind()

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
