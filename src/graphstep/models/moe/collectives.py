"""Exchanges of rows between expert ranks, with gradients. Shapes: W ranks, N rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def num_ranks(group: dist.ProcessGroup | None) -> int:
    """Ranks of a group; one without a group."""
    return 1 if group is None else group.size()


def exchange(
    rows_NX: Tensor,
    group: dist.ProcessGroup,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Tensor:
    """Send rows to all ranks and return what they sent, by rank.

    Args:
        rows_NX: by the rank that they go to.
        group: the expert ranks.
        sent: rows for each rank; None: the same number for all.
        received: rows from each rank, likewise.
    """
    function: Callable[..., Tensor] = _Exchange.apply
    return function(rows_NX, group, sent, received)


def gather_rows(rows_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, [W * N, ...]; the gradient is the sum over ranks of those of this rank's rows."""
    function: Callable[..., Tensor] = _GatherRows.apply
    return function(rows_NX, group)


def sum_rows(rows_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up the rows of all ranks and return this rank's share of the sum, [N / W, ...]."""
    function: Callable[..., Tensor] = _SumRows.apply
    return function(rows_NX, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_NX: Tensor,
        group: dist.ProcessGroup,
        sent: Sequence[int] | None,
        received: Sequence[int] | None,
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(rows_NX, group, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad_outputs[0], ctx.group, ctx.received, ctx.sent), None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(rows_NX, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return _reduce_scatter(grad_outputs[0], ctx.group), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(rows_NX, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return _all_gather(grad_outputs[0], ctx.group), None


def _all_to_all(
    rows_NX: Tensor, group: dist.ProcessGroup, sent: Sequence[int] | None, received: Sequence[int] | None
) -> Tensor:
    num_rows = rows_NX.shape[0] if received is None else sum(received)
    output = rows_NX.new_empty(num_rows, *rows_NX.shape[1:])
    dist.all_to_all_single(
        output,
        rows_NX.contiguous(),
        None if received is None else list(received),
        None if sent is None else list(sent),
        group=group,
    )
    return output


def _all_gather(rows_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
    output = rows_NX.new_empty(rows_NX.shape[0] * group.size(), *rows_NX.shape[1:])
    dist.all_gather_into_tensor(output, rows_NX.contiguous(), group=group)
    return output


def _reduce_scatter(rows_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
    output = rows_NX.new_empty(rows_NX.shape[0] // group.size(), *rows_NX.shape[1:])
    dist.reduce_scatter_tensor(output, rows_NX.contiguous(), group=group)
    return output
