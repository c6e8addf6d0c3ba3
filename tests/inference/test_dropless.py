"""Experts in inference against the block's own forward, and against capacities that would drop tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.inference.generation import EXPERTS, LLAMA, ONE_BY_ONE
from tests.models.tiny import seeded

from graphstep.config.moe import MoEConfig
from graphstep.inference.dropless import pads_experts, run_experts
from graphstep.models import GPTModel
from graphstep.models.moe import MoEBlock, MoELayer

GATED = replace(ONE_BY_ONE, moe_shared_expert_gate=True)
BESIDE = replace(ONE_BY_ONE, moe_shared_expert_overlap=True, moe_token_dispatcher_type="alltoall")


def block_of(moe: MoEConfig) -> MoEBlock:
    layer = GPTModel(LLAMA, moe=moe, generator=seeded()).eval().layers[0]
    assert isinstance(layer, MoELayer)
    return layer.moe


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("moe", [EXPERTS, ONE_BY_ONE, GATED, BESIDE], ids=["grouped", "one by one", "gated", "beside"])
@torch.no_grad()
def test_results_are_those_of_the_block(moe: MoEConfig, is_captured: bool) -> None:
    block, x_TH = block_of(moe), torch.randn(13, 32, generator=seeded(1))
    torch.testing.assert_close(run_experts(block, x_TH, is_captured=is_captured), block(x_TH), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pads", [False, True])
@torch.no_grad()
def test_a_capacity_drops_nothing(pads: bool) -> None:
    limited = replace(EXPERTS, moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=pads)
    x_TH = torch.randn(9, 32, generator=seeded(1))
    full, dropping = block_of(EXPERTS), block_of(limited)
    wanted = full(x_TH)
    torch.testing.assert_close(run_experts(dropping, x_TH, is_captured=False), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(dropping(x_TH), wanted), "the capacity would have dropped something"


def test_experts_are_padded_only_where_they_would_read_on_the_host() -> None:
    x = torch.zeros(2, 32)
    assert not pads_experts(block_of(EXPERTS), x, is_captured=True)
    assert not pads_experts(block_of(ONE_BY_ONE), x, is_captured=False)
    assert pads_experts(block_of(ONE_BY_ONE), x, is_captured=True)
    wanted = replace(EXPERTS, moe_pad_experts_for_cuda_graph_inference=True)
    assert pads_experts(block_of(wanted), x, is_captured=True)
    assert not pads_experts(block_of(wanted), x, is_captured=False)


@torch.no_grad()
def test_a_row_does_not_depend_on_the_others() -> None:
    block, x_TH = block_of(ONE_BY_ONE), torch.randn(6, 32, generator=seeded(1))
    wanted = run_experts(block, x_TH, is_captured=True)
    x_TH[3:] = torch.nan
    assert torch.equal(run_experts(block, x_TH, is_captured=True)[:3], wanted[:3])
