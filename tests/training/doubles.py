"""Small stand-ins for the tests of training: an eager strategy, a tiny configuration, a log in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.config import CudaGraphConfig, DataConfig, ModelConfig, RunConfig, TrainingConfig
from graphstep.strategies import ForwardBackward


class EagerStrategy:
    """Captures nothing; says that it captures for training in the step after ``warmup_steps`` ones, and replays then.

    For validation it says that it captures and replays from the first call on.
    """

    def __init__(
        self,
        graphs: CudaGraphConfig,
        *,
        model: nn.Module,
        forward_backward_func: ForwardBackward,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self.graphs = graphs
        self.model = model
        self.forward_backward_func = forward_backward_func
        self.num_steps = 0
        self.num_closed = 0
        self.rows = (RegionStats("training", "iteration"), RegionStats("validation", "iteration"))

    def forward_backward(
        self, *, data_iterator: Iterator[Mapping[str, Tensor]], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        row = self.rows[1 if forward_only else 0]
        if forward_only or self.num_steps >= self.graphs.warmup_steps:
            row.num_recordings = 1
            row.num_replays += 1
        return self.forward_backward_func(
            data_iterator=data_iterator,
            model=self.model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
        )

    def end_step(self) -> None:
        self.num_steps += 1

    def report(self) -> CaptureReport:
        return CaptureReport("double", self.rows, 0)

    def close(self) -> None:
        self.num_closed += 1


class DisturbedStrategy(EagerStrategy):
    """Calls ``disturb(model, number of the step)`` behind each training forward-backward."""

    def __init__(self, disturb: Callable[[nn.Module, int], None], graphs: CudaGraphConfig, **parts: Any) -> None:
        super().__init__(graphs, **parts)
        self.disturb = disturb

    def forward_backward(self, *, forward_only: bool = False, **arguments: Any) -> Tensor:
        losses = super().forward_backward(forward_only=forward_only, **arguments)
        if not forward_only:
            self.disturb(self.model, self.num_steps + 1)
        return losses


class MemoryLog:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        self.events.append((event, dict(values)))

    def close(self) -> None:
        self.events.append(("closed", {}))


class TinyModel(nn.Module):
    """Two linear layers on one-hot-like embeddings; loss like a language model's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, dtype=dtype)
        self.inner = nn.Linear(6, 5, dtype=dtype)
        self.outer = nn.Linear(5, 11, bias=False, dtype=dtype)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV = self.outer(torch.tanh(self.inner(self.embedding(tokens_BS))))
        return nn.functional.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


def tiny_batches(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, 11, (2, 5), generator=generator) for _ in range(num)]
    return [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in draw]


def tiny_config(*, model: Mapping[str, Any] | None = None, graphs: str = "none", **training: Any) -> RunConfig:
    """A GPT of one layer on mock data, with dropout; keywords go to the training configuration."""
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    options = {
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": 6,
        "lr_warmup_iters": 2,
        "lr_decay_style": "cosine",
        "eval_iters": 0,
        "log_interval": 2,
        "device": "cpu",
    }
    run = RunConfig(
        model=ModelConfig(**{**shape, **(model or {})}),
        training=TrainingConfig(**{**options, **training}),
        data=DataConfig(mock_data=True),
    )
    return dataclasses.replace(run, graphs=CudaGraphConfig(impl=graphs, warmup_steps=1))
