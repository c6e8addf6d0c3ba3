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
    router         ``moe_router``     hidden, normalised x, weights and experts of the choices, [shared]
    preprocess     ``moe_preprocess`` the same, then what the dispatcher needs, :data:`~.dispatcher.Plan`
    experts        ``moe``            hidden, what the experts gave, [shared]
    postprocess    ``moe_router``     hidden
    =============  =================  ====================================================================

    ``shared`` is what the shared experts gave: computed in the router's segment, or in that of the experts when it
    overlaps. Parameters are allocated, not filled: `graphstep.models.initialize_weights` fills them.

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

    @property
    def _num_carried(self) -> int:
        """Tensors that the router's segment carries on; everything after them is context."""
        return 4 + (self.moe.shared_experts is not None and not self.moe.overlaps)

    def _route(self, hidden_BSH: Tensor, *_context: Tensor) -> tuple[Tensor, ...]:
        x_BSH = self.moe_norm(hidden_BSH)
        carried = (hidden_BSH, x_BSH, *self.moe.router(x_BSH))
        shared = self.moe.shared_experts
        return carried if shared is None or self.moe.overlaps else (*carried, shared(x_BSH))

    def _preprocess(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        carried = tensors[: self._num_carried]
        return (*carried, *self.moe.preprocess(carried[2], carried[3]))

    def _compute(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        hidden_BSH, x_BSH, probs_TK, experts_TK, *shared = tensors[: self._num_carried]
        num_planned = self.moe.dispatcher.num_planned
        plan = tensors[self._num_carried : self._num_carried + num_planned]
        if self.moe.overlaps:
            return (hidden_BSH, *self.moe.compute_beside_shared(x_BSH, probs_TK, experts_TK, plan))
        return (hidden_BSH, self.moe.compute(x_BSH, probs_TK, experts_TK, plan), *shared)

    def _postprocess(self, hidden_BSH: Tensor, y_BSH: Tensor, *rest: Tensor) -> Tensor:
        if self.moe.shared_experts is not None:
            y_BSH = y_BSH + rest[0]
        return self._add(hidden_BSH, y_BSH)

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
