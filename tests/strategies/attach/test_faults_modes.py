"""Switches that choose kernels, and tensors of inference mode among the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, num_replays, train
from tests.strategies.runs import differences
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphstep.engine import kernel_switches

FLAGS: dict[str, tuple[Any, str]] = {
    "bf16 sums": (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "fp16 sums": (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "fp16 accumulation": (torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    "cudnn tf32": (torch.backends.cudnn, "allow_tf32"),
    "cudnn deterministic": (torch.backends.cudnn, "deterministic"),
    "cudnn benchmark": (torch.backends.cudnn, "benchmark"),
    "cudnn": (torch.backends.cudnn, "enabled"),
}


@contextmanager
def flipped(name: str) -> Iterator[None]:
    owner, flag = FLAGS[name]
    before = getattr(owner, flag)
    setattr(owner, flag, not before)
    try:
        yield
    finally:
        setattr(owner, flag, before)


@pytest.mark.parametrize("name", FLAGS)
def test_e4_switches_of_libraries_are_part_of_the_signature(device: torch.device, name: str) -> None:
    model = built(partial(Stack, 2), device)
    with attached(model, LAYERS, on_mismatch="eager") as manager:
        train(model, device, 3)
        replays = num_replays(manager)
        with flipped(name):
            train(model, device, 1)
        assert num_replays(manager) == replays
        assert manager.report().rows[0].last_mismatch[0].startswith("backend_flags was")
        train(model, device, 1)
        assert num_replays(manager) == replays + 2


class Telling(nn.Module):
    """Notes what its function has run under, whoever has called it: warmup and capture as well."""

    def __init__(self, seen: set[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.__dict__["_note"] = lambda: seen.add(
            (kernel_switches.backend_flags(), kernel_switches.attention_backends(), torch.get_default_dtype())
        )

    def forward(self, x: Tensor) -> Tensor:
        self._note()
        result: Tensor = self.linear(x)
        return result


@contextmanager
def everything_changed() -> Iterator[None]:
    with flipped("cudnn deterministic"), flipped("bf16 sums"), flipped("cudnn tf32"), sdpa_kernel(SDPBackend.MATH):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def test_e4_a_layer_is_captured_under_the_switches_of_its_call(device: torch.device) -> None:
    """Not under those of the call that has led to the capture, which may be another layer's."""

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        if index == 0:
            return layer(x)  # type: ignore[no-any-return]
        with everything_changed():
            return layer(x)  # type: ignore[no-any-return]

    seen: list[set[Any]] = [set(), set()]
    made = iter(seen)
    model = built(partial(Stack, 2, lambda: Telling(next(made)), call), device)
    before = kernel_switches.backend_flags(), kernel_switches.attention_backends()
    with attached(model, LAYERS) as manager:
        train(model, device, 4)
        assert num_replays(manager) == 2 * 3
    assert [len(each) for each in seen] == [1, 1]
    assert not seen[0] & seen[1]
    assert before == (kernel_switches.backend_flags(), kernel_switches.attention_backends())


def test_rounding_of_cudnn_set_through_the_newer_interface() -> None:
    conv: Any = getattr(torch.backends.cudnn, "conv", None)
    if not hasattr(conv, "fp32_precision"):
        pytest.skip("this torch has no such interface")
    kept, before = conv.fp32_precision, kernel_switches.backend_flags()
    try:
        conv.fp32_precision = "ieee"
        changed = kernel_switches.backend_flags()
        assert changed != before
        conv.fp32_precision = kept
        assert kernel_switches.backend_flags() == before
        kernel_switches.set_backend_flags(changed)
        assert kernel_switches.backend_flags() == changed
    finally:
        conv.fp32_precision = kept


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * mask.clone()
        return y


@pytest.mark.parametrize("merge_layers", [1, 0])
@pytest.mark.parametrize("changes", [True, False])
def test_e5_arguments_of_inference_mode(device: torch.device, merge_layers: int, changes: bool) -> None:
    """Also changed in place between two layers, in that mode, where nothing tells of it."""
    masks: list[Tensor] = []

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        with torch.inference_mode():
            if index == 0:
                masks[:] = [torch.full((HIDDEN,), 0.5, device=x.device)]
            elif changes:
                masks[0].add_(0.25)
        y: Tensor = layer(x, masks[0])
        return y

    build = partial(Stack, 3, Masked, call)
    expected = train(built(build, device), device, 6)
    model = built(build, device)
    with attached(model, LAYERS, merge_layers=merge_layers) as manager:
        assert differences(expected, train(model, device, 6)) == []
        assert num_replays(manager) > 0


class Shifted(nn.Module):
    """Has a buffer of inference mode, and gives back another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("shift", torch.zeros(HIDDEN))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        with torch.inference_mode():
            self.shift = torch.full_like(self.linear.bias, 0.5)
        return self

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.shift
        return y


@pytest.mark.parametrize("merge_layers", [1, 0])
def test_e5_a_buffer_of_inference_mode(device: torch.device, merge_layers: int) -> None:
    """Written between two layers, where nothing tells of it: they are launched one by one."""

    def call(layer: Any, x: Tensor, index: int) -> Tensor:
        if index:
            with torch.inference_mode():
                layer.shift.mul_(1.5)
        return layer(x)  # type: ignore[no-any-return]

    build = partial(Stack, 3, Shifted, call)
    expected = train(built(build, device), device, 6)
    model = built(build, device)
    with attached(model, LAYERS, merge_layers=merge_layers) as manager:
        assert differences(expected, train(model, device, 6)) == []
        assert num_replays(manager) == 3 * 5
