"""A loop around a step that may be one graph, with all its state, and steps for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphstep

Loop = Callable[..., Any]


class Net(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(16, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(torch.relu(self.norm(self.inner(values))))
        return self.outer(hidden)


class Job:
    """A loop whose step may be wrapped; with all state, and everything it returned."""

    def __init__(
        self, device: torch.device, is_graphed: bool, make_step: Callable[[Job], Loop], **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Net().to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=2.0**-7, weight_decay=0.1, fused=True
        )
        self.clip = torch.tensor(1.0, device=device)
        self.is_graphed = is_graphed
        plain = make_step(self)
        self.step: Any = graphstep.graph_step(plain, **options) if is_graphed else plain
        self.data = torch.Generator().manual_seed(1)
        self.trace: list[dict[str, Any]] = []
        self.kept: list[Any] = []

    def batch(self, size: int = 6) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(size, 12, generator=self.data).to(self.device)
        return drawn[:, :8], drawn[:, 8:]

    def run(self, *args: Any, size: int = 6, **kwargs: Any) -> Any:
        result = self.step(self.batch(size), *args, **kwargs)
        self.note(result)
        return result

    def note(self, result: Any) -> None:
        self.kept.append(result)
        taken = {f"model {name}": value.detach().clone() for name, value in self.model.state_dict().items()}
        for index, state in enumerate(self.optimizer.state.values()):
            taken.update((f"state {index} {key}", v.clone()) for key, v in state.items() if isinstance(v, Tensor))
        for name, parameter in self.model.named_parameters():
            taken[f"grad {name}"] = torch.zeros(0) if parameter.grad is None else parameter.grad.clone()
        taken["rng"] = torch.cuda.get_rng_state() if self.device.type == "cuda" else torch.get_rng_state()
        self.trace.append(taken)

    def close(self) -> None:
        if self.is_graphed:
            self.step.close()


def plain_step(job: Job) -> Loop:
    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        values, targets = batch
        job.optimizer.zero_grad()
        loss = nn.functional.mse_loss(job.model(values), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
        job.optimizer.step()
        return loss.detach()

    return step


def zeroing_last(job: Job) -> Loop:
    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(job.model(batch[0]), batch[1])
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        return loss.detach()

    return step


def zeroing_in_place(job: Job) -> Loop:
    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        job.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(job.model(batch[0]), batch[1])
        loss.backward()
        job.optimizer.step()
        return loss.detach()

    return step


def without_zeroing(job: Job) -> Loop:
    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(job.model(batch[0]), batch[1])
        loss.backward()
        return loss.detach()

    return step


def of_microbatches(job: Job) -> Loop:
    def step(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        job.optimizer.zero_grad()
        losses = []
        for values, targets in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = nn.functional.mse_loss(job.model(values), targets)
            (loss / 2).backward()
            losses.append(loss.detach())
        job.optimizer.step()
        return {"losses": torch.stack(losses)}

    return step


def same(mine: Job, theirs: Job) -> list[str]:
    found = []
    for index, (one, other) in enumerate(zip(mine.trace, theirs.trace, strict=True)):
        assert one.keys() == other.keys()
        found += [f"{index}: {key}" for key in one if not torch.allclose(one[key], other[key], 0, 0, equal_nan=True)]
    for index, (kept, other_kept) in enumerate(zip(mine.kept, theirs.kept, strict=True)):
        flat, other_flat = flat_tensors(kept), flat_tensors(other_kept)
        found += [
            f"{index}: result"
            for a, b in zip(flat, other_flat, strict=True)
            if not torch.allclose(a, b, 0, 0, equal_nan=True)
        ]
    return found


def flat_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in (value.values() if isinstance(value, dict) else value) for tensor in flat_tensors(each)]


def compared(
    device: torch.device, make_step: Callable[[Job], Loop], script: Callable[[Job], None], **options: Any
) -> Job:
    jobs = [Job(device, is_graphed, make_step, **options) for is_graphed in (False, True)]
    for job in jobs:
        torch.manual_seed(2)
        script(job)
    assert same(*jobs) == []
    return jobs[1]


def replays(job: Job) -> int:
    return sum(row.num_replays for row in job.step.report().rows)
