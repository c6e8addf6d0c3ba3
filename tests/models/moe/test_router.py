"""The router: choices, weights, losses and counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.moe.tiny import MODEL
from tests.models.tiny import logged_kernels, seeded
from torch import Tensor

from graphstep.config.moe import MoEConfig
from graphstep.models import initialize_weights
from graphstep.models.auxiliary_losses import GradientScale
from graphstep.models.initialization import WeightInitializer
from graphstep.models.moe import TopKRouter, read_and_reset_losses, routers, update_expert_biases
from graphstep.models.moe.balancing import sinkhorn

EXPERTS, CHOSEN, BATCH, SEQUENCE = 8, 3, 2, 10
MOE = MoEConfig(num_experts=EXPERTS, moe_router_topk=CHOSEN)


def built(*, scale: GradientScale | None = None, dtype: torch.dtype | None = None, **options: Any) -> TopKRouter:
    router = TopKRouter(MODEL, replace(MOE, **options), scale or GradientScale(), dtype=dtype)
    initialize_weights(router, WeightInitializer(std=0.5, num_layers=1, generator=seeded()))
    return router


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, SEQUENCE, MODEL.hidden_size)


def logits_of(router: TopKRouter, x: Tensor) -> Tensor:
    return (x @ router.weight.t()).flatten(0, -2)


def chosen_weights(scores: Tensor, experts: Tensor) -> Tensor:
    return torch.stack([row[chosen] for row, chosen in zip(scores, experts, strict=True)])


def test_softmax_over_the_chosen(x: Tensor) -> None:
    router = built()
    probs, experts = router(x)
    logits = logits_of(router, x)
    assert {frozenset(row) for row in experts.tolist()} == {frozenset(row) for row in logits.topk(CHOSEN)[1].tolist()}
    torch.testing.assert_close(probs, chosen_weights(logits, experts).softmax(-1))


def test_softmax_over_all(x: Tensor) -> None:
    router = built(moe_router_pre_softmax=True)
    probs, experts = router(x)
    torch.testing.assert_close(probs, chosen_weights(logits_of(router, x).softmax(-1), experts))
    assert bool((probs.sum(-1) < 1.0).all())


def test_sigmoid_and_scaling(x: Tensor) -> None:
    router = built(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5)
    probs, experts = router(x)
    scores = chosen_weights(logits_of(router, x).sigmoid(), experts)
    torch.testing.assert_close(probs, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_one_chosen_sigmoid_is_not_divided_by_itself(x: Tensor) -> None:
    router = built(moe_router_score_function="sigmoid", moe_router_topk=1)
    probs, experts = router(x)
    torch.testing.assert_close(probs, chosen_weights(logits_of(router, x).sigmoid(), experts))


def test_a_bias_takes_part_in_the_choice_only(x: Tensor) -> None:
    router = built(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    assert router.expert_bias is not None
    router.expert_bias[[1, 4, 6]] = 10.0
    probs, experts = router(x)
    assert bool((experts.sort(-1).values == torch.tensor([1, 4, 6])).all())
    scores = chosen_weights(logits_of(router, x).sigmoid(), experts)
    torch.testing.assert_close(probs, scores / scores.sum(-1, keepdim=True))
    probs.square().sum().backward()
    gradient, router.weight.grad = router.weight.grad, None
    scores = chosen_weights(logits_of(router, x).sigmoid(), experts)
    (scores / scores.sum(-1, keepdim=True)).square().sum().backward()
    torch.testing.assert_close(gradient, router.weight.grad)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_are_in_the_chosen_groups(score: str, x: Tensor) -> None:
    options = {"moe_router_score_function": score, "moe_router_topk": 2}
    router = built(moe_router_num_groups=4, moe_router_group_topk=1, **options)
    _, experts = router(x)
    groups = experts // 2
    assert bool((groups[:, 0] == groups[:, 1]).all())
    scores = logits_of(router, x)
    if score == "sigmoid":
        scores = scores.sigmoid()
    assert torch.equal(groups[:, 0], scores.unflatten(1, (4, 2)).sum(-1).argmax(-1))
    assert not torch.equal(experts.sort(-1).values, scores.topk(2)[1].sort(-1).values)


@pytest.mark.parametrize(
    "options", [{}, {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}]
)
def test_ties_choose_different_experts(options: dict[str, Any], x: Tensor) -> None:
    router = built(**options)
    torch.nn.init.zeros_(router.weight)
    probs, experts = router(x)
    assert all(len(set(row)) == CHOSEN for row in experts.tolist())
    torch.testing.assert_close(probs, torch.full_like(probs, 1 / CHOSEN))


@pytest.mark.parametrize(("name", "dtype"), [(None, torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)])
def test_number_formats(name: Any, dtype: torch.dtype, x: Tensor) -> None:
    router = built(moe_router_dtype=name, dtype=torch.bfloat16, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1)
    probs, experts = router(x.bfloat16())
    assert probs.dtype is dtype
    assert experts.dtype is torch.int64
    probs.square().sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.dtype is torch.bfloat16
    wide = logits_of(router, x.bfloat16()) if name is None else x.bfloat16().to(dtype) @ router.weight.to(dtype).t()
    expected = chosen_weights(wide.flatten(0, -2), experts).softmax(-1)
    torch.testing.assert_close(probs, expected, check_dtype=False)


def test_jitter_is_for_training(x: Tensor) -> None:
    router = built(moe_input_jitter_eps=0.2)
    assert not torch.equal(router(x)[0], router(x)[0])
    router.eval()
    assert torch.equal(router(x)[0], router(x)[0])
    assert torch.equal(router(x)[0], built().eval()(x)[0])


def test_sinkhorn_balances_the_choice_in_training(x: Tensor) -> None:
    router = built(moe_router_load_balancing_type="sinkhorn", moe_router_topk=2)
    with torch.no_grad():
        router.weight[3] += 2.0 * x.flatten(0, 1).mean(0)
    x = x + 2.0 * x.mean((0, 1))
    probs, experts = router(x)
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
    in_evaluation = torch.bincount(router.eval()(x)[1].flatten(), minlength=EXPERTS)
    assert counts.max() < in_evaluation.max()
    torch.testing.assert_close(probs, chosen_weights(logits_of(router, x).softmax(-1), experts))


def test_sinkhorn_evens_out_rows_and_columns() -> None:
    plan = sinkhorn(torch.randn(40, EXPERTS)).exp()
    torch.testing.assert_close(plan.sum(1), torch.ones(40))
    torch.testing.assert_close(plan.sum(0), torch.full((EXPERTS,), 40 / EXPERTS), rtol=0.02, atol=0.0)


def balancing_by_hand(scores: Tensor, experts: Tensor) -> Tensor:
    """Switch Transformers, equations 4 to 6, with K choices a token."""
    num_tokens = scores.shape[0]
    shares = torch.bincount(experts.flatten(), minlength=EXPERTS) / (num_tokens * CHOSEN)
    return EXPERTS * (shares * scores.mean(0)).sum()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_losses_and_their_gradients(kind: str, score: str, x: Tensor) -> None:
    options = {"moe_router_load_balancing_type": kind, "moe_router_score_function": score}
    scale = GradientScale()
    router = built(scale=scale, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2, **options)
    scale.value.fill_(0.5)
    probs, experts = router(x)
    probs.square().sum().backward()
    gradient, router.weight.grad = router.weight.grad, None

    logits = logits_of(router, x)
    scores = logits.softmax(-1)
    if score == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    groups = BATCH if kind == "seq_aux_loss" else 1
    pairs = zip(scores.chunk(groups), experts.chunk(groups), strict=True)
    balancing = torch.stack([balancing_by_hand(*pair) for pair in pairs]).mean()
    z = logits.logsumexp(-1).square().mean()
    chosen = chosen_weights(logits, experts).softmax(-1)
    if score == "sigmoid":
        chosen = chosen_weights(logits.sigmoid(), experts)
        chosen = chosen / chosen.sum(-1, keepdim=True)
    (chosen.square().sum() + 0.5 * (0.3 * balancing + 0.2 * z)).backward()
    torch.testing.assert_close(gradient, router.weight.grad)
    logged = read_and_reset_losses(router)
    torch.testing.assert_close(logged["load_balancing_loss"], balancing)
    torch.testing.assert_close(logged["z_loss"], z)


def test_a_balanced_load_costs_one() -> None:
    router = built(moe_aux_loss_coeff=1.0, moe_router_topk=1, moe_router_pre_softmax=True)
    torch.nn.init.zeros_(router.weight)
    with torch.no_grad():
        router.weight[:, :EXPERTS] = 1e-3 * torch.eye(EXPERTS)
    router(torch.eye(MODEL.hidden_size)[torch.arange(EXPERTS * 4) % EXPERTS])
    assert read_and_reset_losses(router)["load_balancing_loss"].item() == pytest.approx(1.0, abs=1e-5)


def test_the_global_loss_counts_all_microbatches_of_a_step(x: Tensor) -> None:
    options: dict[str, Any] = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
    router = built(**options)
    first, second = x
    _, experts = router(first)
    read_and_reset_losses(router)
    _, more = router(second)
    scores = logits_of(router, second).softmax(-1)
    shares = torch.bincount(torch.cat([experts, more]).flatten(), minlength=EXPERTS) / (2 * SEQUENCE * CHOSEN)
    expected = EXPERTS * (shares * scores.mean(0)).sum()
    torch.testing.assert_close(read_and_reset_losses(router)["load_balancing_loss"], expected)
    update_expert_biases(router, 0.1)
    router(second)
    torch.testing.assert_close(
        read_and_reset_losses(router)["load_balancing_loss"], balancing_by_hand(scores, more), check_dtype=False
    )


BIASED: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def test_counts_are_those_of_training_with_gradients(x: Tensor) -> None:
    router = built(moe_aux_loss_coeff=0.1, **BIASED)
    _, experts = router(x)
    router(x)
    counts = 2.0 * torch.bincount(experts.flatten(), minlength=EXPERTS)
    losses = router.losses.clone()
    assert losses[2] == 2.0
    with torch.no_grad():
        router(x)
    router.eval()
    router(x)
    assert router.tokens_per_expert is not None
    assert torch.equal(router.tokens_per_expert, counts)
    assert torch.equal(router.losses, losses)


def test_biases_move_towards_a_balanced_load(x: Tensor) -> None:
    router = built(**BIASED)
    assert router.expert_bias is not None
    assert router.tokens_per_expert is not None
    router.tokens_per_expert.copy_(torch.tensor([0.0, 4, 8, 4, 4, 4, 4, 4]))
    update_expert_biases(router, 0.5)
    assert router.expert_bias.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert router.tokens_per_expert.tolist() == [0.0] * EXPERTS
    for _ in range(300):
        router(x)
        update_expert_biases(router, 0.02)
    router(x)
    assert router.tokens_per_expert.max() <= 1.3 * router.tokens_per_expert.mean()


def test_updates_read_nothing_back(x: Tensor) -> None:
    router = built(moe_aux_loss_coeff=0.1, **BIASED)
    router(x)
    with logged_kernels() as launched:
        update_expert_biases(router, 0.1)
        read_and_reset_losses(router)
    assert "_local_scalar_dense" not in launched
    assert router.losses.tolist() == [0.0, 0.0, 0.0]


def test_logs_are_means_over_layers_and_forwards(x: Tensor) -> None:
    model = torch.nn.ModuleList([built(moe_z_loss_coeff=0.1), built(moe_z_loss_coeff=0.1), built()])
    assert len(routers(model)) == 3
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    expected = [logits_of(router, y).logsumexp(-1).square().mean() for router in model[:2] for y in (x, 2.0 * x)]
    for router in model:
        router(x)
        router(2.0 * x)
    logged = read_and_reset_losses(model)
    assert set(logged) == {"z_loss"}
    torch.testing.assert_close(logged["z_loss"], torch.stack(expected).mean())


def test_without_losses_nothing_is_counted(x: Tensor) -> None:
    router = built()
    assert router.tokens_per_expert is None
    with logged_kernels() as launched:
        router(x)
    assert "add_" not in launched
    assert read_and_reset_losses(router) == {}
    update_expert_biases(router, 0.1)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_autocast_leaves_a_router_with_a_format_of_its_own_alone(dtype: str, x: Tensor) -> None:
    router = built(moe_router_dtype=dtype)
    plain = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = router(x)
    assert cast[0].dtype is plain[0].dtype is {"fp32": torch.float32, "fp64": torch.float64}[dtype]
    assert all(torch.equal(*pair) for pair in zip(plain, cast, strict=True))
