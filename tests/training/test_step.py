from __future__ import annotations

import copy

import pytest
import torch
from tests.training.doubles import TinyModel, tiny_batches

from graphstep.training.gradients import GradientBuffers
from graphstep.training.step import forward_backward_no_pipelining


@pytest.mark.parametrize("num", [1, 4])
def test_accumulated_gradient_is_that_of_the_mean_loss(num: int) -> None:
    model = TinyModel()
    reference = copy.deepcopy(model)
    buffers = GradientBuffers(model, torch.device("cpu"))
    batches = tiny_batches(num)
    losses = forward_backward_no_pipelining(data_iterator=iter(batches), model=model, num_microbatches=num)
    expected = torch.stack([reference(b["tokens"], b["labels"]) for b in batches])
    expected.mean().backward()
    assert losses.shape == (num,)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    assert torch.equal(losses, expected.detach())
    for slot, parameter in zip(buffers.slots, reference.parameters(), strict=True):
        # Sums of the same terms in another order.
        torch.testing.assert_close(slot.view, parameter.grad, rtol=1e-5, atol=1e-7)


def test_takes_exactly_the_microbatches_asked_for() -> None:
    iterator = iter(tiny_batches(5))
    forward_backward_no_pipelining(data_iterator=iterator, model=TinyModel(), num_microbatches=3)
    assert len(list(iterator)) == 2


def test_forward_only_leaves_gradients_and_mode_alone() -> None:
    model = TinyModel().train()
    buffers = GradientBuffers(model, torch.device("cpu"))
    losses = forward_backward_no_pipelining(
        data_iterator=iter(tiny_batches(2)), model=model, num_microbatches=2, forward_only=True
    )
    assert losses.shape == (2,)
    assert not buffers.flat_buffers[0].any()
    assert model.training
