"""What loops and models do around and to captured modules: the same bits as without graphs, or a named refusal."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import (
    HIDDEN,
    LAYERS,
    Block,
    Mlp,
    Stack,
    attached,
    built,
    inputs,
    num_replays,
    reasons,
    same,
    train,
)
from tests.strategies.runs import differences
from torch import Tensor, nn
from torch.nn import functional

import graphstep
from graphstep.errors import CaptureError, GraphstepError


def test_nobody_keeps_the_manager(device: torch.device) -> None:
    """The graphs live as long as the model does."""
    model = built(Stack, device)
    watched = weakref.ref(graphstep.attach(model, regions=LAYERS))
    expected = train(built(Stack, device), device, 4)
    assert differences(expected, train(model, device, 4)) == []
    manager = watched()
    assert manager is not None
    assert num_replays(manager) == 2 * 3
    manager.close()


def test_a_dropped_model_is_freed(device: torch.device) -> None:
    model = built(Stack, device)
    manager = graphstep.attach(model, regions=LAYERS)
    train(model, device, 3)
    watched = [weakref.ref(each) for each in (model, manager, model.layers[0].attn.weight)]
    del model, manager
    gc.collect()
    assert [each() for each in watched] == [None] * 3


def changes_in_place(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    y = layer(x)
    y += 1
    return functional.relu_(y) if index else y.mul_(0.5)


def views(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    return torch.cat([part.transpose(0, 1).contiguous().transpose(0, 1) for part in layer(x).split(2, 1)], 1)


def not_contiguous(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    result: Tensor = layer(x.transpose(0, 1)).transpose(0, 1)
    return result


def drops_a_result(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    layer(x.detach() * 2)
    result: Tensor = layer(x)
    return result


def scales_the_gradient(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    y: Tensor = layer(x)
    y.register_hook(lambda gradient: gradient * 0.5)
    return y


def detaches_the_argument(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    result: Tensor = layer(x.detach() if index else x)
    return result


def cuts_the_gradient(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    y = layer(x)
    return y.detach() + x if index == 0 else y


CALLS = [
    changes_in_place,
    views,
    not_contiguous,
    drops_a_result,
    scales_the_gradient,
    detaches_the_argument,
    cuts_the_gradient,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_what_is_done_with_a_layer(device: torch.device, call: Any) -> None:
    same(device, partial(Stack, block=lambda: Block(0.2), call=call))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, y, y[:, :2]


def test_one_tensor_returned_twice(device: torch.device) -> None:
    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        first, second, _ = layer(x)
        return first if index else second

    same(device, partial(Stack, block=Twice, call=call), replays=2 * 4 * 2)


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dictionary and a dataclass in one, as a well-known library returns."""

    hidden: Any = None
    scores: Any = None
    past: Any = None

    def __post_init__(self) -> None:
        first, *others = (getattr(self, field.name) for field in fields(self))
        if isinstance(first, dict) and others == [None, None]:
            self.hidden = None
            for name, value in first.items():
                setattr(self, name, value)
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class ReturnsOutput(Twice):
    def forward(self, x: Tensor, past: ModelOutput | None = None) -> ModelOutput:  # type: ignore[override]
        y = self.linear(x)
        if past is not None:
            y = y + past["hidden"]
        return ModelOutput(hidden=y, scores=y.sum(-1))


def test_a_dictionary_that_is_a_dataclass(device: torch.device) -> None:
    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        result = layer(x, ModelOutput(hidden=x.detach()) if index else None)
        assert type(result) is ModelOutput
        assert list(result) == ["hidden", "scores"]
        assert result["hidden"] is result.hidden
        assert result.past is None
        return result.hidden + result["scores"].unsqueeze(-1)

    same(device, partial(Stack, block=ReturnsOutput, call=call), config={"policy": "auto"})


