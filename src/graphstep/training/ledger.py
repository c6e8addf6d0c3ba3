"""The books of a run: losses, gradient norms and times of steps, read back to the host only when asked."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphstep.capture.report import CaptureReport
from graphstep.training.timing import StepTimer, median_ms

_NUM_KEPT_TIMES = 1000
_NUM_EAGER_WARMUP_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The steps since the last reading."""

    iteration: int
    """Completed steps of the run."""
    num_steps: int
    loss: float
    """Mean over the steps of the interval."""
    grad_norm: float
    """Of the last step, before clipping."""
    learning_rate: float
    """Of the last step."""
    step_ms: float
    """Mean time of a step."""
    bad_iterations: tuple[int, ...]
    """Steps whose loss or gradient norm is not finite, counted from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    iteration: int
    losses: Tensor
    grad_norm: Tensor
    learning_rate: float
    is_steady: bool


class StepLedger:
    """Collects what steps leave on the device; :meth:`read` turns it into numbers with two host reads.

    Args:
        device: where steps run; says how they are timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.timer = StepTimer(device)
        self.first_loss: float | None = None
        """Mean loss of the first step."""
        self.last_loss: float | None = None
        """Mean loss of the last interval."""
        self._pending: list[_Step] = []
        self._steady_ms: deque[float] = deque(maxlen=_NUM_KEPT_TIMES)

    @property
    def steady_step_ms(self) -> float | None:
        """Median time of the latest steady steps that were read, or None."""
        return median_ms(list(self._steady_ms))

    def add(self, iteration: int, losses: Tensor, grad_norm: Tensor, learning_rate: float, *, is_steady: bool) -> None:
        """Take in one step that the timer has timed; nothing is read.

        Args:
            iteration: its number, counted from 1.
            losses: [num_microbatches] fp32, not overwritten later.
            grad_norm: scalar, not overwritten later.
            learning_rate: of its update.
            is_steady: warmup and capture are over: the time counts for the median.
        """
        self._pending.append(_Step(iteration, losses, grad_norm, learning_rate, is_steady))

    def read(self) -> Interval | None:
        """Read the steps since the last call; None if there are none. Waits for the device."""
        steps, self._pending = self._pending, []
        if not steps:
            return None
        losses = torch.stack([step.losses.mean() for step in steps]).tolist()
        norms = torch.stack([step.grad_norm for step in steps]).tolist()
        times = self.timer.drain()
        self._steady_ms.extend(ms for ms, step in zip(times, steps, strict=True) if step.is_steady)
        if self.first_loss is None:
            self.first_loss = losses[0]
        self.last_loss = statistics.fmean(losses)
        return Interval(
            iteration=steps[-1].iteration,
            num_steps=len(steps),
            loss=self.last_loss,
            grad_norm=norms[-1],
            learning_rate=steps[-1].learning_rate,
            step_ms=statistics.fmean(times),
            bad_iterations=tuple(
                step.iteration
                for step, loss, norm in zip(steps, losses, norms, strict=True)
                if not (math.isfinite(loss) and math.isfinite(norm))
            ),
        )


class Steadiness:
    """Tells from which step on steps run as all later ones will: after warmup and capture.

    Args:
        report: what is captured; asked around each step until it is steady.
        is_eager: nothing is captured: steady after three steps, when the libraries have set themselves up.
    """

    def __init__(self, report: Callable[[], CaptureReport], *, is_eager: bool) -> None:
        self._report = report
        self._is_eager = is_eager
        self._is_steady = False
        self._num_steps = 0
        self._before = (0, 0)

    def begin_step(self) -> None:
        """Take note of what is captured before the step."""
        if not self._is_steady and not self._is_eager:
            self._before = self._counts()

    def end_step(self) -> bool:
        """Return whether the step just made was steady: it replayed, and recorded nothing."""
        self._num_steps += 1
        if self._is_eager:
            return self._num_steps > _NUM_EAGER_WARMUP_STEPS
        if not self._is_steady:
            num_recordings, num_replays = self._counts()
            self._is_steady = num_recordings == self._before[0] and num_replays > self._before[1]
        return self._is_steady

    def _counts(self) -> tuple[int, int]:
        report = self._report()
        return report.num_recordings, sum(row.num_replays for row in report.rows)
