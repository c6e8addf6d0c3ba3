"""Programs that are no plain chain of layers: right, bit for bit where sums have the same order, or refused."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder, Layer, in_order, run_microbatches
from tests.strategies.runs import Run, compared, steps
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graphstep.errors import CaptureError

LOCAL = "local"


def loss_of(model: Decoder, x: Tensor, labels: Tensor) -> Tensor:
    logits = functional.linear(model.norm(x), model.embedding.weight)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Skip(Decoder):
    """The results of layers are used by the next one and by others."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        first = self.layers[0](x)
        second = self.layers[1](first)
        return loss_of(self, self.layers[2](second + first) + x, labels)


@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["layers", "attn"])
@pytest.mark.parametrize("forward_backward", [run_microbatches, in_order("ffbfbb")], ids=["one by one", "in flight"])
def test_skip_connections(device: torch.device, modules: Any, forward_backward: Any) -> None:
    """Not bitwise: a layer sums the parts of its input's gradient before those of other consumers are added."""
    runs = []
    for impl in ("none", LOCAL):
        run = Run(device, impl, build=partial(Skip, 3, 0.2), modules=modules, forward_backward=forward_backward)
        for _ in range(4):
            run.step(3)
        runs.append(run)
    eager, graphed = ([taken["losses"] for taken in run.trace] for run in runs)
    assert runs[1].num_replays == 3 * 3 * 3
    torch.testing.assert_close(graphed, eager, rtol=1e-5, atol=1e-6)
    runs[1].strategy.close()


class Stops(Decoder):
    """The first layer gets no gradient."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first = self.layers[0](self.embedding(tokens))
        return loss_of(self, self.layers[1](first.detach()), labels)


def test_a_gradient_that_stops(device: torch.device) -> None:
    run = compared(device, LOCAL, steps(4, 2), build=partial(Stops, 2, 0.2))
    assert run.reasons() == {"observed": 4, "no gradient in the first step": 6}
    assert run.num_replays == 3 * 2


ORDERS = ((0, 1, 2), (0, 2), (1, 2), (2,), (0, 1), (2, 1, 0), (1, 0, 2))


class Varies(Decoder):
    """Another choice and order of layers in each forward."""

    def __init__(self, start: int) -> None:
        super().__init__(3, 0.2)
        self.num_calls = start

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.num_calls += 1
        self.order = ORDERS[self.num_calls % len(ORDERS)]
        return super().forward(tokens, labels)


@pytest.mark.parametrize("start", range(len(ORDERS)))
@pytest.mark.parametrize("order", ["fbfb", "ffbb", "ffBB"])
def test_layers_left_out_and_in_another_order(device: torch.device, start: int, order: str) -> None:
    """What the memory of the captured order does not allow runs eagerly."""
    run = compared(device, LOCAL, steps(7, 2), build=partial(Varies, start), forward_backward=in_order(order))
    assert run.num_replays > 0


class Recomputed(Decoder):
    reentrant = False

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return loss_of(self, x, labels)


class RecomputedReentrant(Recomputed):
    reentrant = True


@pytest.mark.parametrize("build", [Recomputed, RecomputedReentrant])
@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["layers", "attn"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recompute_around_layers(device: torch.device, build: Any, modules: Any, dropout: float) -> None:
    """The form that works on saved tensors runs eagerly; the reentrant one replays when it recomputes."""
    run = compared(device, LOCAL, steps(4, 2), build=partial(build, 2, dropout), modules=modules, policy="auto")
    if build is Recomputed:
        assert run.reasons() == {"recompute or offloading of saved tensors": 2 * 2 * 2 * 4}
    else:
        assert run.num_replays == 2 * 3 * 2


def test_recompute_around_layers_is_refused_where_graphs_are_required(device: torch.device) -> None:
    run = Run(device, LOCAL, build=partial(Recomputed, 2, 0.0))
    with pytest.raises(CaptureError, match=r"torch\.utils\.checkpoint") as caught:
        run.step(1)
    assert caught.value.where == "layers.0"
    run.strategy.close()
    # Before torch 2.13 a checkpoint whose function has failed stays active as long as the error is kept.
    del caught
    gc.collect()


class RecomputedMlp(Layer):
    reentrant = False

    def _mlp(self, x: Tensor, *context: Tensor) -> Tensor:
        return checkpoint(super()._mlp, x, *context, use_reentrant=self.reentrant)


class RecomputedMlpReentrant(RecomputedMlp):
    reentrant = True


def test_recompute_inside_a_layer(device: torch.device) -> None:
    """Parameters that only the recomputed part uses get their gradients."""
    run = compared(device, LOCAL, steps(4, 2), build=partial(Decoder, layer=RecomputedMlp))
    assert run.num_replays == 2 * 3 * 2


@pytest.mark.parametrize(
    ("layer", "dropout", "text"),
    [(RecomputedMlp, 0.3, "recompute with dropout"), (RecomputedMlpReentrant, 0.0, "use_reentrant")],
)
def test_recompute_that_two_recordings_cannot_do(device: torch.device, layer: Any, dropout: float, text: str) -> None:
    """Refused with a reason, and training goes on eagerly."""

    def script(run: Run) -> None:
        for step in range(3):
            if step == 0 and run.report.engine != "none":
                with pytest.raises(CaptureError, match=text):
                    run.step(2)
            else:
                run.step(2)

    run = compared(device, LOCAL, script, build=partial(Decoder, 2, dropout, layer=layer))
    assert run.num_replays == 0


class WritesIntoArgument(Layer):
    def _mix(self, x: Tensor, *context: Tensor) -> Tensor:
        x.add_(1.0)
        return super()._mix(x, *context)


@pytest.mark.parametrize("trains_embedding", [True, False])
def test_a_region_that_writes_into_its_argument_is_refused(device: torch.device, trains_embedding: bool) -> None:
    def build() -> Decoder:
        model = Decoder(layer=WritesIntoArgument)
        model.embedding.weight.requires_grad_(trains_embedding)
        return model

    def script(run: Run) -> None:
        for step in range(3):
            if step == 0 and run.report.engine != "none":
                with pytest.raises(CaptureError, match=r"in-place|writes into its arguments") as caught:
                    run.step(1)
                assert "layers.0" in caught.value.where
            else:
                run.step(1)

    assert compared(device, LOCAL, script, build=build).num_replays == 0
