"""Batches of any make: what is a tensor is refreshed, what is not is part of the key."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.strategies.runs import Run, compared
from torch import Tensor, nn

from graphstep.errors import InputMismatchError

FULL = "full_iteration"


@dataclasses.dataclass(frozen=True)
class Packed:
    """As in packed-sequence attention: tensors and numbers in one argument."""

    x: Tensor
    scale: float
    mask: Tensor | None = None


class Pair(NamedTuple):
    x: Tensor
    scale: float


class Plain:
    def __init__(self, x: Tensor, scale: float) -> None:
        self.x, self.scale = x, scale


class Scaled(nn.Module):
    """Reads ``x``, ``scale`` and ``mask`` from whatever holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Any, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x).tanh() * float(scale)
        return (y if mask is None else y * mask).square().sum()


def read(batch: Any) -> tuple[Tensor, Any, Tensor | None]:
    if isinstance(batch, dict):
        return batch["x"], batch["scale"], batch.get("mask")
    return batch.x, batch.scale, getattr(batch, "mask", None)


def forward_backward(
    *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
) -> Tensor:
    losses = []
    for _ in range(num_microbatches):
        loss = model(*read(next(data_iterator)))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def scaled(device: torch.device, make: Callable[[Run, int], Any], num_steps: int = 6) -> Run:
    """Each step has other numbers in ``x``; ``make`` says what is around them."""

    def script(run: Run) -> None:
        for step in range(num_steps):
            run.step(batches=[make(run, step)])

    return compared(device, FULL, script, build=Scaled, forward_backward=forward_backward)


def x(run: Run, *shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), generator=run.data)


