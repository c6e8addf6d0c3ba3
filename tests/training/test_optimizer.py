from __future__ import annotations

import copy

import pytest
import torch
from tests.training.doubles import TinyModel, tiny_batches
from torch import nn

from graphstep.errors import CheckpointError
from graphstep.training.gradients import GradientBuffers
from graphstep.training.optimizer import MainWeightAdamW

CPU = torch.device("cpu")


def build(model: nn.Module) -> tuple[GradientBuffers, MainWeightAdamW]:
    gradients = GradientBuffers(model, CPU)
    return gradients, MainWeightAdamW(gradients, betas=(0.9, 0.95), eps=1e-6)


def train(model: nn.Module, gradients: GradientBuffers, optimizer: MainWeightAdamW, num: int, seed: int = 0) -> None:
    for step, batch in enumerate(tiny_batches(num, seed)):
        gradients.zero()
        model(batch["tokens"], batch["labels"]).backward()
        optimizer.step(lr=1e-2 * (step + 1), weight_decay=0.1)


def test_fp32_equals_torch_with_the_same_groups_bit_for_bit() -> None:
    model = TinyModel()
    reference = copy.deepcopy(model)
    train(model, *build(model), 4)
    groups = [
        {"params": [p for p in reference.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6, fused=True)
    for step, batch in enumerate(tiny_batches(4)):
        adamw.zero_grad()
        reference(batch["tokens"], batch["labels"]).backward()
        for group in adamw.param_groups:
            group["lr"] = float(torch.tensor(1e-2 * (step + 1)))  # as a number in fp32, which a graph has
        adamw.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_one_update_is_the_formula() -> None:
    model = nn.Linear(1, 1)
    gradients, optimizer = build(model)
    weight, bias = model.weight.item(), model.bias.item()
    gradients.slots[0].view.fill_(0.5)
    gradients.slots[1].view.fill_(-2.0)
    optimizer.step(lr=0.1, weight_decay=0.2)
    # First step: both bias-corrected moments are the gradient and its square.
    assert model.weight.item() == pytest.approx(weight * (1 - 0.1 * 0.2) - 0.1 * 0.5 / (0.5 + 1e-6), rel=1e-6)
    assert model.bias.item() == pytest.approx(bias + 0.1, rel=1e-5), "biases are not decayed"


def test_bf16_parameters_are_rounded_main_weights() -> None:
    model = TinyModel(torch.bfloat16)
    gradients, optimizer = build(model)
    train(model, gradients, optimizer, 5)
    main = optimizer.main_weights()
    assert list(main) == [name for name, _ in model.named_parameters()]
    moved = 0
    for name, parameter in model.named_parameters():
        assert main[name].dtype == torch.float32
        assert torch.equal(parameter, main[name].bfloat16())
        moved += int((main[name] != parameter.float()).sum())
    assert moved > 0, "main weights should hold more than bf16 can"


def test_updates_too_small_for_bf16_add_up_in_the_main_weights() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    gradients, optimizer = build(model)
    for _ in range(20):
        gradients.zero()
        gradients.slots[0].view.fill_(1.0)
        optimizer.step(lr=5e-4, weight_decay=0.0)
    assert model.weight.item() == pytest.approx(0.99, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_is_exact_and_keeps_addresses(dtype: torch.dtype) -> None:
    first = TinyModel(dtype)
    first_parts = build(first)
    train(first, *first_parts, 3)
    second = TinyModel(dtype)
    second_parts = build(second)
    addresses = {name: t.data_ptr() for name, t in second_parts[1].state_dict().items()}
    second.load_state_dict(first.state_dict())
    second_parts[1].load_state_dict(first_parts[1].state_dict())
    train(first, *first_parts, 3, seed=1)
    train(second, *second_parts, 3, seed=1)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, tensor in second_parts[1].state_dict().items():
        assert tensor.data_ptr() == addresses[name]
        assert torch.equal(tensor, first_parts[1].state_dict()[name])


def test_loading_a_state_that_does_not_fit_names_everything_and_changes_nothing() -> None:
    model = TinyModel()
    _, optimizer = build(model)
    state = {name: tensor.clone() + 1 for name, tensor in optimizer.state_dict().items()}
    del state["exp_avg.inner.bias"]
    state["exp_avg.outer.weight"] = torch.zeros(1)
    state["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(state)
    text = str(caught.value)
    assert all(name in text for name in ("exp_avg.inner.bias", "exp_avg.outer.weight", "extra"))
    assert all(not tensor.any() for tensor in optimizer.state_dict().values())
