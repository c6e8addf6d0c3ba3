"""Layers and their parts are told by structure: names of classes do not matter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hugging_face.tiny import FAMILIES, WITH_EXPERTS, Loop, build, steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.errors import CaptureError, ConfigError
from graphstep.hugging_face.forward_code import live_names, submodules_in_turn
from graphstep.hugging_face.structure import find_layers

CPU = torch.device("cpu")
KINDS = {
    "mamba2": {"mamba"},
    "mixtral": {"attn", "moe", "moe_router", "moe_preprocess"},
    "qwen3_moe": {"attn", "moe", "moe_router", "moe_preprocess"},
    "deepseek_v3": {"attn", "moe", "moe_router", "moe_preprocess"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = build(family, CPU)
    layers = find_layers(model)
    assert len(layers) == model.config.num_hidden_layers
    assert set(layers[-1].kinds) == KINDS.get(family, {"attn", "mlp"})
    if family in WITH_EXPERTS:
        experts = layers[-1].experts
        assert experts is not None
        assert experts.path == "mlp.experts"
    if family == "deepseek_v3":
        assert set(layers[0].kinds) == {"attn", "mlp"}


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class ListOfExperts(nn.Module):
    """As models before stacked weights had them."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(16, 3)
        self.each = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.choose(x).argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.each):
            rows = (chosen == number).nonzero(as_tuple=True)
            result[rows] = expert(x[rows])
        return result


class Unknown(nn.Module):
    """A layer that recomputes itself when it is called, as those of older versions of transformers do."""

    gradient_checkpointing = False

    def __init__(self, second: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.mix, self.between, self.then = nn.LayerNorm(16), Mixing(), nn.LayerNorm(16), second()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return checkpoint(super().__call__, *arguments, use_reentrant=False, **named)
        return super().__call__(*arguments, **named)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        x = x + self.mix(self.before(x), attention_mask)
        y = self.then(self.between(x))
        return (x + y,)


class Model(nn.Module):
    def __init__(self, second: type[nn.Module]) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="unknown")
        self.table = nn.Embedding(64, 16)
        self.stack = nn.ModuleList(Unknown(second) for _ in range(2))
        self.out = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.table(input_ids)
        for layer in self.stack:
            (x,) = layer(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten()))


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))


@pytest.mark.parametrize("second", [Mlp, ListOfExperts])
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_of_unknown_classes(device: torch.device, second: type[nn.Module], recompute: bool) -> None:
    traces = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = Model(second).to(device)
        for layer in model.stack:
            layer.gradient_checkpointing = recompute
        manager = graphstep.attach(model) if graphs else None
        loop = Loop(model, device)
        steps(5)(loop)
        traces.append(loop.trace)
        if manager is not None:
            report = manager.report()
            assert [row.num_replays for row in report.rows] == [4] * (4 if second is ListOfExperts else 2)
            assert [part.name for part in report.eager_parts] == (
                ["stack.0.then", "stack.1.then"] if second is ListOfExperts else []
            )
            manager.close()
            assert all(layer.gradient_checkpointing is recompute for layer in model.stack)
    assert all(map(torch.equal, *traces))


class OnTheStack(Unknown):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        return (torch.tanh(x) + self.then(self.between(x + self.mix(self.before(x)))),)


def test_a_layer_that_cannot_be_cut(device: torch.device) -> None:
    traces = []
    for policy in ("off", "auto", "required"):
        torch.manual_seed(0)
        model = Model(ListOfExperts).to(device)
        model.stack[1].__class__ = OnTheStack
        loop = Loop(model, device)
        with graphstep.attach(model, CudaGraphConfig(impl="local", policy=policy)) as manager:
            if policy == "required":
                with pytest.raises(CaptureError, match="not kept in a variable"):
                    steps(1)(loop)
                continue
            if policy == "auto":
                with pytest.warns(UserWarning, match=r"stack.1.*runs eagerly"):
                    steps(1)(loop)
            steps(5 if policy == "off" else 4)(loop)
            traces.append(loop.trace)
            if policy == "auto":
                assert [row.num_replays > 0 for row in manager.report().rows] == [True, True, False, False]
    assert all(map(torch.equal, *traces))