KINDS: dict[str, Callable[[Tensor, float], Any]] = {
    "dict": lambda x, scale: {"x": x, "scale": scale},
    "ordered dict": lambda x, scale: collections.OrderedDict(x=x, scale=scale),
    "default dict": lambda x, scale: collections.defaultdict(lambda: None, x=x, scale=scale),
    "named tuple": Pair,
    "dataclass": Packed,
    "object": Plain,
    "namespace": lambda x, scale: SimpleNamespace(x=x, scale=scale),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_batch(device: torch.device, kind: str) -> None:
    """Tensors in objects are inputs; a changed number is another key, never a wrong replay."""
    run = scaled(device, lambda run, step: KINDS[kind](x(run), 2.0 if step in (2, 4, 5) else 1.0))
    assert run.report.num_recordings == 2
    assert run.num_replays == 4


@pytest.mark.parametrize("kind", ["object", "namespace", "dict"])
def test_one_object_changed_in_place(device: torch.device, kind: str) -> None:
    kept: dict[Run, Any] = {}

    def make(run: Run, step: int) -> Any:
        batch = kept.setdefault(run, KINDS[kind](x(run), 1.0))
        for name, value in (("x", x(run)), ("scale", 1.0 + step % 2)):
            if isinstance(batch, dict):
                batch[name] = value
            else:
                setattr(batch, name, value)
        return batch

    assert scaled(device, make, 8).report.num_recordings == 2


@pytest.mark.parametrize("value", [True, 1, 2.5, np.float32(0.5)])
def test_values_of_any_type(device: torch.device, value: Any) -> None:
    assert scaled(device, lambda run, step: {"x": x(run), "scale": value}).report.num_recordings == 1


def test_an_array_is_a_value(device: torch.device) -> None:
    array = np.ones(())

    def make(run: Run, step: int) -> Any:
        array[...] = 1.0 + step // 3
        return {"x": x(run), "scale": array}

    assert scaled(device, make).report.num_recordings == 2


def test_a_tensor_that_comes_and_goes(device: torch.device) -> None:
    """``None`` stays ``None``; a mask is refreshed where there is one."""

    def make(run: Run, step: int) -> Any:
        return Packed(x(run), 1.0, torch.rand(3, 4, generator=run.data) if step % 2 else None)

    run = scaled(device, make, 8)
    assert run.report.num_recordings == 2


def test_entries_come_and_go(device: torch.device) -> None:
    """Removed keys leave no old data behind, added ones are not ignored."""

    def make(run: Run, step: int) -> Any:
        batch = {"x": x(run), "scale": 1.0}
        if step in (2, 3):
            batch["mask"] = torch.rand(3, 4, generator=run.data)
        if step in (4, 5):
            batch["note"] = "text"
        return batch

    assert scaled(device, make, 8).report.num_recordings == 3


LAYOUTS: dict[str, Callable[[Run], Tensor]] = {
    "expanded": lambda run: x(run, 1, 4).expand(3, 4),
    "transposed": lambda run: x(run, 4, 3).t(),
    "sliced": lambda run: x(run, 3, 8)[:, ::2],
    "double": lambda run: x(run).double().float(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: torch.device, layout: str) -> None:
    run = scaled(device, lambda run, step: {"x": LAYOUTS[layout](run), "scale": 1.0})
    assert run.report.num_recordings == 1


def test_a_changed_dtype_is_another_key(device: torch.device) -> None:
    """Nothing is cast or broadcast silently."""

    def make(run: Run, step: int) -> Any:
        mask = torch.rand(3, 4, generator=run.data)
        return {"x": x(run), "scale": 1.0, "mask": (mask, mask.double(), mask[:1], mask > 0.5)[step % 4]}

    run = scaled(device, make, 12)
    assert run.report.num_recordings == 4


def test_a_batch_that_changes_after_the_call(device: torch.device) -> None:
    """The caller's buffer may be refilled as soon as the call returns."""
    buffers: dict[Run, Tensor] = {}

    def make(run: Run, step: int) -> Any:
        buffer = buffers.setdefault(run, torch.zeros(3, 4))
        buffer.copy_(x(run))
        return {"x": buffer, "scale": 1.0}

    scaled(device, make)


def test_batches_on_the_device_and_on_the_host(device: torch.device) -> None:
    scaled(device, lambda run, step: {"x": x(run).to(run.device) if step % 2 else x(run), "scale": 1.0}, 8)


@pytest.mark.gpu
def test_pinned_batches() -> None:
    scaled(torch.device("cuda"), lambda run, step: {"x": x(run).pin_memory(), "scale": 1.0})


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_batch_that_wants_a_gradient_gets_it(device: torch.device, is_leaf: bool) -> None:
    """A graph could not pass the gradient on: such calls run eagerly and are counted."""
    outer: dict[Run, nn.Parameter] = {}
    gradients: dict[Run, list[Tensor]] = {}

    def make(run: Run, step: int) -> Any:
        weight = outer.setdefault(run, nn.Parameter(torch.ones(3, 4, device=run.device)))
        if weight.grad is not None:
            gradients.setdefault(run, []).append(weight.grad.clone())
        return {"x": weight if is_leaf else weight * x(run).to(run.device), "scale": 1.0}

    run = scaled(device, make, 4)
    assert run.reasons() == {"a batch wants a gradient": 4}
    eager, graphed = gradients.values()
    assert len(eager) == 3
    assert all(map(torch.equal, eager, graphed))


def test_a_sparse_batch_is_refused_by_path(device: torch.device) -> None:
    run = Run(device, FULL, build=Scaled, forward_backward=forward_backward)
    with pytest.raises(InputMismatchError, match=r"\[0\]\['x'\] is a sparse_coo tensor"):
        run.step(batches=[{"x": torch.eye(3).to_sparse(), "scale": 1.0}])
    run.step(batches=[{"x": torch.ones(3, 4), "scale": 1.0}])
    run.strategy.close()


def test_no_microbatch_at_all_fails_as_eagerly(device: torch.device) -> None:
    for impl in ("none", FULL):
        run = Run(device, impl, build=Scaled, forward_backward=forward_backward)
        with pytest.raises(RuntimeError):
            run.forward_backward([])
        run.strategy.close()
