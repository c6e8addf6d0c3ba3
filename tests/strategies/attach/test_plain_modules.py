"""Modules written by hand and a plain loop: what is a region, what is given back, and what may go on around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import (
    HIDDEN,
    LAYERS,
    Block,
    Stack,
    attached,
    built,
    inputs,
    num_replays,
    same,
    train,
)
from tests.strategies.models import Wrapped
from tests.strategies.runs import differences
from torch import Tensor, nn

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.errors import ConfigError, LifecycleError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_tutorial(device: torch.device, dropout: float, num_microbatches: int, dtype: torch.dtype) -> None:
    """The first step is observed, every later one replays; nothing marks where steps end."""
    build = partial(Stack, block=lambda: Block(dropout))
    feed = lambda number: inputs(device, number).to(dtype)  # noqa: E731
    replays = 2 * 4 * num_microbatches
    found = same(device, build, num_microbatches=num_microbatches, dtype=dtype, feed=feed, replays=replays)
    assert sum(found.values()) == 2 * num_microbatches


@pytest.mark.parametrize(
    ("regions", "names"),
    [
        ({"layers.*": "layer"}, {"layers.0": "layer", "layers.1": "layer"}),
        ({"layers.*.mlp": "mlp"}, {"layers.0.mlp": "mlp", "layers.1.mlp": "mlp"}),
        ({"layers.0": "layer", "layers.1.mlp": "mlp"}, {"layers.0": "layer", "layers.1.mlp": "mlp"}),
        ({"layers.?.attn": "attn", "*.*.mlp": "mlp"}, None),
        ({"inp": "layer", "out": "layer"}, {"inp": "layer", "out": "layer"}),
        ({"*.1": "layer"}, {"layers.1": "layer"}),
        ({"layers.[0]": "layer"}, {"layers.0": "layer"}),
    ],
    ids=str,
)
def test_paths(device: torch.device, regions: Any, names: dict[str, str] | None) -> None:
    same(device, partial(Stack, block=lambda: Block(0.2)), regions=regions)
    if names is None:
        names = {f"layers.{index}.{part}": part for index in range(2) for part in ("attn", "mlp")}
    model = built(Stack, device)
    with attached(model, regions) as manager:
        train(model, device, 2)
        assert {row.name: row.kind for row in manager.report().rows} == names


@pytest.mark.parametrize("regions", [{"blocks.*": "layer"}, {"*.mlp": "mlp"}, {"layers": "layer"}], ids=str)
def test_a_pattern_that_fits_nothing_that_is_called(regions: Any) -> None:
    """A star does not cross a dot; a list of modules has no forward of its own."""
    with pytest.raises(ConfigError) as caught:
        graphstep.attach(Stack(), CudaGraphConfig(impl="local"), regions=regions)
    assert next(iter(regions)) in str(caught.value)


def test_no_configuration_means_local(device: torch.device) -> None:
    model = built(Stack, device)
    with graphstep.attach(model, regions=LAYERS) as manager:
        train(model, device, 3)
        assert num_replays(manager) == 2 * 2


def test_the_class_is_the_same_as_the_function(device: torch.device) -> None:
    model = built(Stack, device)
    manager = graphstep.CudaGraphManager(model, CudaGraphConfig(impl="local"), regions=LAYERS)
    train(model, device, 3)
    assert num_replays(manager) == 2 * 2
    assert isinstance(manager.session, graphstep.GraphSession)
    assert isinstance(graphstep.attach(built(Stack, device), regions=LAYERS), graphstep.CudaGraphManager)
    manager.close()
    manager.close()


@pytest.mark.parametrize("impl", ["transformer_engine", "full_iteration"])
def test_another_implementation_is_refused(impl: str) -> None:
    """A manager is what ``local`` is; nothing is ignored silently."""
    with pytest.raises(ConfigError, match=impl):
        graphstep.attach(Stack(), CudaGraphConfig(impl=impl), regions=LAYERS)


def test_the_model_is_given_back(device: torch.device) -> None:
    model = built(Stack, device)
    untouched = {name: dict(vars(module)).keys() for name, module in model.named_modules()}
    keys = model.state_dict().keys()
    with attached(model, LAYERS):
        train(model, device, 3)
        assert model.state_dict().keys() == keys
    assert {name: dict(vars(module)).keys() for name, module in model.named_modules()} == untouched


def test_two_managers_on_one_model_are_refused(device: torch.device) -> None:
    model = built(Stack, device)
    with attached(model, LAYERS) as manager:
        with pytest.raises(ConfigError):
            graphstep.attach(model, regions=LAYERS)
        train(model, device, 3)
        assert num_replays(manager) == 2 * 2
    with attached(model, LAYERS) as manager:
        train(model, device, 3)
        assert num_replays(manager) == 2 * 2


def test_a_closed_manager_refuses(device: torch.device) -> None:
    model = built(Stack, device)
    with attached(model, LAYERS) as manager:
        train(model, device, 2)
    with pytest.raises(LifecycleError):
        manager.end_step()


def test_wrappers_around_layers(device: torch.device) -> None:
    build = partial(Stack, block=lambda: Wrapped(Wrapped(Block(0.2))))
    for regions in ({"layers.*": "layer"}, {"layers.*.inner": "layer"}, {"layers.*.inner.inner": "layer"}):
        same(device, build, regions=regions, replays=2 * 4 * 2)


def test_a_region_in_a_sequential(device: torch.device) -> None:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            result: Tensor = super().forward(x).square().mean()
            return result

    build = lambda: Model(nn.Linear(HIDDEN, HIDDEN), Block(0.2), nn.Dropout(0.1), Block())  # noqa: E731
    same(device, build, regions={"[13]": "layer"}, replays=2 * 4 * 2)
    same(device, build, regions={"*": "layer"}, replays=4 * 4 * 2)


def test_a_region_without_parameters(device: torch.device) -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + x.mean()

    same(device, partial(Stack, block=Scale), replays=2 * 4 * 2)


def test_the_whole_model_as_a_region(device: torch.device) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Stack(block=lambda: Block(0.2))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.model(x)
            return result

    same(device, Whole, regions={"model": "layer"})


def test_a_module_used_twice(device: torch.device) -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            result: Tensor = self.out(x).square().mean()
            return result

    same(device, partial(Twice, block=lambda: Block(0.2)), replays=4 * 4 * 2)


def test_a_module_under_two_names(device: torch.device) -> None:
    def build() -> Stack:
        model = Stack(3, lambda: Block(0.2))
        model.layers[2] = model.layers[0]
        return model

    same(device, build, replays=3 * 4 * 2)


def test_methods_and_forwards_of_others_still_work(device: torch.device) -> None:
    """A direct call of ``forward``, a method that uses the module's parts, and a subclass with hooks."""

    class Direct(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            x = self.layers[0].forward(x)
            x = self.layers[1].mlp(x.detach()) + self.layers[1](x)
            result: Tensor = self.out(x).square().mean()
            return result

    # With several microbatches, weights that are used outside of their region as well have sums in another order.
    same(device, partial(Direct, block=lambda: Block(0.2)), num_microbatches=1, replays=2 * 4)


def test_hooks(device: torch.device) -> None:
    """They fire once a call, outside of the region or inside, and may change what they see."""
    logs: list[list[str]] = []

    def build() -> Stack:
        model, log = Stack(block=lambda: Block(0.2)), []
        logs.append(log)
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda m, args: (log.append("pre"), (args[0] * 1.5,))[1])
            layer.register_forward_hook(lambda m, args, out: (log.append("post"), out * 0.5)[1])
            layer.register_full_backward_hook(lambda m, gi, go: log.append("back"))
            layer.attn.weight.register_post_accumulate_grad_hook(lambda p: log.append("grad"))
        return model

    same(device, build, replays=2 * 4 * 2)
    assert sorted(logs[0]) == sorted(logs[1])
    assert len(logs[0]) == 4 * 2 * 5 * 2


