from __future__ import annotations

import pytest
import torch

from graphstep.training.determinism import (
    deterministic_algorithms,
    preserved_random_state,
    random_state,
    restore_random_state,
    seeded_random_state,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", DEVICES)
def test_a_seeded_state_is_that_of_manual_seed_and_touches_nothing(kind: str) -> None:
    device = torch.device(kind)
    before = random_state(device)
    seeded = seeded_random_state(77, device)
    assert all(torch.equal(state, before[name]) for name, state in random_state(device).items())
    torch.manual_seed(77)
    expected = torch.rand(4, device=device)
    restore_random_state(seeded, device)
    assert torch.equal(torch.rand(4, device=device), expected)


def draw_and_fail(device: torch.device) -> None:
    with preserved_random_state(device):
        torch.rand(9, device=device)
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", DEVICES)
def test_draws_inside_are_undone_also_after_an_error(kind: str) -> None:
    device = torch.device(kind)
    torch.manual_seed(1)
    expected = torch.rand(4, device=device)
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError):
        draw_and_fail(device)
    assert torch.equal(torch.rand(4, device=device), expected)


@pytest.mark.parametrize("warn_only", [False, True])
def test_the_former_setting_comes_back(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with deterministic_algorithms(True):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    finally:
        torch.use_deterministic_algorithms(False)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
