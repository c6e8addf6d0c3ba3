"""Where a recording accumulates: always in memory of the training loop, whatever the loop does to ``.grad``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphstep.capture.gradients import GradientHomes, leaves_reached
from graphstep.errors import LifecycleError, StaleAddressError


@pytest.fixture
def leaf(device: torch.device) -> Tensor:
    return nn.Parameter(torch.ones(3, device=device))


def homes_of(*leaves: Tensor) -> GradientHomes:
    homes = GradientHomes()
    homes.add(leaves)
    return homes


def test_an_existing_gradient_is_the_home(leaf: Tensor) -> None:
    leaf.grad = torch.full_like(leaf, 2.0)
    grad = leaf.grad
    homes = homes_of(leaf)
    assert leaf.grad is grad
    assert homes.of(leaf).data_ptr() == grad.data_ptr()
    assert torch.equal(grad, torch.full_like(leaf, 2.0))


def test_main_grad_is_the_home_where_there_is_one(leaf: Tensor) -> None:
    leaf.main_grad = torch.zeros(3, dtype=torch.float64, device=leaf.device)  # type: ignore[attr-defined]
    homes = homes_of(leaf)
    assert homes.of(leaf).data_ptr() == leaf.main_grad.data_ptr()  # type: ignore[attr-defined]
    assert leaf.grad is None


def test_a_parameter_without_gradient_gets_zeros(leaf: Tensor) -> None:
    home = homes_of(leaf).of(leaf)
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == home.data_ptr()
    assert torch.equal(home, torch.zeros_like(leaf))


def test_set_to_none_means_zero(leaf: Tensor) -> None:
    homes = homes_of(leaf)
    homes.of(leaf).fill_(5.0)
    leaf.grad = None
    homes.settle()
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == homes.of(leaf).data_ptr()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_a_gradient_that_somebody_keeps_stays_as_it_is(leaf: Tensor) -> None:
    homes = homes_of(leaf)
    kept = []
    for value in (1.0, 2.0, 3.0):
        homes.of(leaf).fill_(value)
        kept.append(leaf.grad)
        leaf.grad = None
        homes.settle()
    assert [float(gradient[0]) for gradient in kept] == [1.0, 2.0, 3.0]
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_the_same_tensor_is_shown_again_if_nobody_keeps_it(leaf: Tensor) -> None:
    homes = homes_of(leaf)
    before = id(leaf.grad)
    for _ in range(3):
        leaf.grad = None
        homes.settle()
        assert id(leaf.grad) == before


def test_a_replaced_gradient_is_copied_home(leaf: Tensor) -> None:
    homes = homes_of(leaf)
    leaf.grad = given = torch.full_like(leaf, 3.0)
    guests = homes.settle()
    assert torch.equal(homes.of(leaf), torch.full_like(leaf, 3.0))
    homes.of(leaf).add_(1.0)
    homes.hand_out(guests)
    assert leaf.grad is given
    assert torch.equal(given, torch.full_like(leaf, 4.0))


def test_swapped_gradients_keep_their_values(device: torch.device) -> None:
    first, second = (nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    homes = homes_of(first, second)
    homes.of(first).fill_(1.0)
    homes.of(second).fill_(2.0)
    first.grad, second.grad = second.grad, first.grad
    assert homes.settle() == {}
    assert [float(leaf.grad[0]) for leaf in (first, second)] == [2.0, 1.0]
    assert [float(homes.of(leaf)[0]) for leaf in (first, second)] == [2.0, 1.0]


def test_an_alias_of_a_gradient_that_somebody_keeps_is_refused(leaf: Tensor) -> None:
    homes = GradientHomes(shared := {})
    homes.add([leaf])
    for home in shared.values():
        home.note_holders()
    kept = leaf.grad.detach()  # type: ignore[union-attr]
    leaf.grad = None
    with pytest.raises(LifecycleError, match="kept through another tensor"):
        homes.settle()
    del kept
    homes.settle()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_forgetting_leaves_no_gradient_behind(device: torch.device) -> None:
    new, existing, taken = (nn.Parameter(torch.ones(3, device=device)) for _ in range(3))
    existing.grad = torch.full_like(existing, 2.0)
    homes = homes_of(new, existing, taken)
    taken.grad = torch.full_like(taken, 3.0)
    homes.forget()
    assert new.grad is None
    assert torch.equal(existing.grad, torch.full_like(existing, 2.0))
    assert torch.equal(taken.grad, torch.full_like(taken, 3.0))


def test_settling_leaves_a_gradient_in_place_alone(leaf: Tensor) -> None:
    homes = homes_of(leaf)
    homes.of(leaf).fill_(5.0)
    version = homes.of(leaf)._version
    homes.settle()
    assert torch.equal(homes.of(leaf), torch.full_like(leaf, 5.0))
    assert homes.of(leaf)._version == version


def test_a_gradient_whose_storage_moved_is_refused(leaf: Tensor) -> None:
    homes = homes_of(leaf)
    leaf.grad.data = torch.zeros_like(leaf)  # type: ignore[union-attr]
    with pytest.raises(StaleAddressError, match="grad"):
        homes.settle()


@pytest.mark.parametrize("how", ["replaced", "moved", "removed"])
def test_a_moved_main_grad_is_refused(leaf: Tensor, how: str) -> None:
    leaf.main_grad = torch.zeros_like(leaf)  # type: ignore[attr-defined]
    homes = homes_of(leaf)
    if how == "replaced":
        leaf.main_grad = torch.zeros_like(leaf)  # type: ignore[attr-defined]
    elif how == "moved":
        leaf.main_grad.data = torch.zeros_like(leaf)  # type: ignore[attr-defined]
    else:
        del leaf.main_grad  # type: ignore[attr-defined]
    with pytest.raises(StaleAddressError, match="main_grad"):
        homes.settle()


def test_a_main_grad_that_appears_later_is_refused(leaf: Tensor) -> None:
    homes = homes_of(leaf)
    leaf.main_grad = torch.zeros_like(leaf)  # type: ignore[attr-defined]
    with pytest.raises(StaleAddressError, match="main_grad"):
        homes.settle()


def test_leaves_reached_are_those_that_backward_would_fill(device: torch.device) -> None:
    a, b, c, frozen = (nn.Parameter(torch.ones(2, device=device)) for _ in range(4))
    frozen.requires_grad_(False)
    out = (a * 2 + frozen) * (a + b.detach() * 3)
    assert [id(leaf) for leaf in leaves_reached([out])] == [id(a)]
    assert {id(leaf) for leaf in leaves_reached([out, c])} == {id(a), id(c)}
    assert {id(leaf) for leaf in leaves_reached([out, c * 2])} == {id(a), id(c)}
    assert leaves_reached([frozen]) == []
