from __future__ import annotations

import copy

import pytest
import torch
from tests.training.doubles import TinyModel, tiny_batches
from torch import nn

from graphstep.training.gradients import ALIGNMENT_BYTES, GradientBuffers

CPU = torch.device("cpu")


def backward(model: nn.Module, num: int = 1, seed: int = 0) -> None:
    for batch in tiny_batches(num, seed):
        model(batch["tokens"], batch["labels"]).backward()


def test_fp32_gradients_are_views_that_backward_adds_to() -> None:
    model = TinyModel()
    reference = copy.deepcopy(model)
    buffers = GradientBuffers(model, CPU)
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    backward(model, 3)
    backward(reference, 3)
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    (flat,) = buffers.flat_buffers
    assert flat.is_contiguous()
    for slot, expected in zip(buffers.slots, reference.parameters(), strict=True):
        assert torch.equal(slot.view, expected.grad)
        assert slot.view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_views_are_aligned_and_do_not_overlap() -> None:
    model = TinyModel()
    buffers = GradientBuffers(model, CPU)
    for index, slot in enumerate(buffers.slots):
        assert slot.view.data_ptr() % ALIGNMENT_BYTES == 0
        slot.view.fill_(float(index + 1))
    for index, slot in enumerate(buffers.slots):
        assert bool((slot.view == index + 1).all())


def test_zero_keeps_addresses_and_clears_everything() -> None:
    model = TinyModel()
    buffers = GradientBuffers(model, CPU)
    backward(model)
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    buffers.zero()
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    assert all(not flat.any() for flat in buffers.flat_buffers)


@pytest.mark.parametrize("replacement", [lambda p: None, torch.ones_like], ids=["none", "another-tensor"])
def test_install_puts_the_views_back(replacement) -> None:
    model = TinyModel()
    buffers = GradientBuffers(model, CPU)
    backward(model)
    kept = [slot.view.clone() for slot in buffers.slots]
    for parameter in model.parameters():
        parameter.grad = replacement(parameter)
    buffers.install()
    for slot, expected in zip(buffers.slots, kept, strict=True):
        assert slot.parameter.grad is slot.view
        assert torch.equal(slot.view, expected)


def test_bf16_gradients_are_summed_in_fp32_and_dropped() -> None:
    model = TinyModel(torch.bfloat16)
    reference = copy.deepcopy(model)
    buffers = GradientBuffers(model, CPU)
    backward(model, 4)
    sums = [torch.zeros(p.shape) for p in reference.parameters()]
    for batch in tiny_batches(4):
        reference.zero_grad()
        reference(batch["tokens"], batch["labels"]).backward()
        for total, parameter in zip(sums, reference.parameters(), strict=True):
            total.add_(parameter.grad)
    for slot, expected in zip(buffers.slots, sums, strict=True):
        assert slot.parameter.grad is None
        assert slot.parameter.main_grad is slot.view
        assert slot.view.dtype == torch.float32
        assert torch.equal(slot.view, expected)


def test_one_buffer_per_dtype_and_frozen_parameters_have_none() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3).double(), "c": nn.Linear(2, 2).bfloat16()})
    model["a"].bias.requires_grad_(False)
    buffers = GradientBuffers(model, CPU)
    assert [flat.dtype for flat in buffers.flat_buffers] == [torch.float32, torch.float64]
    assert [slot.name for slot in buffers.slots] == ["a.weight", "b.weight", "b.bias", "c.weight", "c.bias"]
    assert model["a"].bias.grad is None


def test_a_shared_parameter_has_one_gradient() -> None:
    model = TinyModel()
    model.outer = nn.Linear(6, 11, bias=False)
    model.outer.weight = model.embedding.weight
    buffers = GradientBuffers(model, CPU)
    assert [slot.name for slot in buffers.slots] == ["embedding.weight", "inner.weight", "inner.bias"]


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_clipping_match_torch(max_norm: float, dtype: torch.dtype) -> None:
    model = TinyModel(dtype)
    buffers = GradientBuffers(model, CPU)
    backward(model, 2)
    references = [nn.Parameter(torch.empty_like(slot.view)) for slot in buffers.slots]
    for reference, slot in zip(references, buffers.slots, strict=True):
        reference.grad = slot.view.clone()
    expected = torch.nn.utils.clip_grad_norm_(references, max_norm)
    norm = buffers.norm()
    divisor = buffers.clip_divisor(norm, max_norm)
    # One reduction over the buffer and a norm of norms round differently.
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
    for reference, slot in zip(references, buffers.slots, strict=True):
        torch.testing.assert_close(slot.view / divisor, reference.grad, rtol=1e-6, atol=0.0)


def test_norm_spans_all_buffers() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False).double()})
    buffers = GradientBuffers(model, CPU)
    for flat, value in zip(buffers.flat_buffers, (3.0, 4.0), strict=True):
        flat[0] = value
    assert float(buffers.norm()) == pytest.approx(5.0)


def test_close_lets_go_of_the_model() -> None:
    half, full = TinyModel(torch.bfloat16), TinyModel()
    for model in (half, full):
        buffers = GradientBuffers(model, CPU)
        buffers.close()
        buffers.close()
        assert all(p.grad is None and not hasattr(p, "main_grad") for p in model.parameters())
    backward(half)
    assert all(p.grad is not None for p in half.parameters())
