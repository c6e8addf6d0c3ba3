"""Adding, normalising and gating by one Triton kernel each: short steps are bound by the number of their kernels.

Results are rounded where those of the separate operations are. Imported only where there is a GPU, as
`graphstep.inference.triton_kernels` is.

Shapes: T tokens, H hidden, F inner size.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from graphstep.inference.fusions import TorchFusions, has_hooks
from graphstep.models import RMSNorm

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_LONGEST_ROW: Final = 16384
_GATED_AT_ONCE: Final = 1024


class TritonFusions(TorchFusions):
    """See :class:`graphstep.inference.fusions.Fusions`. What the kernels do not know is left to PyTorch."""

    def add_and_normalise(self, hidden_TH: Tensor, update_TH: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """One kernel for an RMSNorm that nobody watches."""
        if not self._knows(hidden_TH, update_TH, norm):
            return super().add_and_normalise(hidden_TH, update_TH, norm)
        hidden_TH = hidden_TH.contiguous()
        sum_TH = hidden_TH if update_TH is None else torch.empty_like(hidden_TH)
        out_TH = torch.empty_like(hidden_TH)
        num_rows, size = hidden_TH.shape
        width = triton.next_power_of_2(size)
        add_and_normalise_kernel[(num_rows,)](
            hidden_TH,
            hidden_TH if update_TH is None else update_TH.contiguous(),
            norm.weight,
            sum_TH,
            out_TH,
            size,
            norm.eps,
            HAS_UPDATE=update_TH is not None,
            WIDTH=width,
            num_warps=min(16, max(4, width // 256)),
        )
        return sum_TH, out_TH

    def gate(self, x_T2F: Tensor) -> Tensor:
        """One kernel."""
        if x_T2F.dtype not in _DTYPES or x_T2F.dim() != 2:
            return super().gate(x_T2F)
        x_T2F = x_T2F.contiguous()
        num_rows, size = x_T2F.shape[0], x_T2F.shape[1] // 2
        out_TF = x_T2F.new_empty(num_rows, size)
        gate_kernel[num_rows, triton.cdiv(size, _GATED_AT_ONCE)](x_T2F, out_TF, size, WIDTH=_GATED_AT_ONCE, num_warps=4)
        return out_TF

    @staticmethod
    def _knows(hidden_TH: Tensor, update_TH: Tensor | None, norm: nn.Module) -> bool:
        return (
            type(norm) is RMSNorm
            and not has_hooks(norm)
            and hidden_TH.dim() == 2
            and hidden_TH.shape[1] <= _LONGEST_ROW
            and hidden_TH.dtype in _DTYPES
            and norm.weight.dtype == hidden_TH.dtype
            and (update_TH is None or update_TH.dtype == hidden_TH.dtype)
        )


@triton.jit
def add_and_normalise_kernel(
    hidden, update, weight, total, out, size, eps, HAS_UPDATE: tl.constexpr, WIDTH: tl.constexpr
):
    """One program a row."""
    column = tl.arange(0, WIDTH)
    is_there = column < size
    offsets = tl.program_id(0).to(tl.int64) * size + column
    x = tl.load(hidden + offsets, mask=is_there, other=0.0)
    if HAS_UPDATE:
        added = tl.load(update + offsets, mask=is_there, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total + offsets, x, mask=is_there)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    w = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + offsets, (x * scale * w).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def gate_kernel(x, out, size, WIDTH: tl.constexpr):
    """One program for WIDTH numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_there = column < size
    gate = tl.load(x + row * 2 * size + column, mask=is_there, other=0.0).to(tl.float32)
    value = tl.load(x + row * 2 * size + size + column, mask=is_there, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, (activated * value).to(out.dtype.element_ty), mask=is_there)
