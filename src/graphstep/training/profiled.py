"""Steps of a run under the profiler: the last ones of the run itself, and eager ones to compare them with."""

from __future__ import annotations

import dataclasses
from typing import Final

from torch import Tensor

from graphstep.config import RunConfig
from graphstep.coverage import StepMeasurement, StepProfiler, Timeline, start_profiler
from graphstep.training.compare import silent_eager
from graphstep.training.loop import Trainer

NUM_PROFILED: Final = 3
_NUM_TIMED: Final = 8
_NUM_WARMUP: Final = 3
"""As in the step time of a run, which leaves the first steps out."""


class LastSteps:
    """Profiles the last steps of a run; give :meth:`observe` to a trainer as ``on_step``.

    A run of fewer than eight steps has one profiled, a longer one three: they are part of its median step time.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._last = config.training.train_iters
        self._profiler: StepProfiler | None = None
        self._num_steps = 0
        self._first: int | None = None
        self.timeline: Timeline | None = None

    def begin(self, trainer: Trainer) -> None:
        """Before the first step: set the profiler up."""
        start_profiler(trainer.device)
        self._profiler = StepProfiler(trainer.device)
        num_steps = self._last - trainer.iteration
        self._num_steps = NUM_PROFILED if num_steps >= 8 else 1
        if num_steps > self._num_steps:
            self._first = self._last - self._num_steps

    def observe(self, trainer: Trainer, losses: Tensor) -> None:
        """After each step."""
        del losses
        if self._profiler is None or self._first is None:
            return
        if trainer.iteration == self._first:
            self._profiler.start()
        elif trainer.iteration == self._last and self._profiler.is_running:
            self.timeline = self._profiler.stop(num_steps=self._num_steps)

    def close(self) -> None:
        """End the profiler if the run has ended early. May be called twice."""
        if self._profiler is not None:
            self._profiler.close()


def measure_eager_steps(config: RunConfig) -> StepMeasurement:
    """Train some steps eagerly from the start of a run, with nothing written: first timed, then profiled."""
    eager = silent_eager(config)
    num_steps = _NUM_WARMUP + _NUM_TIMED
    # The checkpoint to start from may be that of the last step.
    train_iters = eager.training.train_iters + num_steps + NUM_PROFILED
    training = dataclasses.replace(eager.training, train_iters=train_iters)
    with Trainer(dataclasses.replace(eager, training=training)) as trainer, StepProfiler(trainer.device) as profiler:
        result = trainer.train(num_steps)
        profiler.start()
        trainer.train(NUM_PROFILED)
        timeline = profiler.stop(num_steps=NUM_PROFILED)
    return StepMeasurement(step_ms=result.step_ms, timeline=timeline)
