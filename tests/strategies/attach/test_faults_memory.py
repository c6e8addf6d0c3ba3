"""Known faults, group A: stale pointers and the lifetime of memory."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Loop, twins
from tests.strategies.attach.plain import HIDDEN, LAYERS, Block, Mlp, Stack, attached, built, inputs, num_replays, train
from tests.strategies.models import Decoder
from tests.strategies.runs import differences, steps
from torch import Tensor, nn

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.errors import GraphstepError, StaleAddressError


def captured(model: nn.Module, device: torch.device, **config: Any) -> Any:
    manager = graphstep.attach(model, CudaGraphConfig(impl="local", warmup_steps=1, **config), regions=LAYERS)
    train(model, device, 3)
    assert num_replays(manager) > 0
    return manager


def forward(model: nn.Module, device: torch.device) -> Tensor:
    result: Tensor = model(inputs(device, 70))
    return result


@contextmanager
def right_or_named(name: str) -> Iterator[None]:
    """What is inside gives the right result, or an error that names what moved."""
    try:
        yield
    except StaleAddressError as error:
        assert name in str(error)  # noqa: PT017


@pytest.mark.parametrize("zero", ["none", "zeros"])
def test_b01_gradients_accumulate_over_microbatches(device: torch.device, zero: str) -> None:
    loop = twins(device, steps(5, 4), zero=zero)
    assert loop.num_replays == 2 * 4 * 4


def test_b01_gradients_are_never_memory_of_the_pool(device: torch.device) -> None:
    model = built(Stack, device)
    manager = captured(model, device)
    model.zero_grad(set_to_none=True)
    forward(model, device).backward()
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: gradient.clone() for name, gradient in kept.items()}
    model.zero_grad(set_to_none=True)
    for number in range(3):
        model(inputs(device, number) * 3).backward()
        model.zero_grad(set_to_none=True)
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    manager.close()
    gc.collect()
    filler = [torch.full((HIDDEN, HIDDEN), 9.0, device=device) for _ in range(50)]
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    assert len(filler) == 50


@pytest.mark.parametrize("how", ["another manager", "eviction"])
def test_b02_destroying_one_graph_leaves_the_others_alone(device: torch.device, how: str) -> None:
    def script(loop: Loop) -> None:
        other = built(Stack, device)
        manager = captured(other, device) if loop.graphs and how == "another manager" else None
        if manager is None:
            train(built(Stack, device), device, 3)
        torch.manual_seed(11)
        for length in (6, 6, 6, 9, 9, 9, 4, 4, 4) if how == "eviction" else (6, 6):
            loop.step(1, length=length)
        if manager is not None:
            manager.close()
            del manager
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        filler = [torch.full((64, 64), 7.0, device=device) for _ in range(20)]
        for _ in range(3):
            loop.step(1, length=6)
        del filler

    config = {"max_signatures": 2, "capture_after": 1}
    assert twins(device, script, build=WITH_DROPOUT, config=config).num_replays >= 2 * 4


class Recurrent(Block):
    """Keeps a state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.state)
        self.state.mul_(0.5).add_(y.detach().mean((0, 1)))
        return y


def test_b04_a_state_buffer_that_was_allocated_anew(device: torch.device) -> None:
    model = built(partial(Stack, block=Recurrent), device)
    manager = captured(model, device)
    model.layers[1].state = torch.ones(HIDDEN, device=device)
    with pytest.raises(StaleAddressError, match=r"layers\.1\.state"):
        forward(model, device)
    manager.close()
    expected = built(partial(Stack, block=Recurrent), device)
    expected.load_state_dict(model.state_dict())
    assert torch.equal(forward(model, device), forward(expected, device))


