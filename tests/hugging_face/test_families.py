"""Every family trains as without graphs, to the last bit, and every layer of it replays."""

from __future__ import annotations

import pytest
import torch
from tests.hugging_face.tiny import FAMILIES, PARTIAL, WITH_EXPERTS, eager_reasons, steps, twins

DENSE = [family for family in FAMILIES if family not in WITH_EXPERTS]


@pytest.mark.parametrize("family", DENSE)
def test_layers_are_captured_whole(device: torch.device, family: str) -> None:
    options = {"attn_pdrop": 0.0} if family == "gpt2" else {}  # see test_dropout
    report = twins(family, device, steps(6), **options)
    num_layers = FAMILIES[family].get("num_hidden_layers", 3)
    assert len(report.rows) == num_layers
    assert all(row.kind == "layer" and row.num_replays == 5 for row in report.rows)
    assert eager_reasons(report) == {"observed"}
    assert report.eager_parts == ()


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_stay_eager_between_graphs(device: torch.device, family: str) -> None:
    report = twins(family, device, steps(6))
    names = [row.name for row in report.rows]
    assert names[-2:] == ["model.layers.2.before_mlp.experts", "model.layers.2.after_mlp.experts"]
    assert all(row.num_replays == 5 for row in report.rows)
    assert [part.name for part in report.eager_parts][-1] == "model.layers.2.mlp.experts"
    # What follows the experts is launched with what comes before the next ones.
    num_with_experts = len(report.eager_parts)
    num_dense = 3 - num_with_experts
    assert sum(row.num_launches for row in report.rows) == 5 * 2 * (num_with_experts + 1 + num_dense)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("modules", [PARTIAL, ("attn",), ("moe_router",)], ids="+".join)
def test_parts_that_are_named(device: torch.device, family: str, modules: tuple[str, ...]) -> None:
    report = twins(family, device, steps(6), modules=modules)
    num_parts = {PARTIAL: 2, ("attn",): 2, ("moe_router",): 3}[modules]
    assert len(report.rows) == 3 * num_parts
    assert all(row.num_replays for row in report.rows)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_inside(device: torch.device, family: str) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report = twins(
        family,
        device,
        steps(6),
        prepare=lambda model: model.to(dtype),
        modules=("attn", "moe"),
        experts_implementation="grouped_mm",
    )
    whole = [row for row in report.rows if row.kind == "layer"]
    assert len(whole) == (2 if family == "deepseek_v3" else 3)
    assert all(row.num_replays == 5 for row in report.rows)


def test_attention_or_mlp_alone(device: torch.device) -> None:
    report = twins("llama", device, steps(6), modules=("attn",))
    assert [part.name for part in report.eager_parts] == [f"model.layers.{n}.mlp" for n in range(3)]
    assert {row.kind for row in report.rows} == {"attn"}
    report = twins("llama", device, steps(6), modules=("mlp",))
    assert [part.name for part in report.eager_parts] == [f"model.layers.{n}.self_attn" for n in range(3)]
    assert all(row.num_replays for row in report.rows)


def test_dropout(device: torch.device) -> None:
    """With a cache, the keys are copied, and the mask of dropout is drawn in another order: so none on both sides."""
    report = twins("gpt2", device, steps(6, use_cache=False), attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    assert all(row.num_replays == 5 for row in report.rows)


def test_merged_layers(device: torch.device) -> None:
    report = twins("qwen3", device, steps(6), config={"merge_layers": 0})
    assert sum(row.num_launches for row in report.rows) == 5 * 2


def test_by_path(device: torch.device) -> None:
    report = twins("llama", device, steps(6), regions={"model.layers.*.mlp": "mlp", "model.norm": "norm"})
    assert len(report.rows) == 4
    assert all(row.num_replays == 5 for row in report.rows)
