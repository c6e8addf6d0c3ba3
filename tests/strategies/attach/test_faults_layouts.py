"""Known faults around arguments whose memory does not hold their values: conjugated and negated views."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, Stack, attached, built, inputs, num_replays, snapshot
from tests.strategies.runs import differences
from torch import Tensor, nn

from graphstep.capture.signature import TensorLayout
from graphstep.capture.static_inputs import static_like


class Rotated(nn.Module):
    """A layer of complex numbers; ``returns_view`` as its result is a conjugated view itself."""

    def __init__(self, returns_view: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, 2) / 8)
        self.returns_view = returns_view

    def forward(self, x: Tensor) -> Tensor:
        y = x @ torch.view_as_complex(self.weight)
        return y.conj() if self.returns_view else y


class Chain(Stack):
    """``views`` chooses, by the step, what is given to the second layer."""

    def __init__(self, returns_view: bool = False, *, is_complex: bool = True) -> None:
        super().__init__(2, partial(Rotated, returns_view) if is_complex else partial(nn.Linear, HIDDEN, HIDDEN))
        self.is_complex, self.num_steps = is_complex, 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x.to(torch.complex64) if self.is_complex else x)
        if self.num_steps % 2:
            y = y.conj() if self.is_complex else torch._neg_view(y)
        y = self.layers[1](y)
        self.num_steps += 1
        rotated = torch.view_as_real(y.resolve_conj() * (1 + 2j)) if self.is_complex else y
        return (rotated + rotated.square()).mean()


@pytest.mark.parametrize("build", [Chain, partial(Chain, True), partial(Chain, is_complex=False)])
@pytest.mark.parametrize("merge_layers", [1, 0])
@pytest.mark.parametrize("on_mismatch", ["recapture", "eager"])
def test_a_view_with_other_values_over_the_same_memory(
    device: torch.device, build: Any, merge_layers: int, on_mismatch: str
) -> None:
    def run(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(list(model.layers.parameters()), lr=0.01)
        trace = []
        for step in range(8):
            optimizer.zero_grad()
            loss = model(inputs(device, step))
            loss.backward()
            trace.append(snapshot(model, device, loss.detach()))
            optimizer.step()
        return trace

    expected = run(built(build, device))
    model = built(build, device)
    with attached(model, {"layers.*": "layer"}, merge_layers=merge_layers, on_mismatch=on_mismatch) as manager:
        assert differences(expected, run(model)) == []
        assert num_replays(manager) >= 8


def test_a_static_tensor_reads_as_its_sample() -> None:
    sample = torch.tensor([1 + 2j, 3 - 1j])
    for view in (sample, sample.conj(), sample.conj().imag, torch._neg_view(torch.arange(3.0))):
        layout = TensorLayout.of(view)
        made = static_like(layout, view)
        assert TensorLayout.of(made) == layout
        assert torch.equal(made, view)
    assert "is_conj" in TensorLayout.of(sample).explain(TensorLayout.of(sample.conj()))
