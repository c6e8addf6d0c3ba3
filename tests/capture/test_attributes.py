"""Values and hooks that a recording has baked in: every change of one is told by its path, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphstep.capture.attributes import Attributes, FastLook
from graphstep.errors import CaptureError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.1)
        self.scale = 2.0
        self.mode = "plain"
        self.table = torch.ones(2)
        self.act: Any = torch.tanh
        self.names: list[Any] = ["a", ["b"]]
        self.nested: dict[Any, Any] = {"inner": {1: (Slotted(),)}}
        self.seen, self.last = {1}, deque([1.5], maxlen=1)
        self.held = [nn.Dropout(0.3)]
        self.limits = {"low": np.zeros(2)}
        self.state = SimpleNamespace(step=Slotted())


class Slotted:
    __slots__ = ("size", "unset")

    def __init__(self) -> None:
        self.size = 1


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def noted(model: nn.Module) -> Attributes:
    modules = list(model.named_modules())
    return Attributes(modules, hooks_of=modules, parameters_of=modules)


def nothing(*_: Any) -> None:
    return None


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "0.limits.low": lambda model: model[0].limits["low"].fill(3.0),
    "1.scale": lambda model: setattr(model[1], "scale", 3.0),
    "0.dropout.p": lambda model: setattr(model[0].dropout, "p", 0.2),
    "0.mode": lambda model: setattr(model[0], "mode", "fancy"),
    "0.table": lambda model: setattr(model[0], "table", torch.ones(2)),
    "1.act": lambda model: setattr(model[1], "act", torch.sigmoid),
    "0.linear.in_features": lambda model: setattr(model[0].linear, "in_features", 2.0),
    "0.extra": lambda model: setattr(model[0], "extra", 5),
    "0.linear.forward": lambda model: setattr(model[0].linear, "forward", nothing),
    "0.names": lambda model: model[0].names.append("c"),
    "0.names[0]": lambda model: model[0].names.__setitem__(0, "z"),
    "0.names[1]": lambda model: model[0].names[1].clear(),
    "0.nested.more": lambda model: model[0].nested.update(more=1),
    "0.nested.inner[1]": lambda model: model[0].nested["inner"].update({1: ()}),
    "1.seen": lambda model: model[1].seen.add(2),
    "1.last[0]": lambda model: model[1].last.append(2.5),
    "1.held[0].p": lambda model: setattr(model[1].held[0], "p", 0.1),
    "1.held[0].training": lambda model: model[1].held[0].eval(),
    "1.state.step.size": lambda model: setattr(model[1].state.step, "size", 2),
    "1.state.step.unset": lambda model: setattr(model[1].state.step, "unset", 2),
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
    model[0].held[0].register_forward_hook(nothing)
    model[0].linear.weight.data.add_(1)
    model.register_forward_hook(nothing).remove()
    assert attributes.changed() == []


def test_forward_of_the_first_module_is_left_out(model: nn.Sequential) -> None:
    model[0].forward = nothing
    attributes = Attributes([("", model[0])])
    model[0].forward = print
    assert attributes.changed() == []


def test_what_is_shared_is_looked_at_once(model: nn.Sequential) -> None:
    model[1].nested = model[0].nested
    attributes = [Attributes([("", each)]) for each in model]
    look = FastLook(attributes)
    assert look.holds()
    model[0].nested["inner"][2] = 1
    assert not look.holds()
    assert [each.changed() for each in attributes] == [["nested.inner[2]"]] * 2


def test_values_are_put_back(model: nn.Sequential) -> None:
    before = noted(model).again()
    for path, change in CHANGES.items():
        if "hooks" not in path:
            change(model)
    assert len(before.changed()) > 15
    before.put_back()
    assert before.changed() == []
    assert not hasattr(model[0], "extra")
    assert model[0].names == ["a", ["b"]]


def test_arrays_get_their_content_back(model: nn.Sequential) -> None:
    counts, large, words = np.arange(4).reshape(2, 2), np.zeros(1 << 18), np.array(["a", None])
    model[0].counts, model[0].nested["large"], model[0].words = counts, large, words
    before = noted(model).again()
    assert [each.path for each in before.noted.arrays] == ["0.counts", "0.limits.low", "1.limits.low"]
    counts[1, 0], large[0] = 7, 7.0
    with pytest.raises(CaptureError, match=r"each run changes 0\.counts \(its content\)"):
        before.refuse_changes("model", [])
    before.put_back()
    assert counts.tolist() == [[0, 1], [2, 3]]
    assert large[0] == 7.0
