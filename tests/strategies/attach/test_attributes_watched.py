"""Attributes that regions read, count in, or leave something in: never the value of the capture by accident."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, num_replays, reasons, train
from tests.strategies.runs import differences
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from graphstep.capture.reasons import EagerReason
from graphstep.errors import CaptureError


def doubled(module: nn.Module, _arguments: Any, result: Tensor) -> Tensor | None:
    return result * 2 if isinstance(module, nn.Dropout) else None


@pytest.mark.parametrize("is_there_at_first", [False, True])
def test_s7_a_hook_on_all_modules(device: torch.device, is_there_at_first: bool) -> None:
    """Runs inside of captured modules too: eagerly after it came or went, and in the graphs of a later capture."""
    found = []
    for policy in ("off", "required"):
        model = built(Stack, device)
        handles = [register_module_forward_hook(doubled)] if is_there_at_first else []

        def change(step: int, handles: list[Any] = handles) -> None:
            if step == 3 and handles:
                handles.pop().remove()
            elif step == 3:
                handles.append(register_module_forward_hook(doubled))

        try:
            with attached(model, LAYERS, policy=policy) as manager:
                found.append(train(model, device, 8, before=change))
                if policy == "required":
                    assert reasons(manager)[EagerReason.CHANGED_ATTRIBUTE] == 2 * 2
                    assert num_replays(manager) == 2 * (2 + 3)
                    assert manager.report().rows[0].last_detail == "hooks of all modules"
        finally:
            for each in handles:
                each.remove()
    assert differences(*found) == []


class Keeping(nn.Module):
    """A layer with places to keep something in."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.act = act
        self.memory: Any = None
        self.names: list[str] = []
        self.count, self.history = [0], deque([0], maxlen=1)
        self.table: dict[Any, Any] = {"inner": {"scale": 1.0}}
        self.state = SimpleNamespace(num_calls=0)
        self.held = [nn.Dropout(0.0)]
        self.python, self.numpy, self.legacy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.act(self, self.linear(x))
        return result


def keeps_memory(layer: Any, y: Tensor) -> Tensor:
    y = y if layer.memory is None else y + layer.memory
    layer.memory = y.detach()
    return y


def keeps_pair(layer: Any, y: Tensor) -> Tensor:
    y = y if layer.memory is None else y + layer.memory[1]
    layer.memory = (1, y.detach())
    return y


def leaves_gradient(layer: Any, y: Tensor) -> Tensor:
    layer.memory = y.square().mean()
    return y


def counts_in_list(layer: Any, y: Tensor) -> Tensor:
    layer.count[0] += 1
    return y / int(layer.count[0])


def appends(layer: Any, y: Tensor) -> Tensor:
    layer.count.append(1)
    return y / len(layer.count)


def turns_history(layer: Any, y: Tensor) -> Tensor:
    layer.history.append(layer.history[-1] + 1)
    return y / int(layer.history[-1])


def counts_in_object(layer: Any, y: Tensor) -> Tensor:
    layer.state.num_calls += 1
    return y / int(layer.state.num_calls)


def draws_python(layer: Any, y: Tensor) -> Tensor:
    return y * float(layer.python.random())


def draws_numpy(layer: Any, y: Tensor) -> Tensor:
    return y * float(layer.numpy.random())


def draws_legacy(layer: Any, y: Tensor) -> Tensor:
    return y * float(layer.legacy.rand())


REFUSED: dict[Callable[[Any, Tensor], Tensor], str] = {
    keeps_memory: r"reads the tensor in layers\.0\.memory",
    keeps_pair: r"reads the tensor in layers\.0\.memory\[1\]",
    leaves_gradient: r"leaves a tensor with a gradient in layers\.0\.memory",
    counts_in_list: r"changes layers\.0\.count\[0\] \(2 before",
    appends: r"changes layers\.0\.count \(3 entries before",
    turns_history: r"changes layers\.0\.history",
    counts_in_object: r"changes layers\.0\.state\.num_calls \(2 before",
    draws_python: r"host randomness from layers\.0\.python",
    draws_numpy: r"host randomness from layers\.0\.numpy",
    draws_legacy: r"host randomness from layers\.0\.legacy",
}


@pytest.mark.parametrize("act", REFUSED, ids=lambda act: act.__name__)
def test_what_a_replay_could_not_do_is_refused(device: torch.device, act: Callable[[Any, Tensor], Tensor]) -> None:
    """Where coverage is not required, the region runs eagerly, as if nothing had been tried."""
    build = partial(Stack, 1, lambda: Keeping(act))
    model = built(build, device)
    with attached(model, LAYERS), pytest.raises(CaptureError, match=REFUSED[act]):
        train(model, device, 3, 2)
    expected = train(built(build, device), device, 4, 2)
    model = built(build, device)
    with attached(model, LAYERS, policy="auto") as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert differences(expected, train(model, device, 4, 2)) == []
        assert num_replays(manager) == 0


def reads_names(layer: Any, y: Tensor) -> Tensor:
    return y * 2 if layer.names else y


def reads_table(layer: Any, y: Tensor) -> Tensor:
    return y * float(layer.table["inner"]["scale"])


def reads_held(layer: Any, y: Tensor) -> Tensor:
    y = y * (1 + float(layer.held[0].p))
    return y if layer.held[0].training else -y


def reads_nothing(layer: Any, y: Tensor) -> Tensor:
    layer.memory = y.detach() * 2
    layer.table["last"] = y.detach()
    return y


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]] = {
    "names": (reads_names, lambda layer: layer.names.append("a")),
    "table.inner.scale": (reads_table, lambda layer: layer.table["inner"].update(scale=2.0)),
    "held[0].p": (reads_held, lambda layer: setattr(layer.held[0], "p", 0.5)),
    "held[0].training": (reads_held, lambda layer: layer.held[0].eval()),
    "linear.forward": (reads_nothing, lambda layer: setattr(layer.linear, "forward", torch.zeros_like)),
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_after_the_capture_is_seen(device: torch.device, path: str) -> None:
    act, change = CHANGES[path]
    build = partial(Stack, 1, lambda: Keeping(act))

    def trained(model: Any) -> Any:
        return train(model, device, 6, 2, before=lambda step: change(model.layers[0]) if step == 3 else None)

    expected = trained(built(build, device))
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, trained(model)) == []
        assert num_replays(manager) == (2 + 1) * 2
        assert reasons(manager)[str(EagerReason.CHANGED_ATTRIBUTE)] == 2 * 2
        assert manager.report().rows[0].last_detail == f"layers.0.{path}"


def test_what_is_only_written_is_no_change(device: torch.device) -> None:
    build = partial(Stack, 1, lambda: Keeping(reads_nothing))
    expected = train(built(build, device), device, 4, 2)
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, train(model, device, 4, 2)) == []
        assert num_replays(manager) == 3 * 2
