"""Layers with experts, as segments: router and preprocess, experts, postprocess.

Shapes: B batch, S sequence, H hidden, T = B * S tokens, K experts of a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.config.switches import CudaGraphModule
from graphstep.models.attention import Attention
from graphstep.models.auxiliary_losses import GradientScale
from graphstep.models.moe.block import MoEBlock
from graphstep.models.moe.permutation import RowOrder
from graphstep.models.norms import build_norm
from graphstep.models.segments import Segment, SegmentedModule

_ROUTER = CudaGraphModule.moe_router.value
_PREPROCESS = CudaGraphModule.moe_preprocess.value
_MOE = CudaGraphModule.moe.value


class MoELayer(SegmentedModule):
    """x + dropout(moe(norm(x))), in four segments, all part of ``moe``.

    =============  =================  ====================================================================
    segment        kind               carries on
    =============  =================  ====================================================================
    router         ``moe_router``     hidden, [shared], normalised x, weights and experts of the choices
    preprocess     ``moe_preprocess`` hidden, [shared], rows for the experts, weights, :data:`~.dispatcher.Plan`
    experts        ``moe``            hidden, [shared], rows that the experts made, weights, plan
    postprocess    ``moe_router``     hidden
    =============  =================  ====================================================================

    ``shared`` is what the shared experts gave. Where tokens are exchanged between ranks, or the shared experts run
    beside the others, dispatching and combining belong to ``experts``, which then is given the router's results and the
    plan, and carries on hidden, [shared] and the sum over the experts of each token. Parameters are allocated, not
    filled: `graphstep.models.initialize_weights` fills them.

    Args:
        config: sizes and activation.
        moe: experts, router, dispatcher.
        scale: that of the model, which registers it.
        group: the expert ranks; None: this one alone.
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
        self.hidden_dropout = config.hidden_dropout
        self.moe_norm = build_norm(config, device=device, dtype=dtype)
        self.moe = MoEBlock(config, moe, scale, group=group, device=device, dtype=dtype)
        # Held, not registered, as in the router.
        self.__dict__["scale"] = scale

    def segments(self) -> tuple[Segment, ...]:
        """Give the four segments; see the class."""
        block, scale = self.moe, self.__dict__["scale"]
        shared = () if block.shared_experts is None else (block.shared_experts,)
        beside, before = (shared, ()) if block.overlaps else ((), shared)
        return (
            Segment(_ROUTER, "router", self._route, (self.moe_norm, block.router, *before, scale), part_of=_MOE),
            Segment(_PREPROCESS, "preprocess", self._preprocess, (), part_of=_MOE),
            Segment(_MOE, "experts", self._compute, (block.experts, *beside)),
            Segment(_ROUTER, "postprocess", self._postprocess, (), part_of=_MOE),
        )

    def _route(self, hidden_BSH: Tensor, *_context: Tensor) -> tuple[Tensor, ...]:
        x_BSH = self.moe_norm(hidden_BSH)
        routed = self.moe.router(x_BSH)
        shared = self.moe.shared_experts
        # After the router, so that gradients of x are added up in the same order as where the shared experts overlap.
        kept = (hidden_BSH,) if shared is None or self.moe.overlaps else (hidden_BSH, shared(x_BSH))
        return (*kept, x_BSH, *routed)

    def _preprocess(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        kept, (x_BSH, probs_TK, experts_TK) = self._split(tensors, 3)
        plan = self.moe.preprocess(probs_TK, experts_TK)
        if not self.moe.moves_rows_alone:
            return (*kept, x_BSH, probs_TK, experts_TK, *plan)
        return (*kept, self.moe.dispatch(x_BSH, probs_TK, experts_TK, plan).x, probs_TK, *plan)

    def _compute(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        num_planned = self.moe.dispatcher.num_planned
        if self.moe.moves_rows_alone:
            kept, (x_NH, probs_TK, *plan) = self._split(tensors, 2 + num_planned)
            return (*kept, self.moe.experts(x_NH, RowOrder(*plan).ends), probs_TK, *plan)
        kept, (x_BSH, probs_TK, experts_TK, *plan) = self._split(tensors, 3 + num_planned)
        if self.moe.overlaps:
            y_BSH, shared_BSH = self.moe.compute_beside_shared(x_BSH, probs_TK, experts_TK, tuple(plan))
            return (*kept, shared_BSH, y_BSH)
        return (*kept, self.moe.compute(x_BSH, probs_TK, experts_TK, tuple(plan)))

    def _postprocess(self, hidden_BSH: Tensor, *tensors: Tensor) -> Tensor:
        rest = list(tensors)
        shared_BSH = None if self.moe.shared_experts is None else rest.pop(0)
        if self.moe.moves_rows_alone:
            y_NH, probs_TK = rest[:2]
            plan = rest[2 : 2 + self.moe.dispatcher.num_planned]
            y_BSH = self.moe.combine(y_NH, probs_TK, tuple(plan)).view_as(hidden_BSH)
        else:
            y_BSH = rest[0]
        return self._add(hidden_BSH, y_BSH if shared_BSH is None else y_BSH + shared_BSH)

    def _split(self, tensors: tuple[Tensor, ...], num_wanted: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What only the postprocess needs, and the tensors after it without the context at the end."""
        num_kept = 1 + (self.moe.shared_experts is not None and not self.moe.overlaps)
        return tensors[:num_kept], tensors[num_kept : num_kept + num_wanted]

    def _add(self, hidden_BSH: Tensor, update_BSH: Tensor) -> Tensor:
        if self.training and self.hidden_dropout > 0.0:
            update_BSH = functional.dropout(update_BSH, self.hidden_dropout)
        return hidden_BSH + update_BSH


class MoETransformerLayer(MoELayer):
    """x = x + dropout(attention(norm(x))), then the four segments of :class:`MoELayer`. Arguments are the same."""

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
        super().__init__(config, moe, scale, group=group, device=device, dtype=dtype)
        self.attention_norm = build_norm(config, device=device, dtype=dtype)
        self.attention = Attention(config, device=device, dtype=dtype)

    def segments(self) -> tuple[Segment, ...]:
        """Give the attention segment (kind ``attn``), then those of :class:`MoELayer`."""
        attend = Segment(CudaGraphModule.attn.value, "attention", self._attend, (self.attention_norm, self.attention))
        return (attend, *super().segments())

    def _attend(self, hidden_BSH: Tensor, *context: Tensor) -> Tensor:
        return self._add(hidden_BSH, self.attention(self.attention_norm(hidden_BSH), *context))
