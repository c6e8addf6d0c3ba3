"""Known faults, group B: what warmup and capture leave behind, and what they assume."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Loop, twins
from tests.strategies.attach.plain import HIDDEN, LAYERS, Block, Stack, attached, built, inputs, num_replays, train
from tests.strategies.runs import differences, steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphstep
from graphstep.config import CudaGraphConfig


class Biased(Block):
    """A balance that training moves, and that evaluation clears."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += x.shape[0] * x.shape[1]
            self.bias += x.detach().mean((0, 1))
        else:
            self.bias.zero_()
        return super().forward(x) + self.bias


@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_b22_counters_and_modes_are_those_of_eager_training(device: torch.device, warmup_steps: int) -> None:
    build = partial(Stack, block=Biased)
    model, expected = built(build, device), built(build, device)
    with attached(model, LAYERS, warmup_steps=warmup_steps) as manager:
        for each in (expected, model):
            for module in each.modules():
                module.train(not isinstance(module, nn.LayerNorm))
        traces = [train(each, device, 5, 3) for each in (expected, model)]
        assert differences(*traces) == []
        assert [m.training for m in model.modules()] == [m.training for m in expected.modules()]
        assert num_replays(manager) == 2 * 4 * 3
    assert int(model.layers[0].count) == 5 * 3 * 2 * 6


class Lengths(nn.Module):
    """Adds one to a tensor of the caller in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("lengths", torch.zeros(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.lengths += 1
        return self.linear(x) / self.lengths


def test_b24_an_update_in_place_happens_once_a_call(device: torch.device) -> None:
    build = partial(Stack, block=Lengths)
    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, train(model, device, 5, 2)) == []
        assert num_replays(manager) == 2 * 4 * 2
        assert float(model.layers[0].lengths[0]) == 5 * 2


class Cached(nn.Module):
    """Writes its input into a cache whose first row is padding, and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("cache", torch.zeros(4, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[1] = x.detach().mean((0, 1))
        return self.linear(x) * torch.log1p(self.cache.abs()).sum()


def test_b25_capture_leaves_nothing_in_caches(device: torch.device) -> None:
    model = built(partial(Stack, block=Cached), device)
    with attached(model, LAYERS, warmup_steps=3) as manager:
        train(model, device, 1)
        before = [layer.cache.clone() for layer in model.layers]
        manager.end_step()
        assert manager.report().num_recordings == 4
        assert all(torch.equal(layer.cache, old) for layer, old in zip(model.layers, before, strict=True))
        train(model, device, 2)
        for layer in model.layers:
            assert torch.isfinite(layer.cache).all()
            assert not layer.cache[[0, 2, 3]].any()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_b26_casts_of_autocast_are_those_of_the_step(device: torch.device, inside: bool, cached: bool) -> None:
    """One cast for all microbatches of a step, or one a forward: never one of another step."""

    def script(loop: Loop) -> None:
        for _ in range(5):
            loop.optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cached, enabled=not inside):
                for _ in range(2):
                    loop.autocast = torch.bfloat16 if inside else None
                    loop.note(loop.forward_backward([loop.batch()]))
            loop.optimizer.step()

    loop = twins(device, script, build=WITH_DROPOUT)
    assert loop.num_replays > 0


@pytest.mark.parametrize("merge_layers", [1, 0])
def test_b26_captured_by_a_call_under_autocast(device: torch.device, merge_layers: int) -> None:
    """A signature without autocast has a backward without autocast, whoever made the call that captured it."""

    def script(loop: Loop) -> None:
        for autocast in (None, torch.bfloat16, None, None):
            loop.autocast = autocast
            loop.step(1)

    loop = twins(device, script, build=WITH_DROPOUT, config={"merge_layers": merge_layers})
    assert loop.num_replays == 2 * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_b28_called_in_another_mode_than_captured(device: torch.device, mode: Any) -> None:
    build = partial(Stack, block=lambda: Block(0.3))
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        train(model, device, 3)
        before = num_replays(manager)
        expected = built(build, device)
        expected.load_state_dict(model.state_dict())
        results = []
        for each in (model, expected):
            torch.manual_seed(6)
            with mode():
                results.append(each(inputs(device, 9)).clone())
        assert torch.equal(*results)
        assert not results[0].requires_grad
        train(model, device, 1)
        assert num_replays(manager) >= before + 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_b28_a_step_that_ends_in_another_mode(device: torch.device, mode: Any) -> None:
    def script(loop: Loop) -> None:
        for _ in range(4):
            loop.step(1)
            if loop.manager is not None:
                with mode():
                    loop.manager.end_step()

    assert twins(device, script, build=WITH_DROPOUT).num_replays == 2 * 3


@pytest.mark.parametrize("ends_steps", [False, True])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_b29_any_number_of_warmups(device: torch.device, warmup_steps: int, ends_steps: bool) -> None:
    config = {"warmup_steps": warmup_steps}
    loop = twins(device, steps(4, 2), build=WITH_DROPOUT, config=config, ends_steps=ends_steps)
    assert loop.num_replays == 2 * 3 * 2


class Recomputes(nn.Module):
    """Of its two weights one is used in the recomputed part only."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden + checkpoint(lambda y: self.second(y).tanh(), hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_b30_parameters_of_recomputed_parts_get_their_gradients(device: torch.device, reentrant: bool) -> None:
    """Captured, or run eagerly with a reason: right in any case."""
    build = partial(Stack, block=lambda: Recomputes(reentrant))
    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    manager = graphstep.attach(model, CudaGraphConfig(impl="local", policy="auto"), regions=LAYERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert differences(expected, train(model, device, 5, 2)) == []
    for row in manager.report().rows:
        assert row.num_replays == 4 * 2 or "use_reentrant" in row.why_not_captured
    assert reentrant or num_replays(manager) > 0
    assert model.layers[0].second.weight.grad is not None
    manager.close()


class Lazy(nn.Module):
    """Makes a table and picks a kernel when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.kernel = ""

    def forward(self, x: Tensor) -> Tensor:
        if not self.kernel:
            self.kernel = "tuned" if float(x.detach().sum()) > -1e9 else "plain"
            self.table = torch.arange(HIDDEN, device=x.device) / HIDDEN
        result: Tensor = self.linear(x) * self.table
        return result


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_b32_what_the_first_call_sets_up(device: torch.device, warmup_steps: int) -> None:
    """The observed step is that call, whatever the number of warmups."""
    build = partial(Stack, block=Lazy)
    expected = train(built(build, device), device, 5)
    model = built(build, device)
    with attached(model, LAYERS, warmup_steps=warmup_steps) as manager:
        assert differences(expected, train(model, device, 5)) == []
        assert num_replays(manager) == 2 * 4


def test_b32_what_a_later_call_sets_up(device: torch.device) -> None:
    """Set up anew between steps, the next call reads values again."""
    build = partial(Stack, block=Lazy)
    models = [built(build, device) for _ in range(2)]

    def reset(model: nn.Module, step: int) -> None:
        if step == 3:
            model.layers[1].kernel = ""

    expected = train(models[0], device, 5, before=partial(reset, models[0]))
    with attached(models[1], LAYERS, policy="auto"):
        try:
            trace = train(models[1], device, 5, before=partial(reset, models[1]))
        except graphstep.StaleAddressError as error:
            assert "layers.1" in str(error)  # noqa: PT017
        else:
            assert differences(expected, trace) == []
