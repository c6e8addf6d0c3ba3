"""Moved, replaced and removed tensors are named before anything is replayed; writing in place is fine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphstep.capture.manifest import Manifest, verify
from graphstep.errors import StaleAddressError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("absent", None)


class Model(nn.Module):
    """Ten parameters, two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(3, 3)


@pytest.fixture
def model(device: torch.device) -> Model:
    return Model().to(device)


def watched(model: nn.Module) -> Any:
    return Manifest().watch([("", model)])


def refusal(model: nn.Module, change: Callable[[], Any]) -> str:
    noted = watched(model)
    verify(noted, "before")
    change()
    with pytest.raises(StaleAddressError) as caught:
        verify(noted, "here")
    assert caught.value.where == "here"
    assert caught.value.fix
    return caught.value.what


def test_every_parameter_and_buffer_is_noted_with_its_path(model: Model) -> None:
    names = {entry.name: entry.role.value for entry in watched(model).entries if entry.tensor is not None}
    assert {name for name, role in names.items() if role == "weight"} == {n for n, _ in model.named_parameters()}
    assert {name for name, role in names.items() if role == "state"} == {n for n, _ in model.named_buffers()}


def test_a_replaced_parameter_is_named_and_only_it(model: Model) -> None:
    def change() -> None:
        model.blocks[1].linear.weight = nn.Parameter(model.blocks[1].linear.weight.detach().clone())

    text = refusal(model, change)
    assert "blocks.1.linear.weight" in text
    assert "replaced" in text
    assert text.count(";") == 0
    assert "blocks.0" not in text


def test_all_moved_tensors_are_named_at_once(model: Model) -> None:
    def change() -> None:
        model.head.bias.data = model.head.bias.data.clone()
        model.blocks[0].mask = torch.zeros_like(model.blocks[0].mask)

    text = refusal(model, change)
    assert "weight head.bias moved" in text
    assert "state blocks.0.mask was replaced" in text


def test_a_removed_buffer_is_named(model: Model) -> None:
    def change() -> None:
        model.blocks[0].mask = None

    assert "blocks.0.mask was removed" in refusal(model, change)


def test_a_deleted_parameter_is_named(model: Model) -> None:
    def change() -> None:
        del model.head.bias

    assert "head.bias was removed" in refusal(model, change)


def test_an_added_parameter_is_named(model: Model) -> None:
    def change() -> None:
        model.head.register_parameter("lora_A", nn.Parameter(torch.zeros(1)))

    assert "head.lora_A" in refusal(model, change)


def test_a_buffer_that_appears_is_named(model: Model) -> None:
    def change() -> None:
        model.blocks[0].absent = torch.ones(2)

    assert "blocks.0.absent" in refusal(model, change)


def test_a_replaced_module_is_named(model: Model) -> None:
    def change() -> None:
        model.blocks[0].linear = nn.Sequential(model.blocks[0].linear)

    assert "blocks.0.linear" in refusal(model, change)


def test_an_added_module_is_named(model: Model) -> None:
    def change() -> None:
        model.head.adapter = nn.Linear(3, 3)

    assert "head.adapter" in refusal(model, change)


def test_a_removed_module_is_named(model: Model) -> None:
    def change() -> None:
        del model.blocks[1]

    assert "blocks.1" in refusal(model, change)


def test_freezing_a_parameter_is_named(model: Model) -> None:
    def change() -> None:
        model.head.weight.requires_grad_(False)

    text = refusal(model, change)
    assert "head.weight" in text
    assert "requires_grad" in text


def reshaped(parameter: Tensor) -> None:
    parameter.data = parameter.data.t()


def narrowed(parameter: Tensor) -> None:
    parameter.data = parameter.data[:2]


@pytest.mark.parametrize("change", [reshaped, narrowed])
def test_another_layout_at_the_same_address_is_named(change: Callable[[Tensor], None], model: Model) -> None:
    assert "head.weight" in refusal(model, lambda: change(model.head.weight))


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "data": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "another dtype": lambda model: model.to(torch.bfloat16),
    "there and back": lambda model: model.double().float(),
    "assigned state": lambda model: model.load_state_dict(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
    ),
    "swapped": lambda model: [
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone())) for p in model.parameters()
    ],
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_the_model_is_refused(name: str, model: Model) -> None:
    text = refusal(model, lambda: MOVES[name](model))
    assert all(parameter in text for parameter, _ in model.named_parameters())


@pytest.mark.gpu
def test_offload_and_reload_is_refused() -> None:
    model = Model().cuda()
    kept: list[Tensor] = []

    def change() -> None:
        model.cpu()
        kept.append(torch.empty(1024, device="cuda"))
        model.cuda()

    assert "head.weight" in refusal(model, change)


def test_writing_in_place_is_fine(model: Model) -> None:
    noted = watched(model)
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    model.blocks[0].mask.add_(1)
    model.train(False)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    verify(noted, "here")


def test_addresses_are_those_of_the_last_look(model: Model) -> None:
    manifest = Manifest()
    first = manifest.watch([("", model)])
    model.head.bias.data = model.head.bias.data.clone()
    verify(manifest.watch([("", model)]), "second look")
    with pytest.raises(StaleAddressError, match=r"head\.bias"):
        verify(first, "first look")


def test_a_leaf_outside_the_model_is_watched(model: Model, device: torch.device) -> None:
    prompt = nn.Parameter(torch.zeros(2, 3, device=device))
    noted = Manifest().watch([("", model)], [prompt, model.head.bias])
    verify(noted, "here")
    prompt.data = torch.ones_like(prompt)
    with pytest.raises(StaleAddressError, match=r"shape \(2, 3\) outside the model moved"):
        verify(noted, "here")


def test_a_shared_parameter_is_fine(device: torch.device) -> None:
    model = Model().to(device)
    model.head.weight = model.blocks[0].linear.weight
    verify(watched(model), "here")
