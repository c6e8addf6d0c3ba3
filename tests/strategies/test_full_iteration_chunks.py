"""Forward-backward functions of pipelines: model chunks with data of their own, further arguments, any results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphstep.capture.session import GraphSession
from graphstep.config.switches import MismatchPolicy
from graphstep.errors import ConfigError, InputMismatchError
from graphstep.strategies import FullCudaGraphWrapper

NUM_STEPS = 8


@dataclass
class Batch:
    """Of one chunk."""

    values: Tensor


def of_chunks(
    *,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    forward_step_func: Callable[[Tensor], Tensor] = torch.square,
    scale: float = 1.0,
    target: Tensor | None = None,
) -> Any:
    """The second chunk adds data of its own to what the first gives, if it has some."""
    found = []
    for _ in range(num_microbatches):
        values = next(data_iterator[0]).values
        with torch.set_grad_enabled(not forward_only):
            hidden = model[0](values)
            if data_iterator[1] is not None:
                hidden = hidden + next(data_iterator[1]).values
            loss = forward_step_func(model[1](hidden)).mean() * scale
            if target is not None:
                loss = loss + (loss - target).square()
            if not forward_only:
                loss.backward()
        found.append({"loss": loss.detach(), "size": len(values)})
    return found


class Job:
    """Two chunks, and data for each."""

    def __init__(self, device: torch.device, is_graphed: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.chunks = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)).to(device) for _ in range(2)]
        self.session = GraphSession(device)
        self.wrapper = FullCudaGraphWrapper(of_chunks, model=self.chunks, session=self.session, **options)
        self.call: Any = self.wrapper if is_graphed else self.eagerly
        self.data = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)]
        self.trace: list[Tensor] = []
        torch.manual_seed(3)

    def eagerly(self, **arguments: Any) -> Any:
        return of_chunks(**{**arguments, "model": self.chunks})

    def batches(self, chunk: int) -> Iterator[Batch]:
        while True:
            yield Batch(torch.randn(3, 4, generator=self.data[chunk]).to(self.device))

    def step(self, number: int = 2, *, has_both: bool = True, **others: Any) -> Any:
        iterators = [self.batches(0), self.batches(1) if has_both else None]
        found = self.call(data_iterator=iterators, num_microbatches=number, **others)
        assert [each["size"] for each in found] == [3] * number
        self.trace += [each["loss"].clone() for each in found]
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    self.trace.append(parameter.grad.clone())
        return found


def compared(device: torch.device, script: Callable[[Job], None]) -> Any:
    plain = Job(device, False)
    script(plain)
    graphed = Job(device, True)
    script(graphed)
    assert len(plain.trace) == len(graphed.trace)
    assert all(map(torch.equal, plain.trace, graphed.trace))
    report = graphed.session.report()
    graphed.session.close()
    return report


def test_chunks_have_data_of_their_own(device: torch.device) -> None:
    report = compared(device, lambda job: [job.step() for _ in range(NUM_STEPS)])
    assert report.rows[0].num_replays == NUM_STEPS - 3


def test_a_chunk_without_data(device: torch.device) -> None:
    def script(job: Job) -> None:
        for index in range(NUM_STEPS * 2):
            job.step(has_both=index % 2 == 0)

    report = compared(device, script)
    assert (report.num_recordings, report.rows[0].num_replays) == (2, 2 * NUM_STEPS - 6)


def test_the_number_counts_where_no_chunk_has_data(device: torch.device) -> None:
    """As on a stage in the middle of a pipeline, of which nothing but the number of microbatches is known."""
    weight = torch.ones(2, device=device)

    def middle(*, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool = False) -> Tensor:
        assert data_iterator is None
        return weight * num_microbatches

    session = GraphSession(device)
    wrapper = FullCudaGraphWrapper(middle, model=nn.Linear(1, 1).to(device), session=session)
    for _ in range(6):
        for number in (2, 3):
            assert torch.equal(wrapper(data_iterator=None, num_microbatches=number, forward_only=True), weight * number)
    session.close()


def test_further_arguments_are_part_of_the_key_or_inputs(device: torch.device) -> None:
    def script(job: Job) -> None:
        for index in range(NUM_STEPS):
            for scale in (1.0, 0.5):
                target = torch.tensor(float(index), device=job.device)
                job.step(forward_step_func=torch.abs, scale=scale, target=target, model=job.chunks)

    report = compared(device, script)
    assert (report.num_recordings, report.rows[0].num_replays) == (2, 2 * NUM_STEPS - 6)


def test_validation_of_chunks(device: torch.device) -> None:
    def script(job: Job) -> None:
        for _ in range(NUM_STEPS):
            job.step()
            for chunk in job.chunks:
                chunk.eval()
            job.step(1, forward_only=True)
            for chunk in job.chunks:
                chunk.train()

    report = compared(device, script)
    assert [row.num_replays for row in report.rows] == [NUM_STEPS - 3] * 2


def test_a_chunk_of_the_data_that_changes_is_named(device: torch.device) -> None:
    job = Job(device, True, on_mismatch=MismatchPolicy.error)
    for _ in range(4):
        job.step()
    with pytest.raises(InputMismatchError):
        job.step(has_both=False)
    job.session.close()


def test_another_model_is_refused(device: torch.device) -> None:
    job = Job(device, True)
    with pytest.raises(ConfigError, match="another model"):
        job.step(model=list(job.chunks))
    job.session.close()
