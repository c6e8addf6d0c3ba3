"""The MoE block: router, dispatcher, experts and shared experts, without norm and residual connection.

Shapes: B batch, S sequence, T = B * S tokens, H hidden, K experts of a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.models.auxiliary_losses import GradientScale
from graphstep.models.moe.dispatcher import Dispatched, Plan, build_dispatcher
from graphstep.models.moe.experts import build_experts
from graphstep.models.moe.permutation import RowOrder
from graphstep.models.moe.router import TopKRouter
from graphstep.models.moe.shared_experts import SharedExperts


class MoEBlock(nn.Module):
    """The sum over the chosen experts of weight times ``expert(x)``, plus the shared experts.

    Its steps are methods, because a layer makes a segment of each.

    Args:
        config: sizes and activation.
        moe: experts, router, dispatcher.
        scale: that of the model, for the losses of the router.
        group: the expert ranks, each of which has its share of the experts; None: this one alone.
        device: where the parameters live.
        dtype: of the parameters.

    Raises:
        ConfigError: there are no experts, or options that do not fit each other.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        scale: GradientScale,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.router = TopKRouter(config, moe, scale, device=device, dtype=dtype)
        self.dispatcher = build_dispatcher(moe, self.router.num_experts, group)
        self.experts = build_experts(
            config,
            moe,
            self.dispatcher.num_local_experts,
            rank=self.dispatcher.rank,
            num_ranks=self.dispatcher.num_ranks,
            device=device,
            dtype=dtype,
        )
        self.shared_experts: SharedExperts | None = None
        if moe.moe_shared_expert_intermediate_size is not None:
            inner = moe.moe_shared_expert_intermediate_size
            self.shared_experts = SharedExperts(config, moe, inner, device=device, dtype=dtype)
        self.overlaps = moe.moe_shared_expert_overlap and self.shared_experts is not None

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Transform normalised hidden states to the update of the residual stream, before its dropout."""
        probs_TK, experts_TK = self.router(x_BSH)
        plan = self.preprocess(probs_TK, experts_TK)
        if self.overlaps:
            y_BSH, shared_BSH = self.compute_beside_shared(x_BSH, probs_TK, experts_TK, plan)
            return y_BSH + shared_BSH
        y_BSH = self.compute(x_BSH, probs_TK, experts_TK, plan)
        return y_BSH if self.shared_experts is None else y_BSH + self.shared_experts(x_BSH)

    def preprocess(self, probs_TK: Tensor, experts_TK: Tensor) -> Plan:
        """Work out what the dispatcher needs; see :meth:`graphstep.models.moe.dispatcher.Dispatcher.preprocess`."""
        return self.dispatcher.preprocess(probs_TK, experts_TK)

    @property
    def moves_rows_alone(self) -> bool:
        """True where rows only change their order on this device, and nothing runs beside it: graphs can hold it."""
        return self.dispatcher.num_ranks == 1 and not self.overlaps

    def dispatch(self, x_BSH: Tensor, probs_TK: Tensor, experts_TK: Tensor, plan: Plan) -> Dispatched:
        """Bring the tokens to the experts of this rank."""
        return self.dispatcher.dispatch(x_BSH.flatten(0, -2), probs_TK, experts_TK, plan)

    def combine(self, y_NH: Tensor, probs_TK: Tensor, plan: Plan) -> Tensor:
        """Add up what the experts made of the rows of each token, weighted: [T, H]. On one rank only."""
        order = RowOrder(*plan)
        return self.dispatcher.combine(y_NH, Dispatched(y_NH, order.ends, order, probs_TK))

    def compute(self, x_BSH: Tensor, probs_TK: Tensor, experts_TK: Tensor, plan: Plan) -> Tensor:
        """Dispatch, run the experts, and combine: the weighted sum over the chosen experts, [B, S, H]."""
        sent = self.dispatch(x_BSH, probs_TK, experts_TK, plan)
        return self.dispatcher.combine(self.experts(sent.x, sent.ends), sent).view_as(x_BSH)

    def compute_beside_shared(
        self, x_BSH: Tensor, probs_TK: Tensor, experts_TK: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """The same, with the shared experts beside it: on a GPU on a stream of their own, joined at the end."""
        if self.shared_experts is None:
            raise TypeError(f"this {type(self).__name__} has no shared experts")
        if not x_BSH.is_cuda:
            return self.compute(x_BSH, probs_TK, experts_TK, plan), self.shared_experts(x_BSH)
        current, side = torch.cuda.current_stream(x_BSH.device), torch.cuda.Stream(x_BSH.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            shared_BSH: Tensor = self.shared_experts(x_BSH)
        y_BSH = self.compute(x_BSH, probs_TK, experts_TK, plan)
        current.wait_stream(side)
        # Memory of the side stream that is read on this one; what the allocator knows of is the side stream only.
        shared_BSH.record_stream(current)
        return y_BSH, shared_BSH
