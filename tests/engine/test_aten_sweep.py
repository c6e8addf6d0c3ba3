"""Many ATen operations one by one: replays with changed inputs give what a call gives, bit for bit, into old memory.

This checks the choice of the out-variant, which is made by comparing schemas, on inputs that are contiguous or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.aten_samples import SAMPLES, Sample, Spec
from tests.engine.programs import assert_same_bits, snapshot, tensors_of
from torch import Tensor

from graphstep.engine import TapeEngine
from graphstep.engine.tape_ops import OperationTable, Replay


def contiguous(spec: Spec) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype)


def reversed_dimensions(spec: Spec) -> Tensor:
    return torch.zeros(spec.shape[::-1], dtype=spec.dtype).permute(list(reversed(range(len(spec.shape)))))


def every_second(spec: Spec) -> Tensor:
    """Every second element, from the third on."""
    if not spec.shape:
        return torch.zeros(5, dtype=spec.dtype)[3]
    wide = torch.zeros(*spec.shape[:-1], 2 * spec.shape[-1] + 2, dtype=spec.dtype)
    return wide[..., 2::2]


NEED_CONTIGUOUS = (
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
LAYOUTS: tuple[Callable[[Spec], Tensor], ...] = (contiguous, reversed_dimensions, every_second)


def fill(tensor: Tensor, spec: Spec) -> None:
    if spec.kind == "ints":
        tensor.copy_(torch.randint(0, spec.high, spec.shape))
    elif spec.kind == "bools":
        tensor.copy_(torch.rand(spec.shape) > 0.5)
    else:
        values = torch.randn(spec.shape, dtype=spec.dtype if spec.kind == "complexes" else torch.float32)
        tensor.copy_(values.abs() + 0.1 if spec.kind == "positive" else values)


def made(value: Any, layout: Callable[[Spec], Tensor], inputs: list[tuple[Tensor, Spec]]) -> Any:
    """The argument with tensors in the place of descriptions; they are added to ``inputs``."""
    if isinstance(value, Spec):
        inputs.append((layout(value), value))
        return inputs[-1][0]
    if isinstance(value, list):
        return [made(item, layout, inputs) for item in value]
    return value


def overload(name: str) -> Any:
    base, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), kind or "default")


def call(sample: Sample, layout: Callable[[Spec], Tensor]) -> tuple[Callable[[], Any], list[tuple[Tensor, Spec]]]:
    inputs: list[tuple[Tensor, Spec]] = []
    args = [made(value, layout, inputs) for value in sample.args]
    return lambda: overload(sample.name)(*args, **sample.kwargs), inputs


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_replay_equals_call(tape: TapeEngine, sample: Sample, layout: Callable[[Spec], Tensor]) -> None:
    if layout is not contiguous and overload(sample.name) in NEED_CONTIGUOUS:
        pytest.skip("the kernel takes only contiguous tensors")
    run, inputs = call(sample, layout)
    for tensor, spec in inputs:
        fill(tensor, spec)
    recording = tape.capture(run)
    addresses = [result.data_ptr() for result in tensors_of(recording.result)]
    for _ in range(2):
        for tensor, spec in inputs:
            fill(tensor, spec)
        for result in tensors_of(recording.result):
            if not any(result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t, _ in inputs):
                result.fill_(1)  # what stands there may not survive
        before = snapshot(*(tensor for tensor, _ in inputs))
        recording.replay()
        expected = run()
        assert snapshot(*(tensor for tensor, _ in inputs)) == before, "an input was written"
        assert_same_bits(recording.result, expected, sample.name)
        assert [result.data_ptr() for result in tensors_of(recording.result)] == addresses
        for found, wanted in zip(tensors_of(recording.result), tensors_of(expected), strict=True):
            assert found.stride() == wanted.stride() or found.numel() < 2
    recording.close()


def test_most_operations_write_in_place() -> None:
    """The samples are only worth something while most of them use an out-variant."""
    table = OperationTable()
    replays = [table.of(overload(sample.name)).replay for sample in SAMPLES]
    assert replays.count(Replay.OUT) > 0.6 * len(replays)
    assert replays.count(Replay.COPY) > 10
    assert len({sample.name for sample in SAMPLES}) > 150
