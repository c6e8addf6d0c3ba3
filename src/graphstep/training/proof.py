"""Is a run by graphs what it would be without them? Steps of a trainer both ways, before training and beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.config import CudaGraphImpl, RunConfig
from graphstep.strategies import ForwardBackward, Strategy
from graphstep.strategies.build import EagerStrategy
from graphstep.strategies.local_forward import graphs_left_out
from graphstep.training.optimizer import MainWeightAdamW
from graphstep.verification import Tolerance, VerifyReport
from graphstep.verification.compare import Tolerances
from graphstep.verification.run import Verification
from graphstep.verification.shadow_calls import CallShadow
from graphstep.verification.shadow_steps import StepShadow
from graphstep.verification.targets import Target

_MOST_BATCHES = 4
"""Steps whose data is kept for a verification."""
_MOST_ROUNDS = 8
"""Rounds of steps in which everything should be captured."""


class Steps(Protocol):
    """What makes training steps: a trainer."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    config: RunConfig
    device: torch.device
    optimizer: MainWeightAdamW
    strategy: Strategy
    function: ForwardBackward
    """Forward and backward of a step, as it is."""

    def train_on(self, microbatches: Sequence[Any], strategy: Strategy, *, by_graphs: bool) -> tuple[Tensor, Tensor]:
        """Forward, backward and update, out of turn. Returns losses and the norm of the gradient."""

    def sessions(self) -> Sequence[GraphSession]:
        """Owners of the graphs, that of the optimizer among them."""

    def report(self) -> CaptureReport:
        """What has been captured so far."""

    def build_graphs(self) -> None:
        """Free the graphs, and begin anew with warmup and capture."""


class RunProof:
    """Verification and shadow of one run, as its options ask for them.

    Args:
        steps: the trainer.
        log: takes an event, ``verification`` or ``shadow``, and what was found.
    """

    def __init__(self, steps: Steps, log: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._steps, self._log = steps, log
        training = steps.config.training
        self._interval = training.cuda_graph_shadow_interval
        self._tolerances = Tolerances(Tolerance(training.cuda_graph_verify_rtol, training.cuda_graph_verify_atol), {})
        self._iteration = 0
        self._calls: CallShadow | None = None
        self._shadow: StepShadow | None = None

    @property
    def is_wanted(self) -> bool:
        """The options ask for a verification, and there is something to verify."""
        config = self._steps.config
        is_captured = config.graphs.impl is not CudaGraphImpl.none or config.graphs.optimizer
        return config.training.cuda_graph_verify > 0 and is_captured

    def verify(self, batches: Iterator[Any]) -> VerifyReport:
        """Run whole steps both ways, and leave the trainer as it was, with graphs still to be captured."""
        training, steps = self._steps.config.training, self._steps
        number = max(2, min(training.cuda_graph_verify, _MOST_BATCHES))
        target = self._target(
            graphed=lambda batch: steps.train_on(batch, steps.strategy, by_graphs=True),
            eager=lambda batch, strategy: steps.train_on(batch, strategy, by_graphs=False),
        )
        report = Verification(
            target,
            [[next(batches) for _ in range(training.num_microbatches)] for _ in range(number)],
            num_steps=training.cuda_graph_verify,
            warmup_calls=_MOST_ROUNDS,
            tolerances=self._tolerances,
        ).run()
        self._log("verification", {**report.to_json(), "text": report.summary()})
        return report

    # ----- beside the run

    def forward_backward(self, batches: Iterator[Any], num_microbatches: int, iteration: int) -> Tensor:
        """Forward and backward of a step of the run by its strategy; if its turn has come, eagerly as well.

        Args:
            batches: of the run.
            num_microbatches: of a step.
            iteration: number of the step, counted from 1.
        """
        strategy = self._steps.strategy
        if self._interval == 0 or iteration % self._interval:
            return strategy.forward_backward(data_iterator=batches, num_microbatches=num_microbatches)
        self._iteration = iteration
        if self._steps.config.graphs.impl is CudaGraphImpl.full_iteration:
            shadow = self._shadow = self._shadow or self._shadow_of_steps()
            shadow.arm()
            found: Tensor = shadow.run([next(batches) for _ in range(num_microbatches)])
            return found
        calls = self._calls = self._calls or self._shadow_of_calls()
        calls.arm()
        losses = strategy.forward_backward(data_iterator=batches, num_microbatches=num_microbatches)
        calls.disarm()  # Where nothing is captured yet, the next one in turn is compared.
        calls.settle()
        return losses

    def close(self) -> None:
        """Take the hooks of a shadow off. May be called twice."""
        if self._calls is not None:
            self._calls.close()

    def _tell(self, report: VerifyReport) -> None:
        found = replace(report, target=f"iteration {self._iteration}")
        self._log("shadow", {"iteration": self._iteration, **found.to_json(), "text": found.summary()})

    def _shadow_of_steps(self) -> StepShadow:
        def run(batch: Sequence[Any], strategy: Strategy) -> Tensor:
            return strategy.forward_backward(data_iterator=iter(batch), num_microbatches=len(batch))

        target = self._target(graphed=lambda batch: run(batch, self._steps.strategy), eager=run)
        return StepShadow(target, interval=0, on_report=self._tell, tolerances=self._tolerances)

    def _shadow_of_calls(self) -> CallShadow:
        steps = self._steps
        return CallShadow(
            steps.model,
            eagerly=lambda: graphs_left_out(steps.model.modules()),
            report=steps.report,
            device=steps.device,
            interval=0,
            on_report=self._tell,
            tolerances=self._tolerances,
        )

    def _target(self, *, graphed: Callable[[Any], Any], eager: Callable[[Any, Strategy], Any]) -> Target:
        steps = self._steps
        as_it_is = EagerStrategy(steps.function, model=steps.model, device=steps.device)

        def without_graphs(batch: Any) -> Any:
            with graphs_left_out(steps.model.modules()):
                return eager(batch, as_it_is)

        def weights() -> Mapping[str, Tensor]:
            return steps.optimizer.main_weights()

        return Target(
            name=f"training steps of {type(steps.model).__name__}",
            graphed=graphed,
            eager=without_graphs,
            device=steps.device,
            report=steps.report,
            sessions=steps.sessions,
            modules=lambda: [("", steps.model)],
            optimizers=lambda: [steps.optimizer.adamw],
            weights=weights,
            recapture=steps.build_graphs,
        )
