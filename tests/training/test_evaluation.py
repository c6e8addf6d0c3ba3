from __future__ import annotations

import pytest
import torch
from tests.training.doubles import EagerStrategy, TinyModel, tiny_batches
from torch import Tensor, nn

from graphstep.config import CudaGraphConfig
from graphstep.training.evaluation import evaluate
from graphstep.training.step import forward_backward_no_pipelining

CPU = torch.device("cpu")


class NoisyModel(TinyModel):
    """Draws random numbers in eval mode too, and has a part that is frozen in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Dropout(0.5)
        self.modes: list[bool] = []

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        self.modes.append(self.training)
        return super().forward(tokens_BS, labels_BS) + 0.0 * torch.rand(())


def run(model: nn.Module, num_iters: int = 2, num_microbatches: int = 2) -> float:
    strategy = EagerStrategy(
        CudaGraphConfig(), model=model, forward_backward_func=forward_backward_no_pipelining, device=CPU
    )
    batches = iter(tiny_batches(num_iters * num_microbatches))
    return evaluate(strategy, model, batches, num_iters=num_iters, num_microbatches=num_microbatches, device=CPU)


def test_the_loss_is_the_mean_over_all_batches() -> None:
    model = TinyModel()
    expected = torch.stack([model(b["tokens"], b["labels"]) for b in tiny_batches(4)]).mean().item()
    assert run(model) == pytest.approx(expected, rel=1e-6)


def test_modes_and_generators_are_as_before() -> None:
    model = NoisyModel().train()
    model.frozen.eval()
    state = torch.get_rng_state()
    run(model)
    assert model.modes == [False] * 4
    assert torch.equal(torch.get_rng_state(), state)
    assert [model.training, model.inner.training, model.frozen.training] == [True, True, False]


def test_modes_and_generators_are_as_before_also_after_an_error() -> None:
    model = NoisyModel().train()
    state = torch.get_rng_state()
    with pytest.raises(StopIteration):
        evaluate(
            EagerStrategy(
                CudaGraphConfig(), model=model, forward_backward_func=forward_backward_no_pipelining, device=CPU
            ),
            model,
            iter(tiny_batches(1)),
            num_iters=1,
            num_microbatches=2,
            device=CPU,
        )
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
