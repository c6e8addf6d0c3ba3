"""Stand-ins for parameters during a capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphstep.capture.parameter_aliases import ParameterAliases


def test_the_modules_use_other_leaves_over_the_same_memory() -> None:
    linear = nn.Linear(3, 2)
    weight, bias = linear.weight, linear.bias
    weight.main_grad = torch.zeros(2, 3)
    aliases = ParameterAliases([linear])
    with aliases.installed():
        assert linear.weight is not weight
        assert isinstance(linear.weight, nn.Parameter)
        assert linear.weight.is_leaf
        assert linear.weight.data_ptr() == weight.data_ptr()
        assert linear.weight.main_grad is weight.main_grad
        assert aliases.original_of(linear.weight) is weight
        assert aliases.current_leaf(weight) is linear.weight
        linear.weight.sum().backward()
    assert linear.weight is weight
    assert linear.bias is bias
    assert weight.grad is None


def test_tied_parameters_have_one_alias_and_frozen_ones_stay_frozen() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight.requires_grad_(False)
    with ParameterAliases([first, second]).installed():
        assert first.weight is second.weight
        assert not first.weight.requires_grad


def test_a_parameter_that_the_body_replaces_stays_replaced() -> None:
    linear = nn.Linear(3, 3)
    bias, new = linear.bias, nn.Parameter(torch.ones(3, 3))
    with ParameterAliases([linear]).installed():
        linear.weight = new
    assert linear.weight is new
    assert linear.bias is bias


def test_an_error_of_the_body_puts_the_parameters_back() -> None:
    linear = nn.Linear(3, 3)
    weight = linear.weight
    with pytest.raises(ValueError, match="body"), ParameterAliases([linear]).installed():
        raise ValueError("body")
    assert linear.weight is weight
