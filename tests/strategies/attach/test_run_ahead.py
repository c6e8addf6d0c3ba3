"""A layer that is launched with the end of the one before it: if its call does not come, it has never run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import Loop, schedule, twins
from tests.strategies.models import HIDDEN
from tests.strategies.toy_moe import MoeDecoder
from torch import Tensor, nn

from graphstep.errors import LifecycleError

ROUTED = {"modules": ("attn", "moe_router", "moe_preprocess")}
Change = Callable[[Any, Tensor, int], tuple[Tensor, bool]]
"""What a model does with the result of its first layer in a step: the tensor that goes on, and whether the second layer
takes it."""


class Changed(MoeDecoder):
    """Runs its first layer, then what a change says, then the others."""

    change: Change | None = None
    step = 0

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.layers[0](x)
        takes_all = True
        if self.change is not None:
            x, takes_all = type(self).change(self, x, self.step)
        for layer in self.layers[1 if takes_all else 2 :]:
            x = layer(x)
        logits = nn.functional.linear(self.norm(x), self.embedding.weight)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return self.marked(loss + self.extra.sum() if self.extra is not None else loss)

    extra: Tensor | None = None


def _skip(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
    return x, step % 2 == 0


def _double(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
    return (x * 2 if step > 2 else x), True


def _use_twice(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
    model.extra = x.mean() * 0.1 if step > 2 else None
    return x, True


def _hook(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
    if step > 2:
        x.register_hook(lambda gradient: gradient * 1.5)
    return x, True


def _evaluate(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
    with torch.no_grad():
        model.layers[1](x.detach())
    return x, True


def _in_place(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
    return (x.add_(0.5) if step > 2 else x), True


def _weight(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
    with torch.no_grad():
        model.layers[1].router.bias.add_(0.1 * step)
    return x, True


CHANGES = {
    "a layer is skipped": _skip,
    "the result is changed": _double,
    "the result is used twice": _use_twice,
    "a hook on the result": _hook,
    "evaluated between": _evaluate,
    "changed in place": _in_place,
    "a buffer that is only read": _weight,
}


@pytest.mark.parametrize("order", ["fbfb", "ffbb", "ffBB"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_comes_between_two_layers(device: torch.device, name: str, order: str) -> None:
    """Counters, losses, gradients and weights are those of eager execution, at every step."""

    class Model(Changed):
        change = CHANGES[name]

    def script(loop: Loop) -> None:
        for step in range(6):
            loop.model.step = step
            loop.step(2)

    loop = twins(device, script, build=partial(Model, "EEE"), config=ROUTED, schedule=schedule(order))
    assert loop.num_replays > 0


def test_one_layer_is_called_alone(device: torch.device) -> None:
    """Its result goes, and with it what the next layer had done."""

    def script(loop: Loop) -> None:
        for step in range(6):
            loop.step(1)
            if step in (2, 3):
                x = torch.full((2, 6, HIDDEN), 0.5, device=loop.device, requires_grad=True)
                loop.note(loop.model.layers[0](x).detach().clone())

    assert twins(device, script, build=MoeDecoder, config=ROUTED).num_replays > 0


def test_a_backward_from_the_first_layer(device: torch.device) -> None:
    """The result is held, and the layer after it has not run when the backward is over."""

    def script(loop: Loop) -> None:
        for step in range(6):
            loop.step(1)
            if step in (2, 3):
                x = torch.full((2, 6, HIDDEN), 0.5, device=loop.device, requires_grad=True)
                result = loop.model.layers[0](x)
                # Not sum(): it gives a gradient of stride 0, and on a GPU strides choose kernels.
                (result * x.detach()).sum().backward()
                loop.note(result.detach().clone())
                loop.kept.append(result.detach().clone())
                del result

    assert twins(device, script, build=MoeDecoder, config=ROUTED).num_replays > 0


def test_an_error_between_two_layers(device: torch.device) -> None:
    def fail(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
        if step == 3:
            raise KeyError("between")
        return x, True

    class Model(Changed):
        change = fail

    def script(loop: Loop) -> None:
        for step in range(6):
            loop.model.step = step
            with suppress(KeyError):
                loop.step(1)
            loop.note(torch.zeros(1))

    assert twins(device, script, build=partial(Model, "EEE"), config=ROUTED).num_replays > 0


def test_a_counter_that_is_written_between(device: torch.device) -> None:
    """What it was is not known any more: an error, and never a wrong count."""

    def write(model: Any, x: Tensor, step: int) -> tuple[Tensor, bool]:
        model.layers[1].router.tokens_per_expert.mul_(0.5)
        return x, True

    class Model(Changed):
        change = write

    loop = Loop(device, True, build=partial(Model, "EEE"), config=ROUTED)
    loop.step(1)
    with pytest.raises(LifecycleError, match="a buffer that this region changes was written") as caught:
        loop.step(1)
    assert "layers.1" in caught.value.where
    assert caught.value.fix
    loop.close()
