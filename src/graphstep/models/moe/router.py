"""The router: which experts a token goes to, and with which weights.

Shapes: T tokens, B sequences, S tokens of a sequence, H hidden, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.errors import ConfigError, Problem
from graphstep.models.autocast import without_autocast
from graphstep.models.auxiliary_losses import GradientScale, attach_loss
from graphstep.models.float32_buffers import Float32Buffers
from graphstep.models.initialization import WeightInitializer
from graphstep.models.moe import balancing

_DTYPES = (("fp32", torch.float32), ("fp64", torch.float64))


class TopKRouter(Float32Buffers):
    """Scores of all experts from one matrix product, of which the K best ones are taken.

    Weights are the softmax over the chosen logits; with ``moe_router_pre_softmax`` the softmax over all of them; with
    ``sigmoid`` the chosen sigmoids divided by their sum. With a bias an expert the bias takes part in the choice only.
    With groups the experts of a token are in the groups with the best sums of their K / (groups chosen) best scores.

    Counters are added to in training while gradients are on, never in evaluation, and read by
    :func:`graphstep.models.moe.update_expert_biases` and :func:`graphstep.models.moe.read_and_reset_losses`.

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1; DeepSeek-AI 2024, "DeepSeek-V3",
    equations 12 to 16 (sigmoid, groups, bias).
    """

    expert_bias: Tensor | None
    """float32 [E], saved with the model; None without ``moe_router_enable_expert_bias``."""
    tokens_per_expert: Tensor | None
    """float32 [E]: choices since the last step; None if nothing needs them."""
    losses: Tensor
    """float32 [3]: sums of the balancing loss and the z-loss before their coefficients, and the forwards counted."""

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        scale: GradientScale,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if moe.num_experts is None:
            raise ConfigError(
                Problem(
                    code="moe-no-experts",
                    what="a router needs experts, and there are none",
                    where="MoEConfig.num_experts",
                    fix="set it to the number of experts of a layer",
                )
            )
        self.num_experts: int = moe.num_experts
        self.top_k = moe.moe_router_topk
        self.balancing = moe.moe_router_load_balancing_type
        self.balancing_coefficient = moe.moe_aux_loss_coeff
        self.z_coefficient = moe.moe_z_loss_coeff or 0.0
        self.score_function = moe.moe_router_score_function
        self.softmax_first = moe.moe_router_pre_softmax
        self.num_groups = moe.moe_router_num_groups or 1
        self.num_chosen_groups = moe.moe_router_group_topk or self.num_groups
        self.scaling_factor = moe.moe_router_topk_scaling_factor
        self.jitter = moe.moe_input_jitter_eps or 0.0
        self.dtype = dict(_DTYPES).get(moe.moe_router_dtype or "")
        # Held, not registered: it belongs to the model, and a copy of the model copies it once.
        self.__dict__["scale"] = scale
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, device=device, dtype=dtype))
        zeros = torch.zeros(self.num_experts, device=device, dtype=torch.float32)
        has_bias = moe.moe_router_enable_expert_bias
        needs_counts = has_bias or self.balancing == "global_aux_loss"
        self.register_buffer("expert_bias", zeros if has_bias else None)
        self.register_buffer("tokens_per_expert", zeros.clone() if needs_counts else None, persistent=False)
        self.register_buffer("losses", torch.zeros(3, device=device, dtype=torch.float32), persistent=False)

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Draw normal weights; biases and counters start at zero."""
        initializer.normal_(self.weight)
        for buffer in (self.expert_bias, self.tokens_per_expert, self.losses):
            if buffer is not None:
                buffer.zero_()

    @property
    def has_balancing_loss(self) -> bool:
        """True if the load is balanced by a loss."""
        return self.balancing.endswith("aux_loss") and self.balancing_coefficient != 0.0

    @property
    def has_z_loss(self) -> bool:
        """True if large logits cost something."""
        return self.z_coefficient != 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts.

        Args:
            x: normalised hidden states [T, H], or [B, S, H] where the balancing loss is one of sequences.

        Returns:
            Weights of the choices [T, K], in the dtype of the router, and their experts [T, K], int64. The order of
            the K choices of a token means nothing.
        """
        num_sequences = x.shape[0] if x.dim() == 3 else 1
        logits_TE = self._logits(x.flatten(0, -2))
        probs_TK, experts_TK = self._choose(logits_TE)
        if self.training and torch.is_grad_enabled():
            probs_TK = self._balance(logits_TE, probs_TK, experts_TK, num_sequences)
        return probs_TK, experts_TK

    def extra_repr(self) -> str:
        """Say what the router chooses from."""
        return f"num_experts={self.num_experts}, top_k={self.top_k}, balancing={self.balancing}"

    def _logits(self, x_TH: Tensor) -> Tensor:
        if self.training and self.jitter > 0.0:
            x_TH = x_TH * torch.empty_like(x_TH).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        if self.dtype is None:
            return functional.linear(x_TH, self.weight)
        with without_autocast(x_TH):
            return functional.linear(x_TH.to(self.dtype), self.weight.to(self.dtype))

    def _choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        wide = _wide(logits_TE)
        if self.balancing == "sinkhorn":
            probs_TK, experts_TK = self._choose_by_sinkhorn(logits_TE, wide)
        elif self.score_function == "sigmoid":
            scores_TE = torch.sigmoid(logits_TE.to(wide))
            if self.expert_bias is None:
                probs_TK, experts_TK = self._best(scores_TE)
            else:
                experts_TK = self._best(scores_TE.detach() + self.expert_bias)[1]
                probs_TK = pick(scores_TE, experts_TK)
            if self.top_k > 1:
                probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + 1e-20)
        elif self.softmax_first:
            probs_TK, experts_TK = self._best(torch.softmax(logits_TE, dim=-1, dtype=wide))
        else:
            chosen_TK, experts_TK = self._best(logits_TE)
            probs_TK = torch.softmax(chosen_TK, dim=-1, dtype=wide)
        if self.scaling_factor is not None:
            probs_TK = probs_TK * self.scaling_factor
        return probs_TK.to(logits_TE.dtype), experts_TK

    def _choose_by_sinkhorn(self, logits_TE: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Choose by balanced scores in training; the weights are plain scores, and so is the choice in evaluation."""
        if self.top_k == 1:
            scores_TE = torch.sigmoid(logits_TE.to(wide))
        else:
            scores_TE = torch.softmax(logits_TE, dim=-1, dtype=wide)
        if not self.training:
            return self._best(scores_TE)
        experts_TK = self._best(balancing.sinkhorn(logits_TE.detach().to(wide)))[1]
        return pick(scores_TE, experts_TK), experts_TK

    def _best(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The K best scores of each token and their experts, within the best groups."""
        allowed_TE = scores_TE
        if self.num_chosen_groups < self.num_groups:
            members_TGM = scores_TE.detach().unflatten(1, (self.num_groups, -1))
            num_counted = self.top_k // self.num_chosen_groups
            of_groups_TG = members_TGM.topk(num_counted, dim=-1, sorted=False)[0].sum(-1)
            groups_TG = of_groups_TG.topk(self.num_chosen_groups, dim=-1, sorted=False)[1]
            closed_TG = torch.ones_like(of_groups_TG, dtype=torch.bool).scatter_(1, groups_TG, False)
            closed_TE = closed_TG[..., None].expand_as(members_TGM).flatten(1)
            allowed_TE = scores_TE.masked_fill(closed_TE, float("-inf"))
        best_TK, experts_TK = torch.topk(allowed_TE, self.top_k, dim=-1, sorted=False)
        return best_TK, experts_TK

    def _balance(self, logits_TE: Tensor, probs_TK: Tensor, experts_TK: Tensor, num_sequences: int) -> Tensor:
        """Count, and hang the losses on the weights."""
        if not (self.has_balancing_loss or self.has_z_loss or self.tokens_per_expert is not None):
            return probs_TK
        scale: GradientScale = self.__dict__["scale"]
        chosen_TE: Any = None
        if self.has_balancing_loss or self.tokens_per_expert is not None:
            with torch.no_grad():
                chosen_TE = balancing.chosen_map(experts_TK, self.num_experts)
                if self.tokens_per_expert is not None:
                    self.tokens_per_expert.add_(chosen_TE.sum(0))
        if self.has_balancing_loss:
            loss, factor = self._balancing_loss(logits_TE, chosen_TE, num_sequences)
            probs_TK = attach_loss(probs_TK, loss, scale, self.balancing_coefficient * factor)
            self._log(0, loss, factor)
        if self.has_z_loss:
            loss, factor = balancing.z_loss(logits_TE.to(_wide(logits_TE)))
            probs_TK = attach_loss(probs_TK, loss, scale, self.z_coefficient * factor)
            self._log(1, loss, factor)
        if self.has_balancing_loss or self.has_z_loss:
            with torch.no_grad():
                self.losses[2].add_(1.0)
        return probs_TK

    def _balancing_loss(self, logits_TE: Tensor, chosen_TE: Tensor, num_sequences: int) -> tuple[Tensor, float]:
        wide = _wide(logits_TE)
        if self.score_function == "softmax":
            scores_TE = torch.softmax(logits_TE, dim=-1, dtype=wide)
        else:
            scores_TE = torch.sigmoid(logits_TE.to(wide))
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        num_groups = num_sequences if self.balancing == "seq_aux_loss" else 1
        scores_BSE = scores_TE.unflatten(0, (num_groups, -1))
        if self.balancing == "global_aux_loss" and self.tokens_per_expert is not None:
            # Scaled to this microbatch's choices, into memory of its own: the next one adds to the counts before this
            # one's backward.
            counts_E = self.tokens_per_expert
            counts_BE = (counts_E * (chosen_TE.shape[0] * self.top_k / counts_E.sum()))[None]
        else:
            counts_BE = chosen_TE.unflatten(0, (num_groups, -1)).sum(1)
        return balancing.load_balancing_loss(scores_BSE, counts_BE, self.top_k)

    @torch.no_grad()
    def _log(self, place: int, loss: Tensor, factor: float) -> None:
        self.losses[place].add_(loss.detach(), alpha=factor)


def pick(scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """The scores of the chosen experts, whose gradients are written in place of zeros, not added: no atomics."""
    function: Callable[..., Tensor] = _Pick.apply
    return function(scores_TE, experts_TK)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        ctx.save_for_backward(experts_TK)
        ctx.num_experts = scores_TE.shape[1]
        return scores_TE.gather(1, experts_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (experts_TK,) = ctx.saved_tensors
        grad_TK: Tensor = grad_outputs[0]
        grad_TE = grad_TK.new_zeros(grad_TK.shape[0], ctx.num_experts)
        return grad_TE.scatter_(1, experts_TK, grad_TK), None


def _wide(tensor: Tensor) -> torch.dtype:
    """Type for sums and exponentials: at least float32."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