class LayerDrop(Stack):
    """Leaves layers out at random."""

    def __init__(self) -> None:
        super().__init__(4, lambda: Block(0.1))
        self.dice = random.Random(7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            if self.dice.random() < 0.7:
                x = layer(x)
        result: Tensor = self.out(x).square().mean()
        return result


def test_layers_left_out_at_random(device: torch.device) -> None:
    same(device, LayerDrop, num_steps=8)


def test_an_argument_with_and_without_gradient_in_turns(device: torch.device) -> None:
    turn = {"step": 0}

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        result: Tensor = layer(x.detach() if turn["step"] % 2 else x)
        return result

    same(device, partial(Stack, 1, Block, call), num_steps=9, before=lambda step: turn.update(step=step))


def test_an_error_between_forward_and_backward(device: torch.device) -> None:
    model, expected = (built(partial(Stack, block=Block), device) for _ in range(2))
    with attached(model, LAYERS) as manager:
        losses: list[Tensor] = []
        for each in (expected, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(6):
                optimizer.zero_grad()
                try:
                    loss = each(inputs(device, step))
                    if step == 3:
                        raise StopError
                    loss.backward()
                except StopError:
                    del loss
                    continue
                optimizer.step()
                losses.append(loss.detach().clone())
        assert losses[:5] == losses[5:]
        assert num_replays(manager) >= 2 * 4


class StopError(Exception):
    pass


class Noisy(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


@pytest.mark.parametrize("policy", ["auto", "required"])
def test_b97_random_numbers_of_python(device: torch.device, policy: str) -> None:
    """Refused or right, never the number of the capture for ever."""
    build = partial(Stack, block=Noisy)
    random.seed(3)
    expected = train(built(build, device), device, 5)
    random.seed(3)
    model = built(build, device)
    with attached(model, LAYERS, policy=policy) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trace = train(model, device, 5)
        except CaptureError as error:
            assert policy == "required"
            assert "random" in str(error)  # noqa: PT017
        else:
            assert differences(expected, trace) == []
            assert manager.report().num_recordings == 0


def test_b94_masks_differ_from_replay_to_replay(device: torch.device) -> None:
    """And are drawn again after the same seed."""
    model = built(partial(Stack, 1, lambda: Block(0.5)), device)
    with attached(model, LAYERS) as manager:
        train(model, device, 2)
        losses = []
        for number in (3, 3, 4):
            torch.manual_seed(number)
            losses.append([model(inputs(device, 0)).item() for _ in range(3)])
        assert num_replays(manager) == 1 + 9
        assert losses[0] == losses[1]
        assert len({*losses[0], *losses[2]}) == 6


class Gathered(nn.Module):
    """Its weight is put together by a hook before each call, as a sharded wrapper does."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = nn.ParameterList([nn.Parameter(torch.randn(HIDDEN // 2, HIDDEN)) for _ in range(2)])
        self.weight: Tensor | None = None
        self.calls: list[str] = []
        self.register_forward_pre_hook(self.gather)
        self.register_forward_hook(self.free)

    @staticmethod
    def gather(module: Any, args: Any) -> None:
        module.calls.append("gather")
        module.weight = torch.cat(list(module.shards))

    @staticmethod
    def free(module: Any, args: Any, result: Any) -> None:
        module.calls.append("free")
        module.weight = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return functional.linear(x, self.weight)


def test_b104_a_weight_that_a_hook_puts_together(device: torch.device) -> None:
    """The hooks run once a call; the region is right or refused, never on the weight of the capture."""
    build = partial(Stack, block=Gathered)
    models = [built(build, device) for _ in range(2)]
    expected = train(models[0], device, 5)
    with attached(models[1], LAYERS, policy="auto"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trace = train(models[1], device, 5)
        except GraphstepError as error:
            assert "weight" in str(error)  # noqa: PT017
            return
    assert differences(expected, trace) == []
    assert models[0].layers[0].calls == models[1].layers[0].calls


class Conditioned(Stack):
    """Tells its layers by an attribute what it computed, with a gradient."""

    def __init__(self) -> None:
        super().__init__(2, Conditionable)
        self.condition = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.condition = self.condition(x.mean((0, 1)))
        return super().forward(x)


class Conditionable(Block):
    condition: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.condition)


def normalized() -> nn.Module:
    return torch.nn.utils.weight_norm(nn.Linear(HIDDEN, HIDDEN))


class NormalizedInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attn = normalized()  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "build",
    [Conditioned, partial(Stack, block=normalized), partial(Stack, block=NormalizedInside)],
    ids=["condition", "weight norm", "weight norm inside"],
)
def test_tensors_with_gradients_that_are_no_arguments(device: torch.device, build: Any) -> None:
    """Read from an attribute: their gradients do not get lost."""
    models = [built(build, device) for _ in range(2)]
    expected = train(models[0], device, 5, 2)
    with attached(models[1], LAYERS, policy="auto"):
        assert differences(expected, train(models[1], device, 5, 2)) == []


def loops() -> Iterator[Callable[[nn.Module, torch.optim.Optimizer, torch.device, int], Tensor]]:
    def closure(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, step: int) -> Tensor:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(inputs(device, step))
            loss.backward()
            return loss

        return optimizer.step(evaluate)  # type: ignore[return-value, arg-type]

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, step: int) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(inputs(device, step))
        (loss * 1024).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1024)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    def sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, step: int) -> Tensor:
        """Two backwards a step, at other weights, which are put back."""
        optimizer.zero_grad()
        model(inputs(device, step)).backward()
        moves = [p.grad * 0.1 for p in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss: Tensor = model(inputs(device, step))
        loss.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        return loss

    def two_losses(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, step: int) -> Tensor:
        """Two forwards and one backward through both."""
        optimizer.zero_grad()
        loss: Tensor = model(inputs(device, step)) + model(inputs(device, step + 20)) * 2
        loss.backward()
        optimizer.step()
        return loss

    def inherits(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, step: int) -> Tensor:
        """Gradients are never zeroed but decay."""
        loss: Tensor = model(inputs(device, step))
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)
        return loss

    def writes_data(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, step: int) -> Tensor:
        """An optimizer by hand, in a way that leaves no trace on versions."""
        model.zero_grad()
        loss: Tensor = model(inputs(device, step))
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
        return loss

    yield from (closure, scaled, sharpness_aware, two_losses, inherits, writes_data)


@pytest.mark.parametrize("step", tuple(loops()), ids=lambda step: step.__name__)
def test_loops(device: torch.device, step: Any) -> None:
    found, num_steps = [], 80 if step.__name__ == "writes_data" else 8
    for graphs in (False, True):
        model = built(partial(Stack, 2, lambda: Block(0.2)), device)
        manager = graphstep.attach(model, regions=LAYERS) if graphs else None
        torch.manual_seed(2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        found.append(torch.stack([step(model, optimizer, device, number).detach() for number in range(num_steps)]))
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        if manager is not None:
            assert num_replays(manager) > 0, reasons(manager)
            manager.close()
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_gradients_of_an_earlier_step_that_are_kept(device: torch.device) -> None:
    """As for the angle between the gradients of two steps: dropped from parameters, they belong to the loop."""
    found = []
    for graphs in (False, True):
        model = built(Stack, device)
        manager = graphstep.attach(model, regions=LAYERS) if graphs else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before: list[Tensor] = []
        products = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=True)
            model(inputs(device, step)).backward()
            now = [p.grad for p in model.parameters()]
            products += [(mine * theirs).sum() for mine, theirs in zip(now, before, strict=False)]
            before = now
            optimizer.step()
        found.append(torch.stack(products))
        if manager is not None:
            manager.close()
    assert torch.equal(*found)
