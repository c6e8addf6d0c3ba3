"""Clipping by a threshold in a tensor: the bits of torch with a number, in a graph too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.strategies.step_jobs import Job, Loop, compared, replays
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, ConfigError

THRESHOLDS = (0.03, 0.7, 0.011, 1e3, 0.05, 0.033, 0.1, 0.2, 0.07, 0.0)


def with_gradients(dtypes: tuple[torch.dtype, ...], device: torch.device) -> list[Tensor]:
    """The last one has none."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.zeros(size, dtype=dtypes[index % len(dtypes)], device=device) for index, size in enumerate((9, 65, 3))
    ]
    for each in made:
        each.grad = (torch.randn(each.shape, generator=generator) / 8).to(each)
    return [*made, torch.zeros(2, device=device)]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.float64,), (torch.bfloat16,), (torch.float16,), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_bits_are_those_of_torch_with_a_number(
    device: torch.device, dtypes: tuple[torch.dtype, ...], foreach: bool | None, norm_type: float
) -> None:
    kind = torch.float64 if torch.float64 in dtypes else torch.float32
    for value in THRESHOLDS:
        expected, found, by_number = (with_gradients(dtypes, device) for _ in range(3))
        threshold = torch.tensor(value, dtype=kind, device=device)
        norms = [
            nn.utils.clip_grad_norm_(expected, value, norm_type, foreach=foreach),
            graphstep.clip_grad_norm_(found, threshold, norm_type, foreach=foreach),
            graphstep.clip_grad_norm_(by_number, value, norm_type, foreach=foreach),
        ]
        assert torch.equal(norms[0], norms[1])
        assert torch.equal(norms[0], norms[2])
        for each, other, third in zip(expected[:-1], found[:-1], by_number[:-1], strict=True):
            assert each.grad is not None
            assert other.grad is not None
            assert third.grad is not None
            assert torch.equal(each.grad, other.grad)
            assert torch.equal(each.grad, third.grad)
        assert found[-1].grad is None


def test_nothing_to_clip() -> None:
    weight = torch.zeros(2)
    assert graphstep.clip_grad_norm_(weight, torch.tensor(1.0)) == nn.utils.clip_grad_norm_(weight, 1.0) == 0


@pytest.mark.parametrize(
    "threshold", [torch.ones(2), torch.ones((), dtype=torch.int64), torch.ones((), device="meta")], ids=str
)
def test_what_is_no_threshold_is_refused_and_nothing_is_clipped(threshold: Tensor) -> None:
    weight = torch.zeros(2)
    weight.grad = torch.ones(2)
    with pytest.raises(ConfigError, match="a threshold in a tensor has one entry") as caught:
        graphstep.clip_grad_norm_([weight], threshold)
    assert "torch.tensor(1.0, device='cpu')" in str(caught.value)
    assert torch.equal(weight.grad, torch.ones(2))


Clip = Callable[[list[Tensor]], Tensor]


def clipping_by(clip_of: Callable[[Job], Clip]) -> Callable[[Job], Loop]:
    def make(job: Job) -> Loop:
        clip, parameters = clip_of(job), list(job.model.parameters())

        def step(batch: tuple[Tensor, Tensor]) -> Tensor:
            job.optimizer.zero_grad()
            nn.functional.mse_loss(job.model(batch[0]), batch[1]).backward()
            norm = clip(parameters)
            job.optimizer.step()
            return norm

        return step

    return make


class Schedule:
    """A threshold, as a number."""

    def __init__(self) -> None:
        self.number = 0.0


def test_a_graph_follows_a_threshold_in_a_tensor(device: torch.device) -> None:
    """Against torch with the number, without a graph."""
    schedule = Schedule()

    def clip_of(job: Job) -> Clip:
        threshold = job.clip

        def by_tensor(parameters: list[Tensor]) -> Tensor:
            return graphstep.clip_grad_norm_(parameters, threshold)

        def by_number(parameters: list[Tensor]) -> Tensor:
            return nn.utils.clip_grad_norm_(parameters, schedule.number)

        return by_tensor if job.is_graphed else by_number

    def script(job: Job) -> None:
        for value in THRESHOLDS:
            schedule.number = value
            job.clip.fill_(value)
            job.run()

    job = compared(device, clipping_by(clip_of), script)
    assert replays(job) == len(THRESHOLDS) - 3
    job.close()


def test_a_number_has_the_step_captured_anew_and_is_warned_of(device: torch.device) -> None:
    schedule = Schedule()

    def clip(parameters: list[Tensor]) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, schedule.number)

    def script(job: Job) -> None:
        for index in range(24):
            schedule.number = THRESHOLDS[index // 6]
            job.run()

    with pytest.warns(UserWarning, match=r"number changes; keep it .* \(graphstep.clip_grad_norm_ takes one\)"):
        job = compared(device, clipping_by(lambda _: clip), script)
    assert replays(job) == 24 - 3 - 3 * 2
    job.close()


@pytest.mark.parametrize("is_tensor", [True, False])
def test_where_torch_reads_a_value_back_the_error_tells_of_the_one_that_does_not(
    device: torch.device, is_tensor: bool
) -> None:
    threshold = torch.tensor(0.5, device=device) if is_tensor else 0.5

    def clip(parameters: list[Tensor]) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, threshold, error_if_nonfinite=not is_tensor)

    job = Job(device, True, clipping_by(lambda _: clip))
    for _ in range(3):
        job.run()
    with pytest.raises(CaptureError) as caught:
        job.run()
    assert "a tensor to graphstep.clip_grad_norm_" in caught.value.fix
    assert "test_clipping.py" in caught.value.where
    job.close()
