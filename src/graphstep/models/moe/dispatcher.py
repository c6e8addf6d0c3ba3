"""Token dispatchers: bring each token to its experts, and what they made of it back.

Shapes: W expert ranks, T tokens of this rank, K experts of a token, E experts of all ranks, L = E / W of this one, N
rows for the experts of this rank, H hidden. One rank exchanges nothing and reads nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from graphstep.config.moe import MoEConfig
from graphstep.errors import ConfigError, Problem
from graphstep.models.moe.collectives import exchange, gather_rows, num_ranks, sum_rows
from graphstep.models.moe.permutation import (
    RowOrder,
    combine,
    expert_capacity,
    permute,
    row_order,
    row_order_by_capacity,
    row_order_padded,
)

Plan = tuple[Tensor, ...]
"""What :meth:`Dispatcher.preprocess` worked out, as tensors only, so that it can be the output of a graph."""


class Dispatched(NamedTuple):
    """Rows for the experts of this rank."""

    x: Tensor
    """[N, H]: sorted by expert; padded to the same number an expert where the options say so."""
    ends: Tensor
    """int32 [L]: the row behind the last one of each expert."""
    order: RowOrder
    """Where the rows come from."""
    probs: Tensor
    """Weights of the choices that ``order`` is about."""
    sent: Sequence[int] | None = None
    """Rows that went to each rank; None: the same number."""
    received: Sequence[int] | None = None
    """Rows that came from each rank."""
    regrouped: RowOrder | None = None
    """How rows that came from several ranks were sorted by expert."""


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """Common part: the order of rows on one rank, with drops and padding."""

    moe: MoEConfig
    num_experts: int
    """E."""
    group: dist.ProcessGroup | None = None
    """The expert ranks; None: this one alone."""

    def __post_init__(self) -> None:
        if self.num_experts % self.num_ranks:
            raise ConfigError(
                Problem(
                    code="moe-experts-per-rank",
                    what=f"{self.num_experts} experts cannot be spread evenly over {self.num_ranks} ranks",
                    where="--num-experts, --expert-model-parallel-size",
                    fix="make the number of experts a multiple of the number of ranks",
                )
            )

    @property
    def num_ranks(self) -> int:
        """W."""
        return num_ranks(self.group)

    @property
    def rank(self) -> int:
        """This one of the expert ranks; it has the experts from ``rank * num_local_experts`` on."""
        return 0 if self.group is None or self.num_ranks == 1 else self.group.rank()

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks

    @property
    def num_planned(self) -> int:
        """Tensors of a plan."""
        return len(RowOrder._fields) - (0 if self.moe.moe_expert_capacity_factor is not None else 2)

    def preprocess(self, probs_TK: Tensor, experts_TK: Tensor) -> Plan:
        """Work out where each choice goes; no communication, nothing read back.

        Returns:
            The fields of a :class:`RowOrder` over all E experts, without those that are None. Their number follows
            from the options, their shapes from those of the arguments.
        """
        return tuple(tensor for tensor in self._order(probs_TK, experts_TK) if tensor is not None)

    def dispatch(self, x_TH: Tensor, probs_TK: Tensor, experts_TK: Tensor, plan: Plan) -> Dispatched:
        """Bring the tokens to the experts of this rank."""
        raise NotImplementedError(f"{type(self).__name__} has to dispatch")

    def combine(self, y_NH: Tensor, sent: Dispatched) -> Tensor:
        """Bring the experts' results back and add them up, weighted: [T, H]."""
        raise NotImplementedError(f"{type(self).__name__} has to combine")

    def _order(self, probs_TK: Tensor, experts_TK: Tensor) -> RowOrder:
        factor = self.moe.moe_expert_capacity_factor
        if factor is None:
            return row_order(experts_TK, self.num_experts)
        num_tokens, top_k = experts_TK.shape
        capacity = expert_capacity(num_tokens, self.num_experts, top_k, factor)
        make = row_order_padded if self.moe.pads_experts else row_order_by_capacity
        return make(experts_TK, probs_TK, self.num_experts, capacity, self.moe.moe_token_drop_policy)


