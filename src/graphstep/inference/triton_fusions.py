"""Looking up, adding, normalising and gating by one Triton kernel each: in a short step, each costs a gap as well.

Results are rounded where those of the separate operations are. Imported only where there is a GPU, as
`graphstep.inference.triton_kernels` is.

Shapes: T tokens, H hidden, F inner size, V vocabulary, M positions, D channels of a head.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

# ruff: noqa: PLR0917

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from graphstep.inference.fusions import TorchFusions, has_hooks
from graphstep.inference.metadata import StepTensors
from graphstep.models import RMSNorm

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_LONGEST_ROW: Final = 16384
_AT_ONCE: Final = 1024
"""Numbers of a row that a program copies or gates."""


class TritonFusions(TorchFusions):
    """See :class:`graphstep.inference.fusions.Fusions`. What the kernels do not know is left to PyTorch."""

    def look_up(
        self, tensors: StepTensors, weight_VH: Tensor, table_2MD: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One kernel."""
        is_contiguous = weight_VH.is_contiguous() and (table_2MD is None or table_2MD.is_contiguous())
        if weight_VH.dtype not in _DTYPES or not is_contiguous:
            return super().look_up(tensors, weight_VH, table_2MD)
        num_tokens, size = tensors.bucket.tokens, weight_VH.shape[1]
        channels = 0 if table_2MD is None else table_2MD.shape[2]
        rows_TH = weight_VH.new_empty(num_tokens, size)
        angles_2TD = weight_VH.new_empty(2, num_tokens, channels)
        look_up_kernel[num_tokens, triton.cdiv(size, _AT_ONCE)](
            tensors.words,
            tensors.token_sources,
            tensors.positions,
            weight_VH,
            weight_VH if table_2MD is None else table_2MD,
            rows_TH,
            angles_2TD,
            size,
            channels,
            0 if table_2MD is None else table_2MD.stride(0),
            angles_2TD.stride(0),
            HAS_TABLE=table_2MD is not None,
            WIDTH=_AT_ONCE,
            TABLE_WIDTH=triton.next_power_of_2(max(1, channels)),
            num_warps=4,
        )
        return rows_TH, () if table_2MD is None else angles_2TD.unbind()

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
        gate_kernel[num_rows, triton.cdiv(size, _AT_ONCE)](x_T2F, out_TF, size, WIDTH=_AT_ONCE, num_warps=4)
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
def look_up_kernel(
    words,
    sources,
    positions,
    weight,
    table,
    rows,
    angles,
    size,
    channels,
    sines_of_table,
    sines_of_angles,
    HAS_TABLE: tl.constexpr,
    WIDTH: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """One program for WIDTH numbers of a token's row; the first of a token copies its rows of the table, too."""
    token, part = tl.program_id(0), tl.program_id(1)
    number = tl.load(words + tl.load(sources + token)).to(tl.int64)
    column = part * WIDTH + tl.arange(0, WIDTH)
    is_there = column < size
    row = tl.load(weight + number * size + column, mask=is_there)
    tl.store(rows + token.to(tl.int64) * size + column, row, mask=is_there)
    if HAS_TABLE:  # noqa: SIM102 - known when it is compiled, the other is not
        if part == 0:
            channel = tl.arange(0, TABLE_WIDTH)
            is_channel = channel < channels
            place = tl.load(positions + token).to(tl.int64) * channels + channel
            to = token.to(tl.int64) * channels + channel
            cosine = tl.load(table + place, mask=is_channel)
            sine = tl.load(table + sines_of_table + place, mask=is_channel)
            tl.store(angles + to, cosine.to(angles.dtype.element_ty), mask=is_channel)
            tl.store(angles + sines_of_angles + to, sine.to(angles.dtype.element_ty), mask=is_channel)


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