def test_a_list_of_experts_is_refused_inside() -> None:
    config = CudaGraphConfig(impl="local", modules=("attn", "moe"))
    with pytest.raises(ConfigError, match="list of modules"):
        graphstep.attach(Model(ListOfExperts), config)


def test_a_loop_over_experts_is_refused_inside() -> None:
    config = CudaGraphConfig(impl="local", modules=("attn", "moe"))
    with pytest.raises(ConfigError, match=r"loop on the host \(experts_implementation='eager'\)") as caught:
        graphstep.attach(build("qwen3_moe", CPU, experts_implementation="eager"), config)
    assert "set_experts_implementation('grouped_mm')" in str(caught.value)


def test_a_part_that_no_layer_has() -> None:
    config = CudaGraphConfig(impl="local", modules=("attn", "mamba"))
    with pytest.raises(ConfigError, match="graphs of mamba were asked for") as caught:
        graphstep.attach(build("llama", CPU), config)
    assert "the parts are: attn, mlp" in str(caught.value)


def test_models_of_nobody_need_regions() -> None:
    model = Model(Mlp)
    del model.config
    with pytest.raises(ConfigError, match=r"were asked for"):
        graphstep.attach(model)


def test_a_model_is_attached_once() -> None:
    model = build("llama", CPU)
    with graphstep.attach(model), pytest.raises(ConfigError, match="another strategy has captured it"):
        graphstep.attach(model)


def test_submodules_in_the_order_of_the_code() -> None:
    layer = Unknown(Mlp)
    assert submodules_in_turn(layer) == [layer.before, layer.mix, layer.between, layer.then]


class Calls(nn.Module):
    """Submodules that are called in many forms, in another order than they were made."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("sixth", "fifth", "fourth", "third", "second", "first"):
            setattr(self, name, nn.Identity())

    def forward(self, x: Any, *rest: Any, **named: Any) -> Any:
        x = self.first(x)
        x, _ = self.second(x=x, mask=None, **named)
        x = x + self.third(x, *rest)
        x = self.fourth(*rest, **named)
        x = print(self.fifth(x, scale=len(rest)))
        return self.sixth(*(each for each in rest))


def test_submodules_called_in_many_forms() -> None:
    module = Calls()
    expected = [module.first, module.second, module.third, module.fourth, module.fifth, module.sixth]
    assert submodules_in_turn(module) == expected


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_part_has_the_modules_that_it_runs(family: str) -> None:
    model = build(family, CPU)
    with graphstep.attach(model) as manager:
        regions = {calls.region.name: calls.region for calls in manager._regions.values()}
    before = next(region for name, region in regions.items() if "before" in name)
    layer = next(
        layer for layer in model.model.layers if before.name.startswith(f"model.layers.{layer.self_attn.layer_idx}.")
    )
    assert set(layer.self_attn.modules()) <= set(before.modules)
    after = next(region for name, region in regions.items() if "after" in name)
    assert not set(layer.self_attn.modules()) & set(after.modules)


def looped(x: int) -> int:
    total = 0
    for _ in range(3):
        total += len(str(x))
        y = total
    return y


def straight(a: int, b: int) -> int:
    c = len(str(a))
    a = b
    d = a
    return c + d


def waiting(a: int, b: int) -> int:
    return a + len(str(b)) * b


def test_variables_that_are_read_later() -> None:
    import dis

    def after(function: Any) -> set[str]:
        calls = [i.offset for i in dis.get_instructions(function.__code__) if i.opname == "CALL"]
        return live_names(function.__code__, calls[-1])

    assert after(straight) == {"b"}  # `a`, `c` and `d` are written before they are read
    assert {"x", "total"} <= after(looped)
    assert after(waiting) == {"a", "b"}
