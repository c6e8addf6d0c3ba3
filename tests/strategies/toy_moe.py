"""A small mixture of experts out of segments, with everything that such layers do to graphs.

Its experts read counts on the host unless all see the same number of rows, its router counts tokens and sums losses in
buffers, and a loss of the router gets its gradient through a buffer that is written at the start of the backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tests.strategies.models import HIDDEN, Decoder, Layer, Mix
from torch import Tensor, nn
from torch.nn import functional

from graphstep.models.segments import Segment, SegmentedModule

NUM_EXPERTS, TOP_K = 4, 2


class GradientScale(nn.Module):
    """What the gradients of the routers' losses are multiplied by; written when the backward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(()), persistent=False)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: GradientScale) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.scale.value.copy_(gradient)
        return gradient, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: GradientScale) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.scale.value.to(ctx.dtype, copy=True), None


class Router(nn.Module):
    """Chooses the best experts of each token, counts tokens and sums its loss."""

    def __init__(self, scale: GradientScale) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN))
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(NUM_EXPERTS))
        self.register_buffer("losses", torch.zeros(2))
        self._scale = [scale]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.norm(x)
        scores = functional.linear(normed.flatten(0, 1).float(), self.weight.float()).softmax(-1)
        experts = (scores + self.bias).topk(TOP_K, dim=-1).indices
        probabilities = scores.gather(1, experts)
        if self.training and torch.is_grad_enabled():
            chosen = (experts[..., None] == torch.arange(NUM_EXPERTS, device=x.device)).sum((0, 1))
            loss = (scores.mean(0) * chosen).sum() * 0.01
            self.tokens_per_expert.add_(chosen)
            self.losses[0].add_(loss.detach())
            probabilities = _Attach.apply(probabilities, loss, self._scale[0])
        return normed, probabilities, experts


class MoeLayer(SegmentedModule):
    """Attention, router, preprocess, experts, postprocess; ``attention=False`` leaves the first one out."""

    def __init__(
        self, scale: GradientScale, dropout: float = 0.0, *, shared: bool = True, attention: bool = True
    ) -> None:
        super().__init__()
        self.dropout, self.has_attention = dropout, attention
        self.scale = scale
        self.mix = Mix()
        self.router = Router(scale)
        self.shared = nn.Linear(HIDDEN, HIDDEN) if shared else None
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_EXPERTS))

    def segments(self) -> tuple[Segment, ...]:
        routers = (self.router, self.scale, *([self.shared] if self.shared is not None else []))
        attention = Segment("attn", "mix", self._mix, (self.mix,))
        return (
            *([attention] if self.has_attention else []),
            Segment("moe_router", "router", self._route, routers, part_of="moe"),
            Segment("moe_preprocess", "preprocess", self._preprocess, (), part_of="moe"),
            Segment("moe", "experts", self._run_experts, (self.experts,)),
            Segment("moe_router", "postprocess", self._postprocess, (), part_of="moe"),
        )

    def _mix(self, x: Tensor, *_context: Tensor) -> Tensor:
        return x + functional.dropout(self.mix(x), self.dropout, self.training)

    def _route(self, x: Tensor, *_context: Tensor) -> tuple[Tensor, ...]:
        normed, probabilities, experts = self.router(x)
        shared = [self.shared(normed)] if self.shared is not None else []
        return x, normed, probabilities, experts, *shared

    def _preprocess(
        self, x: Tensor, normed: Tensor, probabilities: Tensor, experts: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        shared = rest[:1] if self.shared is not None else ()
        order = experts.flatten().argsort(stable=True)
        counts = (experts[..., None] == torch.arange(NUM_EXPERTS, device=x.device)).sum((0, 1))
        return x, normed, probabilities, order, order.argsort(), counts, *shared

    def _run_experts(
        self,
        x: Tensor,
        normed: Tensor,
        probabilities: Tensor,
        order: Tensor,
        inverse: Tensor,
        counts: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        shared = rest[:1] if self.shared is not None else ()
        rows = normed.flatten(0, 1)[order // TOP_K]
        given = rows.split(counts.tolist())  # on the host
        result = torch.cat([expert(part) for expert, part in zip(self.experts, given, strict=True)])
        return x, result[inverse].unflatten(0, (-1, TOP_K)), probabilities, *shared

    def _postprocess(self, x: Tensor, result: Tensor, probabilities: Tensor, *rest: Tensor) -> Tensor:
        y = (result * probabilities[..., None].to(result.dtype)).sum(1).view_as(x)
        if self.shared is not None:
            y = y + rest[0]
        return x + functional.dropout(y, self.dropout, self.training)


class StaticMoeLayer(MoeLayer):
    """Every expert computes every token: nothing is read on the host."""

    def _run_experts(
        self,
        x: Tensor,
        normed: Tensor,
        probabilities: Tensor,
        order: Tensor,
        inverse: Tensor,
        counts: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        shared = rest[:1] if self.shared is not None else ()
        rows = normed.flatten(0, 1)
        results = torch.stack([expert(rows) for expert in self.experts])
        chosen = order[inverse].view(-1, TOP_K) * 0 + order.view(-1, TOP_K) % NUM_EXPERTS
        gathered = results.transpose(0, 1).gather(1, chosen[..., None].expand(-1, -1, HIDDEN))
        return x, gathered, probabilities, *shared


class MoeDecoder(Decoder):
    """Layers by letter: E a mixture of experts with attention, e one without, D a dense layer."""

    def __init__(
        self, letters: str = "EEE", *, dropout: float = 0.0, layer: type[MoeLayer] = MoeLayer, **options: Any
    ) -> None:
        super().__init__(0, context=options.pop("context", ""))
        self.gradient_scale = GradientScale()
        made = {
            "E": partial(layer, self.gradient_scale, dropout, **options),
            "e": partial(layer, self.gradient_scale, dropout, attention=False, **options),
            "D": partial(Layer, dropout),
        }
        self.layers = nn.ModuleList(made[letter]() for letter in letters)
        self.order = tuple(range(len(letters)))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(tokens, labels)
        return self.marked(loss)

    def marked(self, loss: Tensor) -> Tensor:
        """The loss, whose backward writes the scale of the routers' losses."""
        marked: Tensor = _Mark.apply(loss, self.gradient_scale)
        return marked
