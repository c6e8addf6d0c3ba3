"""Values and gradients of the MoE block against blocks of transformers with the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.moe.tiny import MODEL, built_block
from tests.models.tiny import logged_kernels
from torch import Tensor, nn

from graphstep.config.moe import MoEConfig
from graphstep.models.moe import MoEBlock

pytest.importorskip("transformers")

EXPERTS, CHOSEN, INNER = 8, 4, 24
MOE = MoEConfig(num_experts=EXPERTS, moe_router_topk=CHOSEN, moe_ffn_hidden_size=INNER, moe_grouped_gemm=True)
SIZES: dict[str, Any] = {"hidden_size": MODEL.hidden_size, "num_experts_per_tok": CHOSEN, "hidden_act": "silu"}


def mixtral() -> nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    return MixtralSparseMoeBlock(MixtralConfig(**SIZES, num_local_experts=EXPERTS, intermediate_size=INNER))


def qwen3(normalized: bool) -> nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        **SIZES, num_experts=EXPERTS, moe_intermediate_size=INNER, norm_topk_prob=normalized, intermediate_size=INNER
    )
    return Qwen3MoeSparseMoeBlock(config)


def deepseek() -> nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    config = DeepseekV3Config(
        **SIZES,
        n_routed_experts=EXPERTS,
        moe_intermediate_size=INNER,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    return DeepseekV3MoE(config)


DEEPSEEK = replace(
    MOE,
    moe_router_score_function="sigmoid",
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_router_dtype="fp32",
    moe_shared_expert_intermediate_size=2 * INNER,
)


CASES = {
    "mixtral": (mixtral, MOE),
    "qwen3": (lambda: qwen3(normalized=True), MOE),
    "qwen3, weights as they are": (lambda: qwen3(normalized=False), replace(MOE, moe_router_pre_softmax=True)),
    "deepseek": (deepseek, DEEPSEEK),
}


def copied(theirs: nn.Module, ours: MoEBlock) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw their weights, copy them, and pair up parameters: ours, and theirs in our layout."""
    experts: Any = theirs.experts
    gate: Any = theirs.gate
    pairs = {
        "router": (ours.router.weight, gate.weight, lambda w: w),
        "up": (ours.experts.up, experts.gate_up_proj, lambda w: w.transpose(1, 2)),
        "down": (ours.experts.down, experts.down_proj, lambda w: w.transpose(1, 2)),
    }
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3)
        for mine, other, layout in pairs.values():
            mine.copy_(layout(other))
        if ours.router.expert_bias is not None:
            gate.e_score_correction_bias.uniform_(-0.3, 0.3)
            ours.router.expert_bias.copy_(gate.e_score_correction_bias)
        if ours.shared_experts is not None:
            shared: Any = theirs.shared_experts
            ours.shared_experts.mlp.up.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
            ours.shared_experts.mlp.down.weight.copy_(shared.down_proj.weight)
    return {name: (mine, layout(_gradient_holder(other))) for name, (mine, other, layout) in pairs.items()}


def test_fewer_kernels_than_theirs() -> None:
    theirs, ours = qwen3(normalized=True).bfloat16(), built_block(MOE, dtype=torch.bfloat16)
    config: Any = theirs.experts.config
    config._experts_implementation = "grouped_mm"
    numbers = []
    for block in (ours, theirs):
        x = torch.randn(3, 10, MODEL.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with logged_kernels() as forward:
            y = block(x)
        upstream = torch.randn_like(y)
        with logged_kernels() as backward:
            torch.autograd.grad(y, [x, *block.parameters()], upstream)
        assert forward.count("_grouped_mm") == 2
        assert backward.count("_grouped_mm") == 4
        numbers.append((len(forward), len(backward)))
    assert numbers[0][0] < numbers[1][0]
    assert numbers[0][1] < numbers[1][1]


def _gradient_holder(parameter: Tensor) -> Tensor:
    parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@pytest.mark.parametrize("mode", ["grouped", "sequential", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_the_block_equals_theirs(case: str, mode: str) -> None:
    make, moe = CASES[case]
    if mode == "sequential":
        moe = replace(moe, moe_grouped_gemm=False)
    if mode == "padded":  # With a capacity that holds all tokens nothing is dropped.
        moe = replace(moe, moe_expert_capacity_factor=EXPERTS / CHOSEN, moe_pad_expert_input_to_capacity=True)
    theirs, ours = make().train(), built_block(moe)
    gradients = copied(theirs, ours)
    x = torch.randn(3, 10, MODEL.hidden_size)
    upstream = torch.randn_like(x)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_ours, y_theirs = ours(x_ours), theirs(x_theirs)
    torch.testing.assert_close(y_ours, y_theirs, rtol=1e-5, atol=1e-5)
    y_ours.backward(upstream)
    y_theirs.backward(upstream)
    torch.testing.assert_close(x_ours.grad, x_theirs.grad, rtol=1e-4, atol=1e-4)
    for name, (mine, expected) in gradients.items():
        assert mine.grad is not None
        torch.testing.assert_close(
            mine.grad, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