class Derived(nn.Module):
    """Multiplies by a copy of its weight in another layout, made anew when weights are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
        self.transposed = self.weight.detach().t().contiguous()

    def load(self, weight: Tensor, *, in_place: bool) -> None:
        with torch.no_grad():
            self.weight.copy_(weight)
            if in_place:
                self.transposed.copy_(weight.t())
            else:
                self.transposed = weight.t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed + x @ self.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Derived:
        super()._apply(fn, recurse)
        self.transposed = fn(self.transposed)
        return self


@pytest.mark.parametrize("in_place", [True, False])
def test_b05_a_derived_tensor_after_weights_were_loaded(device: torch.device, in_place: bool) -> None:
    build = partial(Stack, block=Derived)
    model, expected = built(build, device), built(build, device)
    manager = captured(model, device)
    train(expected, device, 3)
    weight = torch.randn(HIDDEN, HIDDEN, device=device) / 4
    for each in (model, expected):
        each.layers[0].load(weight, in_place=in_place)
    before = num_replays(manager)
    with right_or_named("layers.0.transposed"):
        assert torch.equal(forward(model, device), forward(expected, device))
    if in_place:
        assert num_replays(manager) == before + 2
    manager.close()


def test_b06_of_ten_parameters_the_one_that_moved_is_named(device: torch.device) -> None:
    model = built(partial(Stack, 2), device)
    manager = captured(model, device)
    old = model.layers[1].mlp.up.weight
    model.layers[1].mlp.up.weight = nn.Parameter(old.detach().clone())
    with pytest.raises(StaleAddressError) as caught:
        forward(model, device)
    assert "layers.1.mlp.up.weight" in str(caught.value)
    for other in ("layers.1.mlp.down", "layers.1.attn", "layers.1.norm", "layers.0."):
        assert other not in caught.value.what
    assert hex(old.data_ptr()) in str(caught.value)
    assert hex(model.layers[1].mlp.up.weight.data_ptr()) in str(caught.value)
    manager.close()


def test_b08_memory_lives_until_its_backward_has_read_it(device: torch.device) -> None:
    build = partial(Decoder, num_layers=4, dropout=0.2)
    loop = twins(device, steps(4, 3), build=build, config={"debug": True})
    assert loop.num_replays == 4 * 3 * 3


class Closure(nn.Module):
    """Reads a tensor that no module owns."""

    def __init__(self, box: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.read: Callable[[], Tensor] = lambda: box[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read()


def test_b09_a_tensor_of_a_closure_that_is_gone(device: torch.device) -> None:
    box = [torch.full((HIDDEN,), 2.0, device=device)]
    model = built(partial(Stack, 1, lambda: Closure(box)), device)
    manager = captured(model, device, debug=True)
    expected = built(partial(Stack, 1, lambda: Closure(box)), device)
    expected.load_state_dict(model.state_dict())
    forward(model, device).backward()
    box[0] = torch.full((HIDDEN,), 3.0, device=device)
    gc.collect()
    with right_or_named("layers.0"):
        assert torch.equal(forward(model, device), forward(expected, device))
    manager.close()


class Assigns(Block):
    """Leaves a tensor on itself, which the loop reads."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.detach().square().mean()
        self.number = y.shape[1]
        return y


