"""Is a graphed run the same as an eager one? Losses of every step and all weights afterwards, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphstep.config import CudaGraphConfig, RunConfig
from graphstep.strategies import build_strategy
from graphstep.training.loop import StrategyFactory, Trainer


class StepTrace:
    """Remembers what the first steps of a run computed; give :meth:`observe` to a trainer as ``on_step``.

    Args:
        num_steps: steps to remember. After the last of them the weights are copied to the CPU, once.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.weights: dict[str, Tensor] | None = None
        self._losses: list[Tensor] = []

    @property
    def num_observed(self) -> int:
        """Steps remembered so far."""
        return len(self._losses)

    @property
    def losses(self) -> list[Tensor]:
        """Losses of each step, [num_microbatches] fp32 on the CPU."""
        return [loss.cpu() for loss in self._losses]

    def observe(self, trainer: Trainer, losses: Tensor) -> None:
        """Take note of one step."""
        if self.num_observed < self.num_steps:
            self._losses.append(losses)
            if self.num_observed == self.num_steps:
                self.finish(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Copy the weights now if that has not happened: the run has ended early, after the steps observed so far."""
        if self.weights is None:
            self.num_steps = self.num_observed
            self.weights = {name: t.detach().to("cpu", copy=True) for name, t in trainer.weights().items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two runs part."""

    step: int | None
    """First step whose losses differ, counted from 1 at the start of the comparison; None when all losses are equal."""
    loss_error: float
    """Largest absolute difference of the losses of that step."""
    tensor: str | None
    """The weight that differs most after the last step; None when all weights are equal."""
    weight_error: float
    """Largest absolute difference in that weight."""
    num_tensors: int
    """Weights that differ after the last step."""

    def __str__(self) -> str:
        text = "all losses are equal"
        if self.step is not None:
            text = f"losses first differ at step {self.step}, by {self.loss_error:.3g}"
        if self.tensor is None:
            return f"{text}; all weights are equal"
        return f"{text}; {self.num_tensors} weights differ, {self.tensor} most, by {self.weight_error:.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Outcome of a comparison with eager training."""

    num_steps: int
    difference: Difference | None
    """None: bitwise equal."""
    eager_step_ms: float | None
    """Median time of an eager step after the first three."""

    @property
    def is_equal(self) -> bool:
        """True when every loss and every weight is the same, bit for bit."""
        return self.difference is None


def compare_with_eager(
    config: RunConfig, trace: StepTrace, *, strategy_factory: StrategyFactory = build_strategy
) -> Comparison:
    """Train as many steps eagerly, from the same start, and compare with ``trace``.

    Args:
        config: that of the traced run; the eager run writes no files, does not validate, and starts from the same
            checkpoint, so ``training.load`` must name the folder of that checkpoint.
        trace: finished.
        strategy_factory: as for :class:`~graphstep.training.loop.Trainer`.
    """
    eager = silent_eager(config)
    own = StepTrace(trace.num_steps)
    with Trainer(eager, strategy_factory=strategy_factory, on_step=own.observe) as trainer:
        result = trainer.train(trace.num_steps)
        own.finish(trainer)
    return Comparison(num_steps=own.num_steps, difference=first_difference(own, trace), eager_step_ms=result.step_ms)


def silent_eager(config: RunConfig) -> RunConfig:
    """The same run eagerly, without validation, and with no file written."""
    silent = dataclasses.replace(
        config.training,
        save=None,
        save_interval=0,
        tensorboard_dir=None,
        log_jsonl=None,
        cuda_graph_report=None,
        cuda_graph_trace=None,
        eval_iters=0,
    )
    return dataclasses.replace(config, training=silent, graphs=CudaGraphConfig())


def first_difference(eager: StepTrace, graphed: StepTrace) -> Difference | None:
    """Return where two finished traces part, or None. NaN equals NaN of the same bits, and 0 differs from -0."""
    pairs = enumerate(zip(eager.losses, graphed.losses, strict=True), start=1)
    step, loss_error = next(((step, _error(a, b)) for step, (a, b) in pairs if not _same_bits(a, b)), (None, 0.0))
    errors = _weight_errors(eager.weights or {}, graphed.weights or {})
    if step is None and not errors:
        return None
    worst = max(errors, key=lambda name: errors[name], default=None)
    return Difference(
        step=step,
        loss_error=loss_error,
        tensor=worst,
        weight_error=0.0 if worst is None else errors[worst],
        num_tensors=len(errors),
    )


def _weight_errors(eager: Mapping[str, Tensor], graphed: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: _error(t, graphed[name]) for name, t in eager.items() if not _same_bits(t, graphed[name])}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _error(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; infinite where it is not a number."""
    error = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"))
    return float(error.max()) if error.numel() else 0.0