def test_parts_that_train_and_parts_that_do_not(device: torch.device) -> None:
    """``training`` of a part of a region is part of the signature."""

    def freeze(model: nn.Module) -> Callable[[int], None]:
        return lambda step: model.layers[0].mlp.train(step % 4 != 3) and None

    build = partial(Stack, block=lambda: Block(0.3))
    eager, graphed = built(build, device), built(build, device)
    expected = train(eager, device, 9, 2, before=freeze(eager))
    with attached(graphed, LAYERS) as manager:
        assert differences(expected, train(graphed, device, 9, 2, before=freeze(graphed))) == []
        assert num_replays(manager) > 0


def test_inference_between_steps(device: torch.device) -> None:
    build = partial(Stack, block=lambda: Block(0.3))
    eager, graphed = built(build, device), built(build, device)

    def infer(model: nn.Module, results: list[Tensor]) -> Callable[[int], None]:
        def run(step: int) -> None:
            model.eval()
            for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
                with mode:
                    results.append(model(inputs(device, 50 + step)).detach().clone())
            model.train()

        return run

    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    expected = train(eager, device, 5, 2, before=infer(eager, results[0]))
    with attached(graphed, LAYERS) as manager:
        assert differences(expected, train(graphed, device, 5, 2, before=infer(graphed, results[1]))) == []
        assert num_replays(manager) >= 2 * 4 * 2
    assert all(map(torch.equal, *results))


def test_two_optimizers_and_a_step_that_is_skipped(device: torch.device) -> None:
    """Weights of half of the model change; now and then no optimizer steps at all."""
    found = []
    for graphs in (False, True):
        model = built(partial(Stack, block=lambda: Block(0.2)), device)
        torch.manual_seed(3)
        manager = graphstep.attach(model, regions=LAYERS) if graphs else None
        halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers]
        losses = []
        for step in range(8):
            model.zero_grad()
            loss = model(inputs(device, step))
            loss.backward()
            losses.append(loss.detach())
            if step % 3:
                halves[step % 2].step()
        found.append(torch.stack(losses))
        if manager is not None:
            assert num_replays(manager) > 0
            manager.close()
    assert torch.equal(*found)


def test_two_models_in_one_process(device: torch.device) -> None:
    """A teacher without gradient and a student, each with a manager or not."""
    found = []
    for graphs in (False, True):
        teacher, student = (built(partial(Stack, block=Block), device) for _ in range(2))
        managers = [graphstep.attach(model, regions=LAYERS) for model in (teacher, student) if graphs]
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        losses = []
        for step in range(5):
            with torch.no_grad():
                target = teacher(inputs(device, step))
            optimizer.zero_grad()
            loss = (student(inputs(device, step)) - target * 0.5).square()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found.append(torch.stack(losses))
        for manager in managers:
            manager.close()
        if graphs:
            assert num_replays(managers[1]) == 2 * 4
    assert torch.equal(*found)


def test_a_copy_of_an_attached_model_is_on_its_own(device: torch.device) -> None:
    model = built(Stack, device)
    with attached(model, LAYERS) as manager:
        train(model, device, 3)
        before, twin = num_replays(manager), copy.deepcopy(model)
        mine, theirs = (each(inputs(device, 1)) for each in (model, twin))
        assert torch.equal(mine, theirs)
        assert num_replays(manager) == before + 2
