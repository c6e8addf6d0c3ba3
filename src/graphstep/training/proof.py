"""Is a run by graphs what it would be without them? Steps of a trainer both ways, before training or beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.strategies import ForwardBackward, Strategy
from graphstep.strategies.build import EagerStrategy
from graphstep.strategies.local_forward import graphs_left_out
from graphstep.verification.compare import Tolerance, Tolerances
from graphstep.verification.report import VerifyReport
from graphstep.verification.run import Verification
from graphstep.verification.targets import Target

_MOST_BATCHES = 4
"""Steps whose data is kept for a verification."""


class Steps(Protocol):
    """What runs whole training steps: a trainer."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    def train_on(self, microbatches: Sequence[Any], strategy: Strategy, *, by_graphs: bool) -> tuple[Tensor, Tensor]:
        """Forward, backward and update on these. Returns losses and the norm of the gradient."""

    def strategies(self) -> tuple[Strategy, Sequence[GraphSession]]:
        """The strategy of the run, and the owners of its graphs and of that of the optimizer."""

    def report(self) -> CaptureReport:
        """What has been captured so far."""

    def build_graphs(self) -> None:
        """Close the strategy and the graph of the optimizer, and make new ones that have captured nothing."""


def verify_steps(
    trainer: Steps,
    function: ForwardBackward,
    batches: Iterator[Any],
    *,
    device: torch.device,
    num_steps: int,
    num_microbatches: int,
    optimizer: torch.optim.Optimizer,
    main_weights: dict[str, Tensor],
    tolerance: Tolerance,
) -> VerifyReport:
    """Run whole steps of a trainer both ways, and leave it as it was, with graphs still to be captured.

    Args:
        trainer: makes the steps.
        function: forward and backward of a step, as it is.
        batches: of the run, from its start.
        device: where it runs.
        num_steps: to compare.
        num_microbatches: of each step.
        optimizer: the one that steps.
        main_weights: copies of half-precision weights, by name.
        tolerance: how far replays may be from eager.
    """
    eager_strategy = EagerStrategy(function, model=trainer.model, device=device)

    def eager(microbatches: Any) -> Any:
        with graphs_left_out(trainer.model.modules()):
            return trainer.train_on(microbatches, eager_strategy, by_graphs=False)

    target = Target(
        name=f"training steps of {type(trainer.model).__name__}",
        graphed=lambda microbatches: trainer.train_on(microbatches, trainer.strategies()[0], by_graphs=True),
        eager=eager,
        device=device,
        report=trainer.report,
        sessions=lambda: trainer.strategies()[1],
        modules=lambda: [("", trainer.model)],
        optimizers=lambda: [optimizer],
        weights=lambda: main_weights,
        recapture=trainer.build_graphs,
    )
    number = max(2, min(num_steps, _MOST_BATCHES))
    return Verification(
        target,
        [[next(batches) for _ in range(num_microbatches)] for _ in range(number)],
        num_steps=num_steps,
        warmup_calls=8,
        tolerances=Tolerances(tolerance, {}),
    ).run()
