"""The files of ``graphstep train`` about what was captured: ``--cuda-graph-report`` and ``--cuda-graph-trace``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from graphstep.config import RunConfig
from graphstep.coverage import (
    Fact,
    StepMeasurement,
    Timeline,
    chrome_trace,
    coverage_document,
    write_document,
    write_text,
)
from graphstep.training.loop import Trainer
from graphstep.training.profiled import LastSteps, measure_eager_steps
from graphstep.training.result import TrainResult


class RunFiles:
    """Collects what the files need while a run goes on, and writes them after it. Does nothing if none is wanted.

    Order: :meth:`begin`, :meth:`observe` after each step, :meth:`finish` while the trainer is open, :meth:`write` when
    it is gone.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._last_steps = LastSteps(config)
        self._measured: StepMeasurement | None = None
        self._is_interrupted = False
        self._document: dict[str, Any] = {}

    @property
    def are_wanted(self) -> bool:
        """True if an option names one."""
        return bool(self._config.training.cuda_graph_report or self._config.training.cuda_graph_trace)

    def begin(self, trainer: Trainer) -> None:
        """Before the first step."""
        if self.are_wanted:
            self._last_steps.begin(trainer)

    def observe(self, trainer: Trainer, losses: Tensor) -> None:
        """After each step."""
        self._last_steps.observe(trainer, losses)

    def finish(self, trainer: Trainer, result: TrainResult) -> None:
        """After the last step, while the model is there."""
        if not self.are_wanted:
            return
        self._is_interrupted = result.is_interrupted
        self._measured = StepMeasurement(step_ms=result.step_ms, timeline=self._last_steps.timeline)
        self._document = coverage_document(
            result.report.to_json(),
            model=trainer.model,
            after=self._measured,
            facts=self._facts(trainer, result),
            title="graphstep train",
        )

    def write(self) -> list[str]:
        """Measure eager steps to compare with, unless the run was interrupted, and write the files.

        Returns:
            Lines that say what was written.

        Raises:
            UserInputError: a file cannot be written any more.
        """
        if not self._document or self._measured is None:
            return []
        training = self._config.training
        is_eager = not self._config.graphs.captures_training
        before = self._measured if is_eager else None
        if before is None and not self._is_interrupted:
            before = measure_eager_steps(self._config)
        self._document["before"] = before.to_json() if before is not None else None
        if is_eager:
            self._document["after"] = None
        lines = []
        if training.cuda_graph_report is not None:
            write_document(self._document, training.cuda_graph_report)
            lines.append(f"report: {training.cuda_graph_report}")
        if training.cuda_graph_trace is not None:
            found = {"eager": before, "graphed": None if is_eager else self._measured}
            timelines: dict[str, Timeline] = {
                name: each.timeline for name, each in found.items() if each is not None and each.timeline is not None
            }
            write_text(training.cuda_graph_trace, json.dumps(chrome_trace(timelines)))
            lines.append(f"trace: {training.cuda_graph_trace}")
        return lines

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._last_steps.close()

    def _facts(self, trainer: Trainer, result: TrainResult) -> Sequence[Fact]:
        kind = "resident" if result.device.type == "cpu" else "allocated"
        return (
            Fact("model", f"{trainer.model.num_parameters():,} parameters"),
            Fact("steps", f"{result.iteration - result.first_iteration}"),
            Fact("peak memory", f"{result.peak_bytes / 2**20:.1f} MiB {kind}"),
            Fact("command", f"graphstep train {shlex.join(self._config.to_argv())}"),
        )
