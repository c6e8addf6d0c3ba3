"""Under ``torch.compile`` values and gradients are those of eager, the losses of routers included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.moe.tiny import MOE, built_layer
from tests.models.tiny import gradients
from torch import Tensor, nn

from graphstep.models.auxiliary_losses import GradientScale, mark_loss

LOSSES: dict[str, Any] = {"moe_aux_loss_coeff": 3.0, "moe_z_loss_coeff": 3.0}
BIASES: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
DROP: dict[str, Any] = {"moe_expert_capacity_factor": 1.0}


class TwoLayers(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.scale = GradientScale()
        # PyTorch's grouped product knows bfloat16 alone while it is compiled.
        self.layers = nn.ModuleList(
            built_layer(replace(MOE, **options), scale=self.scale, dtype=torch.bfloat16) for _ in range(2)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return mark_loss(hidden.float().square().mean(), self.scale)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("extent", "options"), [("whole", {**LOSSES, **BIASES}), ("layers", {**LOSSES, **DROP})])
def test_compiled_equals_eager(extent: str, options: dict[str, Any]) -> None:
    eager, compiled = TwoLayers(options), TwoLayers(options)
    for module in (compiled,) if extent == "whole" else compiled.layers:
        module.compile(backend="aot_eager")
    hidden = torch.randn(2, 12, 32).bfloat16()
    for factor in (0.5, 4.0, 0.25):  # What another backward, or none, left in the scale would show.
        for model in (eager, compiled):
            model.zero_grad()
            (model(hidden) * factor).backward()
        expected = {**gradients(eager), **dict(eager.named_buffers())}
        for name, value in {**gradients(compiled), **dict(compiled.named_buffers())}.items():
            assert (value - expected[name]).norm() <= 0.02 * expected[name].norm(), name
