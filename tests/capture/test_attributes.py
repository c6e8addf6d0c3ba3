"""Values and hooks that a recording has baked in: every change of one is told by its path, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphstep.capture.attributes import Attributes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.1)
        self.scale = 2.0
        self.mode = "plain"
        self.table = torch.ones(2)
        self.act: Any = torch.tanh


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def noted(model: nn.Module) -> Attributes:
    modules = list(model.named_modules())
    return Attributes(modules, hooks_of=modules, parameters_of=modules)


def nothing(*_: Any) -> None:
    return None


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "1.scale": lambda model: setattr(model[1], "scale", 3.0),
    "0.dropout.p": lambda model: setattr(model[0].dropout, "p", 0.2),
    "0.mode": lambda model: setattr(model[0], "mode", "fancy"),
    "0.table": lambda model: setattr(model[0], "table", torch.ones(2)),
    "1.act": lambda model: setattr(model[1], "act", torch.sigmoid),
    "0.linear.in_features": lambda model: setattr(model[0].linear, "in_features", 2.0),
    "1.mode": lambda model: delattr(model[1], "mode"),
    "1.linear.hooks": lambda model: model[1].linear.register_forward_hook(nothing),
    "0.hooks": lambda model: model[0].register_full_backward_hook(nothing),
    "hooks": lambda model: model.register_forward_pre_hook(nothing),
    "0.linear.weight.hooks": lambda model: model[0].linear.weight.register_hook(nothing),
    "1.linear.bias.hooks": lambda model: model[1].linear.bias.register_post_accumulate_grad_hook(nothing),
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_is_told_by_its_path(model: nn.Sequential, path: str) -> None:
    attributes = noted(model)
    assert attributes.changed() == []
    CHANGES[path](model)
    assert attributes.changed() == [path]
    attributes.ignore_changed()
    assert attributes.changed() == ([path] if "hooks" in path else [])


def test_a_removed_hook_is_told(model: nn.Sequential) -> None:
    handles = [model[0].register_forward_hook(nothing), model[0].linear.weight.register_hook(nothing)]
    attributes = noted(model)
    for handle in handles:
        handle.remove()
    assert attributes.changed() == ["0.hooks", "0.linear.weight.hooks"]


def test_another_hook_in_its_place_is_told(model: nn.Sequential) -> None:
    handle = model[0].register_forward_hook(nothing)
    attributes = noted(model)
    handle.remove()
    model[0].register_forward_hook(nothing)
    assert attributes.changed() == ["0.hooks"]


def test_what_changes_nothing_is_not_told(model: nn.Sequential) -> None:
    attributes = noted(model)
    model.eval()
    model[0].scale = float("2.0")
    model[0].extra = 5
    model[0].linear.weight.data.add_(1)
    model.register_forward_hook(nothing).remove()
    assert attributes.changed() == []
