"""Attention over keys and values in blocks.

Shapes: T tokens, R requests, N query heads, G query groups (key and value heads), C query heads of a group, D channels
of a head, W blocks of the longest sequence, L = W * block_size keys.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Final, Protocol

import torch
from torch import Tensor

from graphstep.inference.metadata import StepTensors
from graphstep.models import apply_rotary

_DTYPES_OF_KERNELS: Final = (torch.float32, torch.float16, torch.bfloat16)
_MOST_KEYS_AT_ONCE: Final = 2**22
"""Numbers of keys that are gathered at a time, one query's after the other: bounds the memory of long steps."""


class AttentionKernels(Protocol):
    """Writes new keys and values, and attends to all that a request has. Reads nothing back: graphs hold it."""

    def rotate_and_write(
        self, qkv_TND: Tensor, rotary: tuple[Tensor, ...], num_rotary: int, pages: Tensor, slots_T: Tensor
    ) -> Tensor:
        """Rotate queries and keys, and put the keys and values of a step into a layer's pages.

        Args:
            qkv_TND: all query heads, then all key heads, then all value heads.
            rotary: cosines and sines [T, D], 1 and 0 for channels that do not rotate.
            num_rotary: channels that rotate; 0: none, and ``rotary`` is not looked at.
            pages: [2, blocks, block_size, G, D], contiguous.
            slots_T: places in them, block * block_size + place in the block. Those of padding may be equal.

        Returns:
            The queries [T, N, D].
        """

    def attend(self, q_TND: Tensor, pages: Tensor, tensors: StepTensors, num_blocks: int | None) -> Tensor:
        """Attend from each token to the keys of its request up to itself.

        Args:
            q_TND: queries; T and the rest of the shapes are those of the bucket.
            pages: of the layer, the step's own keys and values included.
            tensors: of the step.
            num_blocks: blocks of the longest sequence in the step where the host may use that, as outside of graphs.

        Returns:
            [T, N, D], contiguous. Rows of padding mean nothing, and are finite if the queries are.
        """


class TorchAttention:
    """By PyTorch's own operations, on every device: static shapes, masked by position.

    In graphs all blocks are read that the longest sequence could have. What is masked may be anything, NaN included.

    Args:
        is_batch_invariant: always read so many, one query after the other, so that sums do not depend on the other
            requests of a step. Slow.
    """

    def __init__(self, *, is_batch_invariant: bool = False) -> None:
        self._is_batch_invariant = is_batch_invariant

    def rotate_and_write(
        self, qkv_TND: Tensor, rotary: tuple[Tensor, ...], num_rotary: int, pages: Tensor, slots_T: Tensor
    ) -> Tensor:
        """See :class:`AttentionKernels`."""
        groups = pages.shape[3]
        qk_TND, v_TGD = qkv_TND.split_with_sizes((qkv_TND.shape[1] - groups, groups), dim=1)
        if num_rotary:
            qk_TND = apply_rotary(qk_TND[None], *rotary, channels=num_rotary)[0]
        q_TND, k_TGD = qk_TND.split_with_sizes((qk_TND.shape[1] - groups, groups), dim=1)
        for of_pages, rows in zip(pages.flatten(1, 2).unbind(), (k_TGD, v_TGD), strict=True):
            of_pages.index_copy_(0, slots_T, rows)
        return q_TND

    def attend(self, q_TND: Tensor, pages: Tensor, tensors: StepTensors, num_blocks: int | None) -> Tensor:
        """See :class:`AttentionKernels`."""
        reads_all = num_blocks is None or self._is_batch_invariant
        tables_RW = tensors.block_tables if reads_all else tensors.block_tables[:, : max(1, num_blocks or 1)]
        num_keys = tables_RW.shape[1] * pages.shape[2]
        most = max(1, _MOST_KEYS_AT_ONCE // (num_keys * pages.shape[3] * pages.shape[4]))
        if self._is_batch_invariant:
            most = 1  # Libraries choose how to multiply by the size of the batch.
        parts = []
        for begin in range(0, q_TND.shape[0], most):
            rows = slice(begin, begin + most)
            tables_TW = tables_RW.index_select(0, tensors.token_requests[rows])
            parts.append(attend_to_blocks(q_TND[rows], pages, tables_TW, tensors.positions[rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_to_blocks(q_TND: Tensor, pages: Tensor, tables_TW: Tensor, positions_T: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V over the keys at positions up to the token's own: the formula that kernels follow.

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Kwon et al. 2023, "Efficient Memory Management
    for Large Language Model Serving with PagedAttention", equation 4.
    """
    num_tokens, _, channels = q_TND.shape
    size, groups = pages.shape[2:4]
    blocks = tables_TW.flatten()
    k_TLGD, v_TLGD = (pages[which].index_select(0, blocks).view(num_tokens, -1, groups, channels) for which in range(2))
    num_keys = tables_TW.shape[1] * size
    visible_TL = torch.arange(num_keys, device=q_TND.device) <= positions_T[:, None]
    q_TGCD = q_TND.unflatten(1, (groups, -1)) * (1.0 / math.sqrt(channels))
    scores_TGCL = torch.matmul(q_TGCD, k_TLGD.permute(0, 2, 3, 1))
    scores_TGCL = scores_TGCL.masked_fill(~visible_TL[:, None, None], -torch.inf)
    weights_TGCL = torch.softmax(scores_TGCL, dim=-1, dtype=torch.promote_types(q_TND.dtype, torch.float32))
    # Weights of zero do not hide what is not a number.
    v_TLGD = v_TLGD.masked_fill(~visible_TL[..., None, None], 0.0)
    y_TGCD = torch.matmul(weights_TGCL.to(q_TND.dtype), v_TLGD.transpose(1, 2))
    return y_TGCD.flatten(1, 2)


def attention_for(device: torch.device, dtype: torch.dtype, *, is_batch_invariant: bool = False) -> AttentionKernels:
    """The fastest there is: Triton kernels on a GPU where Triton is installed, otherwise PyTorch's operations.

    Args:
        device: of the cache.
        dtype: of the cache.
        is_batch_invariant: a token's result does not depend on the other requests of its step, in no bit.
    """
    has_kernels = device.type == "cuda" and dtype in _DTYPES_OF_KERNELS
    if has_kernels and importlib.util.find_spec("triton") is not None:
        triton_attention = importlib.import_module("graphstep.inference.triton_attention")
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        kernels: AttentionKernels = triton_attention.TritonAttention(
            num_processors, is_batch_invariant=is_batch_invariant
        )
        return kernels
    return TorchAttention(is_batch_invariant=is_batch_invariant)