class AllGatherDispatcher(Dispatcher):
    """Every rank gets all tokens and picks those of its experts; sums go back. Static shapes on any number of ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moe.pads_experts and self.num_ranks > 1:
            raise ConfigError(
                Problem(
                    code="moe-allgather-padding",
                    what="the allgather dispatcher does not pad experts to their capacity on several expert ranks",
                    where="--moe-token-dispatcher-type, --moe-pad-expert-input-to-capacity",
                    fix="use --moe-token-dispatcher-type alltoall",
                )
            )

    def dispatch(self, x_TH: Tensor, probs_TK: Tensor, experts_TK: Tensor, plan: Plan) -> Dispatched:
        """See :class:`Dispatcher`; on several ranks N is W * T * K."""
        order = RowOrder(*plan)
        if self.group is None or self.num_ranks == 1:
            return Dispatched(permute(x_TH, order), order.ends, order, probs_TK)
        if order.kept is not None:
            experts_TK = experts_TK.masked_fill(~order.kept, self.num_experts)
        x, probs, experts = (gather_rows(rows, self.group) for rows in (x_TH, probs_TK, experts_TK))
        local = experts - self.rank * self.num_local_experts
        is_local = (local >= 0) & (local < self.num_local_experts) & (experts < self.num_experts)
        order = row_order(local.masked_fill(~is_local, self.num_local_experts), self.num_local_experts)
        order = order._replace(kept=is_local, filled=is_local.flatten()[order.choices])
        return Dispatched(permute(x, order), order.ends, order, probs)

    def combine(self, y_NH: Tensor, sent: Dispatched) -> Tensor:
        """See :class:`Dispatcher`."""
        y = combine(y_NH, sent.probs, sent.order)
        return y if self.group is None or self.num_ranks == 1 else sum_rows(y, self.group)


class AllToAllDispatcher(Dispatcher):
    """Each token goes to the ranks of its experts only. On several ranks the counts are read on the host, once a call,
    unless experts are padded to a capacity, which makes all exchanges equal.
    """

    def dispatch(self, x_TH: Tensor, probs_TK: Tensor, experts_TK: Tensor, plan: Plan) -> Dispatched:
        """See :class:`Dispatcher`."""
        order = RowOrder(*plan)
        x_NH = permute(x_TH, order)
        if self.group is None or self.num_ranks == 1:
            return Dispatched(x_NH, order.ends, order, probs_TK)
        shape = (self.num_ranks, self.num_local_experts)
        if self.moe.pads_experts:
            x_WLCH = exchange(x_NH, self.group).unflatten(0, (*shape, -1))
            x_NH = x_WLCH.transpose(0, 1).flatten(0, 2)
            num_rows = x_NH.shape[0] // self.num_local_experts
            ends_L = torch.arange(1, self.num_local_experts + 1, device=x_NH.device, dtype=torch.int32) * num_rows
            return Dispatched(x_NH, ends_L, order, probs_TK)
        counts_E = torch.diff(order.ends, prepend=torch.zeros_like(order.ends[:1]))
        incoming_E = exchange(counts_E, self.group)
        totals: list[list[int]] = torch.stack([counts_E, incoming_E]).view(2, *shape).sum(2).tolist()
        sent, received = totals
        x_NH = exchange(x_NH[: sum(sent)], self.group, sent, received)
        ids_E = torch.arange(self.num_local_experts, device=x_NH.device).repeat(self.num_ranks)
        experts_N = torch.repeat_interleave(ids_E, incoming_E, output_size=sum(received))
        regrouped = row_order(experts_N[:, None], self.num_local_experts)
        return Dispatched(
            permute(x_NH, regrouped),
            regrouped.ends,
            order,
            probs_TK,
            sent=sent,
            received=received,
            regrouped=regrouped,
        )

    def combine(self, y_NH: Tensor, sent: Dispatched) -> Tensor:
        """See :class:`Dispatcher`."""
        if self.group is not None and self.num_ranks > 1:
            if sent.regrouped is None:
                y_LWCH = y_NH.unflatten(0, (self.num_local_experts, self.num_ranks, -1))
                y_NH = exchange(y_LWCH.transpose(0, 1).flatten(0, 2), self.group)
            else:
                y_NH = y_NH[sent.regrouped.rows.squeeze(1)]
                y_NH = exchange(y_NH, self.group, sent.received, sent.sent)
                missing = sent.order.choices.shape[0] - y_NH.shape[0]
                y_NH = torch.cat([y_NH, y_NH.new_zeros(missing, y_NH.shape[1])]) if missing else y_NH
        return combine(y_NH, sent.probs, sent.order)


def build_dispatcher(moe: MoEConfig, num_experts: int, group: dist.ProcessGroup | None = None) -> Dispatcher:
    """The dispatcher that ``moe_token_dispatcher_type`` names.

    Raises:
        ConfigError: it is ``flex``, whose libraries are not used here, or does not fit the group.
    """
    if moe.moe_token_dispatcher_type == "flex":
        raise ConfigError(
            Problem(
                code="moe-flex-dispatcher",
                what="the flex dispatcher needs communication libraries that are not used here",
                where="--moe-token-dispatcher-type",
                fix="use alltoall or allgather",
            )
        )
    kind = AllToAllDispatcher if moe.moe_token_dispatcher_type == "alltoall" else AllGatherDispatcher
    return kind(moe=moe, num_experts=num_experts, group=group)
