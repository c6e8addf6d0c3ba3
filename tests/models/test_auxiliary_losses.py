"""Losses of routers get the gradient of the returned loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphstep.models.auxiliary_losses import GradientScale, attach_loss, mark_loss


def layers(x: Tensor, weight: Tensor, scale: GradientScale, coefficient: float) -> Tensor:
    hidden = x * weight
    hidden = attach_loss(hidden, hidden.square().mean(), scale, coefficient)
    return mark_loss((hidden * 3.0).sum(), scale)


@pytest.mark.parametrize("factor", [1.0, 0.125, 2.0**40])
@pytest.mark.parametrize("coefficient", [1.0, 0.01])
def test_gradients_are_those_of_the_sum_of_losses(factor: float, coefficient: float) -> None:
    x, weight = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64, requires_grad=True)
    scale = GradientScale()
    (layers(x, weight, scale, coefficient) * factor).backward()
    gradient, weight.grad = weight.grad, None
    hidden = x * weight
    (((hidden * 3.0).sum() + coefficient * hidden.square().mean()) * factor).backward()
    # The scale, and with it the coefficient, is kept in float32.
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-7, atol=0.0)
    assert scale.value.item() == factor


def test_the_returned_loss_and_what_is_passed_on_are_unchanged() -> None:
    x, weight = torch.randn(5), torch.randn(5, requires_grad=True)
    assert torch.equal(layers(x, weight, GradientScale(), 0.5), (x * weight * 3.0).sum())


def test_without_a_mark_the_coefficient_alone_counts() -> None:
    weight = torch.ones(3, requires_grad=True)
    attach_loss(weight, weight.sum(), GradientScale(), 0.5).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.5, 1.5, 1.5]


def test_interleaved_microbatches_do_not_mix() -> None:
    weight = torch.ones(3, requires_grad=True)
    scale = GradientScale()
    first = layers(torch.ones(3), weight, scale, 0.5)
    second = layers(torch.ones(3), weight, scale, 0.5)
    (first * 2.0).backward()
    (second * 4.0).backward()
    gradient, weight.grad = weight.grad, None
    for factor in (2.0, 4.0):
        (layers(torch.ones(3), weight, GradientScale(), 0.5) * factor).backward()
    assert torch.equal(gradient, weight.grad)


def test_the_gradient_of_a_leaf_loss_is_not_the_buffer() -> None:
    loss, scale = torch.zeros((), requires_grad=True), GradientScale()
    attach_loss(torch.ones(2, requires_grad=True), loss, scale).sum().backward()
    assert loss.grad is not None
    scale.value.fill_(7.0)
    assert loss.grad.item() == 1.0


def test_the_scale_is_not_saved_and_follows_to_the_meta_device() -> None:
    assert GradientScale().state_dict() == {}
    scale = GradientScale().to("meta")
    assert scale.value.is_meta
