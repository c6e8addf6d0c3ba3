"""What of a model's layers nobody asked to capture, and what was asked for and no layer has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.strategies.moe_models import DROPLESS, experts_model
from tests.strategies.runs import Run

import graphstep
from graphstep.config import CudaGraphConfig, CudaGraphModule
from graphstep.errors import ConfigError
from graphstep.strategies.eager_parts import eager_parts, in_no_layer

EXPERTS = ("router", "preprocess", "experts", "postprocess")


def _modules(text: str) -> tuple[CudaGraphModule, ...]:
    return tuple(map(CudaGraphModule, text.split()))


@pytest.mark.parametrize(
    ("letters", "modules", "names"),
    [
        ("ED", "attn moe_router moe_preprocess", ["layers.0.experts", "layers.1.mlp"]),
        ("ED", "attn moe mlp", []),
        ("E", "moe", ["layers.0.attention"]),
        ("DE", "mlp", ["layers.0.attention", "layers.1.attention", *(f"layers.1.{name}" for name in EXPERTS)]),
        ("M*-e", "mamba", ["layers.1.attention", "layers.2.mlp", *(f"layers.3.{name}" for name in EXPERTS)]),
        ("E", "", []),
    ],
)
def test_eager_parts(letters: str, modules: str, names: list[str]) -> None:
    found = eager_parts(experts_model(DROPLESS, letters), _modules(modules))
    assert [part.name for part in found] == names
    assert all(modules in part.why for part in found)


@pytest.mark.parametrize(
    ("letters", "modules", "missing"),
    [
        ("EE", "attn mlp", ["mlp"]),
        ("DD", "attn moe_router moe_preprocess", ["moe_router", "moe_preprocess"]),
        ("ED", "attn mlp moe", []),
        ("M*", "mamba attn", []),
        ("DD", "mamba mlp", ["mamba"]),
    ],
)
@pytest.mark.parametrize("policy", ["required", "auto"])
def test_modules_that_no_layer_has(letters: str, modules: str, missing: list[str], policy: str) -> None:
    model, named = experts_model(DROPLESS, letters), _modules(modules)
    problem = in_no_layer(model, named)
    assert (problem is not None) == bool(missing)
    config = CudaGraphConfig(impl="local", modules=named, policy=policy)
    if problem is None:
        graphstep.attach(model, config).close()
        return
    assert ", ".join(missing) in problem.what
    with pytest.raises(ConfigError) as caught:
        graphstep.attach(model, config)
    assert [each.code for each in caught.value.problems] == ["module-in-no-layer"]
    assert "forward" not in vars(model.layers[0])


def test_the_report_tells_them(device: torch.device) -> None:
    run = Run(device, "local", build=lambda: experts_model(DROPLESS, "EDED"), modules=["attn"])
    run.step(1)
    report: Any = run.report
    text = " ".join(str(report).split())
    assert "eager, layers.1.mlp, layers.3.mlp: mlp is not among the modules attn" in text
    parts = report.to_json()["eager_parts"]
    assert {part["kind"] for part in parts} == {"mlp", "moe_router", "moe_preprocess", "moe"}
    run.strategy.close()
