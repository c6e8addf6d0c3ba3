"""Experts: grouped, padded and one after another compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.moe.tiny import MODEL, MOE
from tests.models.tiny import gradients, seeded
from torch import Tensor

from graphstep.config.model import ModelConfig
from graphstep.engine import Engine, engine_for
from graphstep.errors import CaptureError, ConfigError
from graphstep.models import initialize_weights
from graphstep.models.initialization import WeightInitializer
from graphstep.models.moe import Experts, GroupedExperts, PaddedExperts, SequentialExperts, SharedExperts, build_experts
from graphstep.models.moe.experts import grouped_product, refuse_host_reads

EXPERTS, INNER = 4, 16
GELU = replace(MODEL, swiglu=False)
PAD: dict[str, Any] = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
LOADS = {
    "even": [5, 10, 15, 20],
    "one for all": [0, 20, 20, 20],
    "last alone": [0, 0, 0, 20],
    "some empty": [3, 3, 20, 20],
}


def built(kind: type[Experts], config: ModelConfig = MODEL, *, bias: bool = False, **options: Any) -> Experts:
    experts = kind(config, EXPERTS, INNER, bias=bias, **options)
    initialize_weights(experts, WeightInitializer(std=0.3, num_layers=1, generator=seeded()))
    return experts


def ends(numbers: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("config", [MODEL, GELU])
def test_grouped_equals_one_by_one(config: ModelConfig, load: str) -> None:
    x = torch.randn(20, 32)
    results = []
    for kind in (GroupedExperts, SequentialExperts):
        experts, mine = built(kind, config), x.clone().requires_grad_()
        y = experts(mine, ends(LOADS[load]))
        y.square().sum().backward()
        results.append({"y": y, "x": mine.grad, **gradients(experts)})
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("config", [MODEL, GELU])
def test_padded_equals_one_by_one(config: ModelConfig, bias: bool) -> None:
    x = torch.randn(20, 32)
    results = []
    for kind in (PaddedExperts, SequentialExperts):
        experts, mine = built(kind, config, bias=bias), x.clone().requires_grad_()
        for parameter in (experts.up_bias, experts.down_bias):
            if parameter is not None:
                torch.nn.init.normal_(parameter, generator=seeded())
        y = experts(mine, ends(LOADS["even"]))
        y.square().sum().backward()
        results.append({"y": y, "x": mine.grad, **gradients(experts)})
    assert ("up_bias" in results[0]) == bias
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], msg=lambda text, name=name: f"{name}: {text}")


def test_one_by_one_is_an_mlp_an_expert() -> None:
    experts = built(SequentialExperts)
    x = torch.randn(20, 32)
    y = experts(x, ends(LOADS["some empty"]))
    for rows, number in ((slice(0, 3), 0), (slice(3, 20), 2)):
        gate, value = (x[rows] @ experts.up[number]).chunk(2, dim=-1)
        torch.testing.assert_close(y[rows], (torch.nn.functional.silu(gate) * value) @ experts.down[number])


def products(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(24, 32, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(EXPERTS, 32, 16, dtype=dtype, device=device, requires_grad=True)
    return x, weight, ends([6, 6, 20, 20], device)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_behind_the_end_and_empty_experts(device: str, dtype: torch.dtype) -> None:
    """What is behind the end has no part in anything, and empty experts have zero gradients, not old memory."""
    x, weight, limits = products(dtype, device)
    with torch.no_grad():
        x[20:] = float("nan")
    used = [torch.full((2_000_000,), float("nan"), device=device) for _ in range(4)]
    del used
    y = grouped_product(x, weight, limits)
    upstream = torch.randn_like(y)
    upstream[20:] = float("nan")
    y.backward(upstream)
    assert weight.grad is not None
    assert x.grad is not None
    for rows, expert in ((slice(0, 6), 0), (slice(6, 20), 2)):
        close = {"rtol": 2e-2, "atol": 2e-1} if dtype is torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
        torch.testing.assert_close(y[rows], x[rows] @ weight[expert], **close)
        torch.testing.assert_close(x.grad[rows], upstream[rows] @ weight[expert].t(), **close)
        torch.testing.assert_close(weight.grad[expert], x[rows].t() @ upstream[rows], **close)
    assert not weight.grad[[1, 3]].any()


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_gradients_are_taken(device: str) -> None:
    x, weight, limits = products(torch.bfloat16, device)
    grouped_product(x, weight, limits)[:20].sum().backward()
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())
    grouped_product(x[:20], weight, limits).sum().backward()


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, GroupedExperts), (PAD, PaddedExperts), ({"moe_grouped_gemm": False}, SequentialExperts)],
)
def test_the_options_choose(options: dict[str, Any], kind: type[Experts]) -> None:
    experts = build_experts(MODEL, replace(MOE, **options), 8)
    assert type(experts) is kind
    assert experts.up.shape == (8, 32, 32)
    assert experts.down.shape == (8, 16, 32)
    assert "num_experts=8" in repr(experts)
    wide = build_experts(MODEL, replace(MOE, moe_ffn_hidden_size=None), 8)
    assert wide.down.shape == (8, MODEL.ffn_hidden_size, 32)


def test_one_product_of_all_experts_has_no_biases() -> None:
    with pytest.raises(ConfigError, match="have no biases"):
        build_experts(replace(MODEL, add_bias_linear=True), MOE, 8)
    with pytest.raises(ConfigError, match="have no biases"):
        GroupedExperts(MODEL, 8, 16, bias=True)
    assert (
        build_experts(replace(MODEL, add_bias_linear=True), replace(MOE, moe_grouped_gemm=False), 8).up_bias is not None
    )


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype", "multiple"),
    [(12, 16, torch.bfloat16, 8), (16, 12, torch.bfloat16, 8), (14, 16, torch.float32, 4), (16, 6, None, 4)],
)
def test_widths_that_a_grouped_product_cannot_have(
    hidden: int, inner: int, dtype: torch.dtype | None, multiple: int
) -> None:
    """Refused where the experts are built, and not by a kernel in the first step; padded ones have no such limit."""
    config = replace(MODEL, hidden_size=hidden, num_attention_heads=2, num_query_groups=2, kv_channels=4)
    moe = replace(MOE, moe_ffn_hidden_size=inner)
    with pytest.raises(ConfigError, match=f"multiples of {multiple}"):
        build_experts(config, moe, 8, dtype=dtype)
    padded = replace(moe, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    assert build_experts(config, padded, 8, dtype=dtype).down.shape == (8, inner, hidden)


def test_weights_follow_from_the_seed() -> None:
    experts = Experts(MODEL, 64, 64, bias=True)
    initialize_weights(experts, WeightInitializer(std=0.5, num_layers=8, generator=seeded()))
    assert experts.up.std().item() == pytest.approx(0.5, rel=0.05)
    assert experts.down.std().item() == pytest.approx(0.5 / 4, rel=0.05)
    assert experts.up_bias is not None
    assert not experts.up_bias.any()
    with pytest.raises(NotImplementedError):
        experts(torch.randn(2, 32), ends([2] * 64))


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts(gated: bool) -> None:
    shared = SharedExperts(MODEL, replace(MOE, moe_shared_expert_gate=gated), 24)
    initialize_weights(shared, WeightInitializer(std=0.3, num_layers=1, generator=seeded()))
    x = torch.randn(2, 5, 32)
    expected = shared.mlp(x)
    if shared.gate is not None:
        expected = torch.sigmoid((x * shared.gate[0]).sum(-1, keepdim=True)) * expected
    assert (shared.gate is not None) == gated
    assert shared.mlp.down.weight.shape == (32, 24)
    torch.testing.assert_close(shared(x), expected)


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "reads"),
    [
        (torch.bfloat16, 16, (9, 0), False),
        (torch.float32, 16, (9, 0), True),
        (torch.bfloat16, 12, (9, 0), True),
        (torch.bfloat16, 16, (8, 0), True),
    ],
)
def test_what_reads_on_the_host_refuses_a_capture_on_cuda(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, capability: tuple[int, int], reads: bool
) -> None:
    """With the way out; and it says nothing outside of a capture."""
    x: Any = SimpleNamespace(is_cuda=True, dtype=dtype, device=None)
    weights = torch.empty(4, 16, width), torch.empty(4, width, 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_host_reads(x, *weights)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if reads:
        with pytest.raises(CaptureError, match="on the host") as caught:
            refuse_host_reads(x, *weights)
        assert "--bf16" in caught.value.fix
    else:
        refuse_host_reads(x, *weights)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    built = engine_for(torch.device(request.param))
    yield built
    built.close()


def test_one_by_one_refuses_a_capture_with_the_ways_out(engine: Engine) -> None:
    device = str(engine.device)
    experts = built(SequentialExperts).to(device)
    x, rows = torch.randn(20, 32, device=device), ends(LOADS["even"], device)
    experts(x, rows)
    with pytest.raises(CaptureError, match="one after another") as caught:
        engine.capture(lambda: experts(x, rows))
    assert "--moe-grouped-gemm" in caught.value.fix
