"""Any nesting of arguments and results of a module written by hand, as its author wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import (
    HIDDEN,
    LAYERS,
    LENGTH,
    Block,
    DecoderLayer,
    Mlp,
    ModelOutput,
    Output,
    Packed,
    Stack,
    attached,
    built,
    inputs,
    num_replays,
    same,
    train,
)
from tests.strategies.runs import differences
from torch import Tensor, nn

import graphstep


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, /, scale: Tensor, *, bias: Tensor | None = None, flag: bool = True) -> Tensor:
        y = self.linear(x) * scale
        if bias is not None:
            y = y + bias
        return y if flag else -y


class Nested(nn.Module):
    """A dictionary of tuples in, the same out, changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, state: dict[str, Any], factors: list[tuple[Tensor, float]]) -> dict[str, Any]:
        hidden = self.linear(state["hidden"])
        for tensor, weight in factors:
            hidden = hidden + tensor * weight
        return {"hidden": hidden, "pair": (hidden * 2, None), "note": state["note"], "nested": [{"x": hidden.sum(-1)}]}


class Named(Keywords):
    def forward(self, x: Tensor, packed: Packed | None = None) -> Output:  # type: ignore[override]
        y = self.linear(x)
        if packed is not None:
            y = y * packed.offsets + packed.longest
        return Output(y, y.sum(-1), "a note")


class Structured(Keywords):
    def forward(self, x: Tensor, past: tuple[Tensor, ...] | None = None) -> ModelOutput:  # type: ignore[override]
        y = self.linear(x) if past is None else self.linear(x) + past[0] * past[1]
        return ModelOutput(y, y * 2, None if past is None else (past[1], y))


