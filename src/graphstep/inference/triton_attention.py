"""Attention over blocks by Triton kernels: how many programs of which size. Nothing here depends on a step's contents.

Shapes: T tokens, R requests, N query heads, G query groups, D channels of a head.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.inference.metadata import StepTensors
from graphstep.inference.triton_kernels import (
    decode_kernel,
    join_parts_kernel,
    mixed_kernel,
    rotate_and_write_kernel,
)

_KEYS: Final = 32
"""Keys of a tile."""
_ROWS_OF_QUERIES: Final = 64
"""Queries of a tile times the query heads of a key head."""
_ROWS_TO_WRITE: Final = 8
_MOST_PARTS: Final = 32
_PROGRAMS_EACH_PROCESSOR: Final = 2
_LEAST_DOT: Final = 16
"""Rows and columns that matrix units want at least."""


class TritonAttention:
    """See :class:`graphstep.inference.attention.AttentionKernels`.

    Args:
        num_processors: of the GPU, which short batches should fill.
        is_batch_invariant: take the same sums in the same order in every step, by one kernel, without parts.
    """

    def __init__(self, num_processors: int, *, is_batch_invariant: bool = False) -> None:
        self._is_batch_invariant = is_batch_invariant
        self._num_programs = _PROGRAMS_EACH_PROCESSOR * num_processors

    def rotate_and_write(
        self,
        qkv_TND: Tensor,
        rotary: tuple[Tensor, ...],
        num_rotary: int,
        pages: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        """One kernel. ``qkv_TND`` has to be contiguous."""
        num_tokens, num_rows, channels = qkv_TND.shape
        groups = pages.shape[3]
        heads = num_rows - 2 * groups
        qkv_TND = qkv_TND.contiguous()
        q_TND = qkv_TND.new_empty(num_tokens, heads, channels)
        cos_TD, sin_TD = rotary if num_rotary else (qkv_TND, qkv_TND)
        rotate_and_write_kernel[num_tokens, _ceil_div(num_rows, _ROWS_TO_WRITE)](
            qkv_TND,
            cos_TD,
            sin_TD,
            slots_T,
            q_TND,
            pages,
            qkv_TND.stride(0),
            cos_TD.stride(0),
            pages.stride(2),
            pages.stride(0),
            HEADS=heads,
            GROUPS=groups,
            CHANNELS=channels,
            HALF=num_rotary // 2,
            WIDTH=_power_of_two(channels),
            ROWS=_ROWS_TO_WRITE,
            num_warps=4,
        )
        return q_TND

    def attend(self, q_TND: Tensor, pages: Tensor, tensors: StepTensors, num_blocks: int | None) -> Tensor:
        """Decode steps: parts of the context side by side, then joined. Other steps: tiles of queries."""
        del num_blocks  # contexts are read on the device
        if tensors.bucket.is_decode_only and not self._is_batch_invariant:
            return self._decode(q_TND, pages, tensors)
        return self._mixed(q_TND, pages, tensors)

    def num_parts(self, num_requests: int, num_groups: int, most_keys: int) -> int:
        """In how many parts each context is split: enough programs for the GPU, for the longest context there can be.

        It follows from the bucket and the limits alone, so that what a graph was captured with fits every step.
        """
        wanted = min(self._num_programs // (num_requests * num_groups), _ceil_div(most_keys, _KEYS), _MOST_PARTS)
        return 1 << max(0, wanted.bit_length() - 1)

    def _decode(self, q_TND: Tensor, pages: Tensor, tensors: StepTensors) -> Tensor:
        num_tokens, heads, channels = q_TND.shape
        num_requests, groups = tensors.bucket.requests, pages.shape[3]
        parts = self.num_parts(num_requests, groups, tensors.block_tables.shape[1] * pages.shape[2])
        # Tokens that only round up the number have no request, and no program.
        out = torch.empty_like(q_TND) if num_tokens == num_requests else torch.zeros_like(q_TND)
        partial = weights = out
        if parts > 1:
            partial = q_TND.new_empty(num_requests, heads, parts, channels, dtype=torch.float32)
            weights = q_TND.new_empty(num_requests, heads, parts, dtype=torch.float32)
        repeats = heads // groups
        decode_kernel[num_requests, groups, parts](
            q_TND,
            pages,
            tensors.block_tables,
            tensors.context_lengths,
            partial,
            weights,
            out,
            *_strides(pages, tensors, channels),
            HEADS=heads,
            REPEATS=repeats,
            **_sizes(pages),
            ROWS=_power_of_two(repeats),
            SPLITS=parts,
            num_warps=_num_warps(channels),
        )
        if parts > 1:
            join_parts_kernel[(num_requests * heads,)](
                partial, weights, out, CHANNELS=channels, WIDTH=_power_of_two(channels), SPLITS=parts, num_warps=1
            )
        return out

    def _mixed(self, q_TND: Tensor, pages: Tensor, tensors: StepTensors) -> Tensor:
        num_tokens, heads, channels = q_TND.shape
        num_requests, groups = tensors.bucket.requests, pages.shape[3]
        repeats_padded = 1 << (heads // groups - 1).bit_length()
        queries = max(1, _ROWS_OF_QUERIES // repeats_padded)
        # Rows of padding have no request, and no program.
        out = torch.zeros_like(q_TND)
        mixed_kernel[num_tokens // queries + num_requests, groups](
            q_TND,
            pages,
            tensors.block_tables,
            tensors.query_starts,
            tensors.context_lengths,
            out,
            num_requests,
            num_requests.bit_length(),
            *_strides(pages, tensors, channels),
            HEADS=heads,
            REPEATS=heads // groups,
            REPEATS_PADDED=repeats_padded,
            **_sizes(pages),
            QUERIES=queries,
            num_warps=4,
        )
        return out


def _strides(pages: Tensor, tensors: StepTensors, channels: int) -> tuple[int | float, ...]:
    scale = math.log2(math.e) / math.sqrt(channels)
    return tensors.block_tables.stride(0), pages.stride(1), pages.stride(2), pages.stride(0), scale


def _sizes(pages: Tensor) -> dict[str, Any]:
    channels = pages.shape[4]
    return {"PAGE": pages.shape[2], "CHANNELS": channels, "WIDTH": _power_of_two(channels), "KEYS": _KEYS}


def _num_warps(channels: int) -> int:
    return 4 if channels > 64 else 2


def _power_of_two(number: int) -> int:
    return max(_LEAST_DOT, 1 << (number - 1).bit_length())


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
