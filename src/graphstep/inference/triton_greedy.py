"""The most likely token of each row by two Triton kernels: the best of each part of a row, then the best of those.

Imported only where there is a GPU, as `graphstep.inference.triton_kernels` is.

Shapes: R requests, V vocabulary, P parts of a row.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphstep.inference.requests import NOT_FINITE

_PART: Final = 2048


def take_most_likely(logits_RV: Tensor, drawn_R: Tensor) -> Tensor:
    """Return tokens [R, 1] for the host, int32, and write those for the next step; as `draws.draw` does without needs.

    Args:
        logits_RV: any floating type; the rows may lie apart.
        drawn_R: int32, contiguous. Gets 0 where there is no token.
    """
    num_rows, size = logits_RV.shape
    num_parts = triton.cdiv(size, _PART)
    best_RP = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits_RV.device)
    places_RP = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits_RV.device)
    tokens_R1 = torch.empty(num_rows, 1, dtype=torch.int32, device=logits_RV.device)
    best_of_parts_kernel[num_rows, num_parts](
        logits_RV, best_RP, places_RP, size, logits_RV.stride(0), WIDTH=_PART, num_warps=4
    )
    best_of_rows_kernel[(num_rows,)](
        best_RP,
        places_RP,
        tokens_R1,
        drawn_R,
        num_parts,
        NONE=NOT_FINITE,
        WIDTH=max(16, triton.next_power_of_2(num_parts)),
        num_warps=1,
    )
    return tokens_R1


@triton.jit
def best_of_parts_kernel(logits, best, places, size, row_stride, WIDTH: tl.constexpr):
    """One program a part. NaN counts as infinite: neither leaves a token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(logits + row * row_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)  # noqa: PLR0124
    value, place = tl.max(x, 0, return_indices=True)
    offset = row * tl.num_programs(1) + part
    tl.store(best + offset, value)
    tl.store(places + offset, part * WIDTH + place)


@triton.jit
def best_of_rows_kernel(best, places, tokens, drawn, num_parts, NONE: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row. Of equal ones the first is taken, in both kernels."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    x = tl.load(best + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    value, winner = tl.max(x, 0, return_indices=True)
    token = tl.load(places + row * num_parts + winner)
    is_finite = (value < float("inf")) & (value > float("-inf"))
    tl.store(tokens + row, tl.where(is_finite, token, NONE))
    tl.store(drawn + row, tl.where(is_finite, token, 0))