def call_keywords(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    result: Tensor = layer(x, x.detach().mean(-1, keepdim=True), bias=x[:, :1] if index else None, flag=bool(index))
    return result


def call_out_of_order(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    result: Tensor = layer(x, flag=True, bias=None, scale=x.detach().abs())
    return result


def call_nested(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    state = {"note": "fixed", "hidden": x}
    result = layer(state, [(x.detach(), 0.5), (x * 2, -1.0)])
    assert result["note"] == "fixed"
    assert result["pair"][1] is None
    assert result.keys() == {"hidden", "pair", "note", "nested"}
    total: Tensor = result["hidden"] + result["pair"][0] + result["nested"][0]["x"].unsqueeze(-1)
    return total


def call_named(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    result = layer(x, Packed(x.detach().sum(-1, keepdim=True), 3) if index else None)
    assert isinstance(result, Output)
    assert result.note == "a note"
    return result.hidden + result.score.unsqueeze(-1)


def call_structured(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    result = layer(x, past=(x * 0.5, x.detach()) if index else None)
    assert type(result) is ModelOutput
    assert (result.past is None) == (not index)
    return result.hidden + result.logits + (0 if result.past is None else result.past[1])


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor, int], Tensor]]] = {
    "keywords": (Keywords, call_keywords),
    "keywords out of order": (Keywords, call_out_of_order),
    "nested": (Nested, call_nested),
    "named tuples": (Named, call_named),
    "dataclasses": (Structured, call_structured),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_and_results(device: torch.device, name: str) -> None:
    block, call = CALLS[name]
    found = same(device, partial(Stack, block=block, call=call), replays=2 * 4 * 2)
    assert sum(found.values()) == 2 * 2


def call_decoder_layer(layer: nn.Module, x: Tensor, index: int, *, mask: bool = True, attentions: bool = False) -> Any:
    length = x.shape[1]
    positions = torch.arange(length, device=x.device)
    angles = positions[:, None] / torch.arange(1, HIDDEN + 1, device=x.device)
    causal = torch.full((length, length), -1e4, device=x.device, dtype=x.dtype).triu(1)
    result = layer(
        x,
        attention_mask=causal if mask else None,
        position_ids=positions[None],
        past_key_value=None,
        output_attentions=attentions,
        use_cache=False,
        cache_position=positions,
        position_embeddings=(angles.cos().to(x.dtype), angles.sin().to(x.dtype)),
        scaling=HIDDEN**-0.5,
    )
    assert isinstance(result, tuple)
    assert len(result) == 1 + attentions
    return result[0] + (result[1].sum() if attentions else 0)


@pytest.mark.parametrize("attentions", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_decoder_layer(device: torch.device, dropout: float, mask: bool, attentions: bool) -> None:
    call = partial(call_decoder_layer, mask=mask, attentions=attentions)
    build = partial(Stack, block=lambda: DecoderLayer(dropout), call=call)
    same(device, build, replays=2 * 4 * 2)


@pytest.mark.parametrize("regions", [{"layers.*.mlp": "mlp"}, {"layers.*.o": "attn"}], ids=str)
def test_a_part_of_a_decoder_layer(device: torch.device, regions: Any) -> None:
    build = partial(Stack, block=lambda: DecoderLayer(0.2), call=call_decoder_layer)
    same(device, build, regions=regions, replays=2 * 4 * 2)


def test_values_that_are_no_tensors_are_part_of_the_signature(device: torch.device) -> None:
    """A flag, a number in a list, and None in place of a tensor: never the wrong graph."""
    calls = {"number": 0}

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        calls["number"] += 1
        turn = calls["number"] // 4 % 3
        bias = x.detach()[:, :1] if turn == 2 else None
        result: Tensor = layer(x, x.detach(), bias=bias, flag=turn == 0)
        return result

    build = partial(Stack, block=Keywords, call=call)
    eager, graphed = built(build, device), built(build, device)
    calls["number"] = 0
    expected = train(eager, device, 12, 2)
    with attached(graphed, LAYERS) as manager:
        calls["number"] = 0
        assert differences(expected, train(graphed, device, 12, 2)) == []
        assert num_replays(manager) > 0


def test_results_without_gradient(device: torch.device) -> None:
    """Integers, a mask, and what was detached come back as they do eagerly."""

    class Routes(Keywords):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            y = self.linear(x)
            top = y.detach().topk(2, -1)
            return y, top.indices, y > 0, y.detach()

    seen: list[Any] = []

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        y, indices, mask, detached = layer(x)
        seen.append((indices.clone(), mask.clone(), detached.clone()))
        assert [t.requires_grad for t in (y, indices, mask, detached)] == [True, False, False, False]
        assert (indices.dtype, mask.dtype) == (torch.int64, torch.bool)
        return y.gather(-1, indices).sum(-1, keepdim=True) + torch.where(mask, y, detached)

    same(device, partial(Stack, block=Routes, call=call), replays=2 * 4 * 2)
    half = len(seen) // 2
    for mine, theirs in zip(seen[:half], seen[half:], strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_a_result_that_is_not_used(device: torch.device) -> None:
    """Only some of the results get a gradient."""

    class Two(Keywords):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = self.linear(x)
            return y, y.exp()

    same(device, partial(Stack, block=Two, call=lambda layer, x, index: layer(x)[0]), replays=2 * 4 * 2)


def test_results_used_in_turns(device: torch.device) -> None:
    """Which result gets a gradient changes from step to step."""

    class Two(Keywords):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = self.linear(x)
            return y, y.sin()

    turn = {"number": 0}

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        result: Tensor = layer(x)[turn["number"] % 2]
        return result

    same(device, partial(Stack, block=Two, call=call), before=lambda step: turn.update(number=step), config=AUTO)


AUTO = {"policy": "auto"}


def test_gradients_of_the_input(device: torch.device) -> None:
    """The first region's argument is a leaf that wants its gradient."""
    found = []
    for graphs in (False, True):
        model = built(partial(Stack, block=Block), device)
        manager = graphstep.attach(model, regions={"inp": "layer", **LAYERS}) if graphs else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients = []
        for step in range(5):
            x = inputs(device, step).requires_grad_()
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            gradients.append(x.grad)
        found.append(gradients)
        if manager is not None:
            assert num_replays(manager) == 3 * 4
            manager.close()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("shape", [(HIDDEN,), (LENGTH, HIDDEN), (1, 1, 1, HIDDEN)], ids=str)
def test_other_numbers_of_dimensions(device: torch.device, shape: tuple[int, ...]) -> None:
    def feed(number: int) -> Tensor:
        return inputs(device, number).flatten()[: math.prod(shape)].view(shape)

    same(device, partial(Stack, block=Mlp), feed=feed, replays=2 * 4 * 2)


def test_arguments_that_are_views_of_each_other(device: torch.device) -> None:
    """The same tensor twice, a slice of it, and an expanded one."""

    class Several(Keywords):
        def forward(self, x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
            result: Tensor = self.linear(x * y) + z + w
            return result

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        result: Tensor = layer(x, x, x[:, :1], x.detach()[:1, :1].expand(x.shape))
        return result

    # Not bitwise: parts of the gradient of one tensor are summed in an order that is up to autograd.
    losses = []
    for graphs in (False, True):
        model = built(partial(Stack, block=Several, call=call), device)
        manager = graphstep.attach(model, regions=LAYERS) if graphs else None
        losses.append(torch.stack([taken["losses"] for taken in train(model, device, 5, 2)]))
        if manager is not None:
            assert num_replays(manager) == 2 * 4 * 2
            manager.close()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
