"""``debug``: memory is poisoned when it dies, and every address is checked before every replay."""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Frozen, Loop, RecomputedLayers, TiedWeights, schedule, twins
from tests.strategies.attach.plain import HIDDEN, LAYERS, Block, Stack, attached, built, inputs, num_replays, train
from tests.strategies.models import Decoder
from tests.strategies.runs import differences, steps
from torch import Tensor, nn

from graphstep.capture.reasons import EagerReason
from graphstep.errors import StaleAddressError

DEBUG = {"debug": True}


@pytest.mark.filterwarnings("ignore:.*activation recompute")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("order", ["fbfbfb", "fffbbb", "ffbfbb", "fffBBB"])
@pytest.mark.parametrize("build", [Decoder, WITH_DROPOUT, Frozen, TiedWeights, RecomputedLayers])
def test_results_stay_the_same(device: torch.device, build: Any, order: str, dtype: torch.dtype) -> None:
    """Nothing that a replay reads was poisoned before."""

    def script(loop: Loop) -> None:
        for _ in range(4):
            loop.step(3)
            loop.evaluate(1)

    loop = twins(device, script, build=build, config={**DEBUG, "policy": "auto"}, schedule=schedule(order), dtype=dtype)
    assert loop.num_replays >= 2 * 3 * 3 or (build is RecomputedLayers and EagerReason.RECOMPUTE in loop.reasons())


@pytest.mark.parametrize("merge_layers", [1, 2, 0])
@pytest.mark.parametrize("modules", [(), ("attn",), ("mlp",), ("attn", "mlp")], ids=lambda m: " ".join(m) or "layers")
def test_parts_and_merged_layers(device: torch.device, modules: Any, merge_layers: int) -> None:
    config = {**DEBUG, "modules": modules, "merge_layers": merge_layers}
    build = partial(Decoder, num_layers=3, dropout=0.2)
    assert twins(device, steps(4, 2), build=build, config=config).num_replays > 0


def test_several_lengths(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        for length in (6, 9, 9, 9, 4, 4, 4, 6):
            loop.step(2, length=length)

    config = {**DEBUG, "max_signatures": 2, "capture_after": 1}
    loop = twins(device, script, build=WITH_DROPOUT, config=config, schedule=schedule("ffbb", "fbfb"))
    assert loop.num_replays > 0


def test_results_that_the_caller_keeps_are_not_poisoned(device: torch.device) -> None:
    """The memory of what is still held is not dead."""
    kept: list[list[Tensor]] = []
    for debug in (False, True):
        model = built(partial(Stack, block=Block), device)
        held: list[Tensor] = []
        for layer in model.layers:
            layer.register_forward_hook(lambda module, args, out, held=held: held.append(out.detach()))
        with attached(model, LAYERS, debug=debug, policy="required" if debug else "off"):
            train(model, device, 4, 2)
        kept.append(held)
    assert len(kept[0]) == 2 * 4 * 2
    assert all(map(torch.equal, *kept))
    assert all(torch.isfinite(each).all() for each in kept[1])


def floats_at(address: int, number: int) -> Tensor:
    """What is in memory now, whoever owns it."""
    return torch.tensor(list((ctypes.c_float * number).from_address(address)))


def test_memory_of_a_dropped_result_is_poisoned() -> None:
    """On the CPU, where memory can be looked at without a tensor that would keep it alive."""
    device = torch.device("cpu")
    model = built(partial(Stack, 3, Block), device)
    places: list[tuple[int, int]] = []
    model.layers[1].register_forward_hook(lambda module, args, out: places.append((out.data_ptr(), out.numel())))
    with attached(model, LAYERS, debug=True) as manager:
        train(model, device, 3)
        places.clear()
        loss = model(inputs(device, 1))
        assert num_replays(manager) == 3 * 3
        assert torch.isfinite(floats_at(*places[0])).all()
        loss.backward()
        del loss
        gc.collect()
        manager.end_step()
        assert torch.isnan(floats_at(*places[0])).all()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("layers.1.mlp.up.weight", "mlp.up.weight"),
        ("layers.1.attn.bias", "attn.bias"),
        ("layers.1.norm.weight", "norm.weight"),
    ],
)
def test_a_parameter_that_moved_is_named(device: torch.device, name: str, path: str) -> None:
    """Nothing was replayed; where it moved from and to is said."""
    model = built(Stack, device)
    with attached(model, LAYERS, debug=True) as manager:
        train(model, device, 3)
        replays = num_replays(manager)
        parameter = model.layers[1].get_parameter(path)
        old = parameter.data_ptr()
        parameter.data = parameter.data.clone()
        with pytest.raises(StaleAddressError) as caught:
            model(inputs(device, 1)).backward()
        for text in (name, hex(old), hex(parameter.data_ptr())):
            assert text in str(caught.value)
        assert num_replays(manager) <= replays + 1


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(HIDDEN))
        self.table = torch.ones(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale * self.table.to(x.device))


@pytest.mark.parametrize("what", ["scale", "table"])
def test_another_tensor_that_moved_is_named(device: torch.device, what: str) -> None:
    """A buffer is refused; a tensor that is a plain attribute makes its region run eagerly."""
    model = built(partial(Stack, block=Scaled), device)
    for layer in model.layers:
        layer.table = layer.table.to(device)
    with attached(model, LAYERS, debug=True) as manager:
        train(model, device, 3)
        setattr(model.layers[0], what, torch.full((HIDDEN,), 2.0, device=device))
        if what == "scale":
            with pytest.raises(StaleAddressError, match=r"layers\.0\.scale"):
                model(inputs(device, 1)).backward()
        else:
            replayed = model(inputs(device, 1))
            row = manager.report().rows[0]
            assert row.eager_calls[EagerReason.CHANGED_ATTRIBUTE] == 1
            assert row.last_detail == "layers.0.table"
    if what == "table":
        assert torch.equal(replayed, model(inputs(device, 1)))


def test_a_parameter_that_moves_between_forward_and_backward(device: torch.device) -> None:
    """The backward is not replayed on memory that is gone."""
    model = built(Stack, device)
    with attached(model, LAYERS, debug=True):
        train(model, device, 3)
        loss = model(inputs(device, 1))
        parameter = model.layers[0].mlp.down.weight
        parameter.data = parameter.data.clone()
        with pytest.raises(StaleAddressError, match=r"layers\.0\.mlp\.down\.weight"):
            loss.backward()


def test_gradients_that_were_replaced_are_fine(device: torch.device) -> None:
    """They are no captured address: the library follows them."""
    models = [built(Stack, device) for _ in range(2)]

    def replace(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if step % 2 else None

    expected = train(models[0], device, 5, 2, before=partial(replace, models[0]))
    with attached(models[1], LAYERS, debug=True) as manager:
        assert differences(expected, train(models[1], device, 5, 2, before=partial(replace, models[1]))) == []
        assert num_replays(manager) == 2 * 4 * 2