def test_b09_an_attribute_that_the_forward_assigns(device: torch.device) -> None:
    """What the loop reads after the call is of this call, or the region is not captured and says why."""
    models = [built(partial(Stack, block=Assigns), device) for _ in range(2)]
    seen: list[list[Tensor]] = [[], []]
    with attached(models[1], LAYERS, policy="auto"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model, losses in zip(models, seen, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                optimizer.zero_grad()
                model(inputs(device, step)).backward()
                losses.append(model.layers[1].loss.clone())
                optimizer.step()
    assert all(map(torch.equal, *seen))


class Broken(nn.Module):
    """Two parts that can be captured, and a product between them that is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(HIDDEN, HIDDEN), Mlp(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(x)
        x = torch.bmm(x, x.transpose(1, 2)) @ x
        result: Tensor = self.mlp(x)
        return result


def test_b10_a_fresh_result_between_two_pieces(device: torch.device) -> None:
    build, regions = partial(Stack, block=Broken), {"layers.*.attn": "attn", "layers.*.mlp": "mlp"}
    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    with attached(model, regions) as manager:
        assert differences(expected, train(model, device, 5, 2)) == []
        assert num_replays(manager) == 4 * 4 * 2


def test_b12_saved_tensors_that_are_offloaded(device: torch.device) -> None:
    """Packed away by hooks around the whole step: right, replayed or not."""
    models = [built(partial(Stack, block=lambda: Block(0.2)), device) for _ in range(2)]
    config = CudaGraphConfig(impl="local", policy="auto")
    found = []
    for model in models:
        torch.manual_seed(4)
        manager = graphstep.attach(model, config, regions=LAYERS) if model is models[1] else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                loss = model(inputs(device, step))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found.append(torch.stack(losses))
        if manager is not None:
            manager.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_b13_moved_away_and_back_between_phases(device: torch.device, what: str) -> None:
    model = built(Stack, device)
    manager = captured(model, device)
    expected = built(Stack, device)
    expected.load_state_dict(model.state_dict())
    for parameter in model.parameters():
        if what == "parameters":
            parameter.data = parameter.data.to("cpu", copy=True)
        else:
            parameter.grad = None
    elsewhere = [torch.zeros(HIDDEN, HIDDEN, device=device) for _ in range(30)]
    for parameter in model.parameters():
        if what == "parameters":
            parameter.data = parameter.data.to(device, copy=True)
        else:
            parameter.grad = torch.zeros_like(parameter)
    if what == "parameters":
        with pytest.raises(StaleAddressError, match=r"layers\.0\."):
            forward(model, device)
    else:
        for each in (model, expected):
            forward(each, device).backward()
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    manager.close()
    assert len(elsewhere) == 30


class Planner:
    """Of a kernel library: allocates what a run reads."""

    def plan(self, number: int, device: torch.device) -> None:
        self.indices = torch.arange(HIDDEN, device=device).roll(number)


class Planned(nn.Module):
    def __init__(self, planner: Planner) -> None:
        super().__init__()
        self.linear, self.planner = nn.Linear(HIDDEN, HIDDEN), planner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x).index_select(-1, self.planner.indices)
        return result


def test_b14_a_plan_that_was_made_anew(device: torch.device) -> None:
    planner = Planner()
    planner.plan(0, device)
    build = partial(Stack, 1, lambda: Planned(planner))
    model = built(build, device)
    manager = captured(model, device, debug=True)
    expected = built(build, device)
    expected.load_state_dict(model.state_dict())
    forward(model, device).backward()
    planner.plan(5, device)
    with right_or_named("layers.0"):
        assert torch.equal(forward(model, device), forward(expected, device))
    manager.close()


class Aliases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.linear(x), x[:, 1:]


def test_b16_a_result_that_is_an_argument(device: torch.device) -> None:
    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        same, y, rest = layer(x)
        return y + same.detach() + rest.detach().mean()

    build = partial(Stack, block=Aliases, call=call)
    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, train(model, device, 5, 2)) == []
        assert num_replays(manager) == 2 * 4 * 2


def test_b16_a_result_that_is_an_argument_and_gets_a_gradient(device: torch.device) -> None:
    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        same, y, _ = layer(x)
        return same + y

    build = partial(Stack, block=Aliases, call=call)
    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, train(model, device, 5, 2)) == []
        assert num_replays(manager) > 0


def test_b17_an_adapter_switch_that_fails_half_way(device: torch.device) -> None:
    model = built(partial(Stack, block=lambda: Adapted(1)), device)
    manager = captured(model, device)

    def switch() -> None:
        model.layers[0].a = nn.Parameter(torch.randn(HIDDEN, 2, device=device))
        raise RuntimeError("no such adapter")

    with pytest.raises(RuntimeError, match="adapter"):
        switch()
    before = num_replays(manager)
    with pytest.raises(StaleAddressError, match=r"layers\.0\.a\b"):
        forward(model, device)
    assert num_replays(manager) == before
    manager.close()


class Adapted(nn.Module):
    """A linear layer with as many low-rank adapters as are on."""

    def __init__(self, num_adapters: int) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.linear.requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.randn(HIDDEN, 2)) for _ in range(2))
        self.num_adapters = num_adapters

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        for _ in range(self.num_adapters):
            y = y + x @ self.a @ self.b.t()
        return y


@pytest.mark.parametrize("when", ["before the capture", "after the capture"])
def test_b18_gradients_set_to_none(device: torch.device, when: str) -> None:
    """What the graph writes and what the optimizer reads is the same memory, whoever dropped or replaced it."""

    def script(loop: Loop) -> None:
        for step in range(6):
            if step == (1 if when == "before the capture" else 3):
                for parameter in loop.model.parameters():
                    parameter.grad = None
            if step == 4:
                for parameter in loop.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            loop.step(2)

    loop = twins(device, script, zero="zeros")
    assert loop.num_replays == 2 * 5 * 2


def test_b21_nothing_of_a_call_is_kept(device: torch.device) -> None:
    """Arguments, losses and gradients of a call die with the loop's own references."""
    model = built(Stack, device)
    manager = captured(model, device)
    for _ in range(2):
        x = inputs(device, 1).requires_grad_()
        loss = model(x)
        loss.backward()
        watched = [weakref.ref(each) for each in (x, loss, x.grad)]
        del x, loss
        gc.collect()
        assert [each() for each in watched] == [None] * 3
    manager.close()


class Counts(Block):
    """Uses a number that is new at each launch."""

    launch = 0

    def forward(self, x: Tensor) -> Tensor:
        self.launch += 1
        return super().forward(x) * (1 + self.launch % 5)


def test_b21_a_value_that_is_new_in_each_call(device: torch.device) -> None:
    expected = train(built(partial(Stack, block=Counts), device), device, 5, 2)
    model = built(partial(Stack, block=Counts), device)
    try:
        with attached(model, LAYERS) as manager:
            trace = train(model, device, 5, 2)
    except GraphstepError as error:
        assert "launch" in str(error)  # noqa: PT017
    else:
        assert differences(expected, trace) == []
        assert manager.report().num_recordings == 0
