"""Training runs that differ only in their strategy, and a comparison of everything that they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tests.strategies.models import VOCABULARY, Decoder, run_microbatches
from torch import Tensor, nn

from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.config import CudaGraphConfig
from graphstep.strategies import FullCudaGraphWrapper, Strategy, build_strategy
from graphstep.training.gradients import GradientBuffers

Snapshot = dict[str, Any]


class Run:
    """One training run.

    ``zero``: how gradients are zeroed: ``zeros``, ``none``, or by the ``buffers`` of the training loop. ``options`` go
    to :class:`FullCudaGraphWrapper`.
    """

    def __init__(
        self,
        device: torch.device,
        impl: str,
        *,
        build: Callable[[], nn.Module] = Decoder,
        forward_backward: Callable[..., Tensor] = run_microbatches,
        warmup_steps: int = 1,
        modules: Sequence[str] = (),
        zero: str = "none",
        autocast: torch.dtype | None = None,
        lr: float = 1e-2,
        policy: str = "required",
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.zero, self.autocast = device, zero, autocast
        self.model = build().to(device)
        self.buffers = GradientBuffers(self.model, device) if zero == "buffers" else None
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=lr, weight_decay=0.1)
        modules = modules if impl == "local" else ()
        self.strategy: Strategy
        if impl == "full_iteration" and options:
            self.strategy = FullCudaGraphWrapper(
                forward_backward,
                model=self.model,
                session=GraphSession(device),
                cuda_graph_warmup_steps=warmup_steps,
                **options,
            )
        else:
            self.strategy = build_strategy(
                CudaGraphConfig(impl=impl, warmup_steps=warmup_steps, modules=modules, policy=policy),
                model=self.model,
                forward_backward_func=forward_backward,
                device=device,
            )
        self.data = torch.Generator().manual_seed(1)
        self.trace: list[Snapshot] = []
        self.kept: list[Tensor] = []

    def batch(self, *, size: int = 2, length: int = 6) -> dict[str, Any]:
        drawn = torch.randint(VOCABULARY, (size, length + 1), generator=self.data)
        return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}

    def forward_backward(self, batches: Sequence[Any], *, forward_only: bool = False) -> Tensor:
        mode = torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext()
        with mode:
            losses = self.strategy.forward_backward(
                data_iterator=iter(batches), num_microbatches=len(batches), forward_only=forward_only
            )
        self.kept.append(losses)
        return losses

    def step(
        self, num_microbatches: int = 1, *, batches: Sequence[Any] = (), optimize: bool = True, **shape: int
    ) -> Tensor:
        """One training step, with everything that it leaves noted."""
        if self.buffers is not None:
            self.buffers.zero()
        else:
            self.optimizer.zero_grad(set_to_none=self.zero == "none")
        losses = self.forward_backward(batches or [self.batch(**shape) for _ in range(num_microbatches)])
        self.note(losses)
        if optimize:
            self.optimizer.step()
        self.strategy.end_step()
        return losses

    def evaluate(self, num_microbatches: int = 1, **shape: int) -> Tensor:
        was_training = self.model.training
        self.model.eval()
        losses = self.forward_backward([self.batch(**shape) for _ in range(num_microbatches)], forward_only=True)
        self.model.train(was_training)
        self.note(losses)
        return losses

    def note(self, losses: Tensor) -> None:
        taken: Snapshot = {"losses": losses.clone(), "rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            taken["cuda rng"] = torch.cuda.get_rng_state(self.device)
        state = {**self.model.state_dict(), **dict(self.model.named_buffers())}  # Those that are not saved as well.
        taken.update((name, value.detach().clone()) for name, value in state.items())
        for name, parameter in self.model.named_parameters():
            for kind in ("grad", "main_grad"):
                gradient = getattr(parameter, kind, None)
                taken[f"{name}.{kind}"] = None if gradient is None else gradient.clone()
        self.trace.append(taken)

    @property
    def report(self) -> CaptureReport:
        return self.strategy.report()

    @property
    def num_replays(self) -> int:
        return sum(row.num_replays for row in self.report.rows)

    def reasons(self) -> dict[str, int]:
        """Eager calls by reason, over all regions."""
        found: dict[str, int] = {}
        for row in self.report.rows:
            for reason, count in row.eager_calls.items():
                found[reason] = found.get(reason, 0) + count
        return found


def differences(mine: Sequence[Snapshot], theirs: Sequence[Snapshot]) -> list[str]:
    """Step and name of everything that is not the same, bit for bit."""
    assert len(mine) == len(theirs)
    found = []
    for step, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one.keys() == other.keys()
        found += [f"step {step}: {name}" for name in one if not _same(one[name], other[name])]
    return found


def _same(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def compared(device: torch.device, impl: str, script: Callable[[Run], Any], **options: Any) -> Run:
    """Run ``script`` eagerly and with a strategy, and insist on the same bits. Returns the run with the strategy.

    ``options`` are those of :class:`Run`, and ``schedule``, which makes a forward-backward function for each run.
    """
    runs = []
    schedule = options.pop("schedule", None)
    for each in ("none", impl):
        run = Run(device, each, **options, **({"forward_backward": schedule()} if schedule else {}))
        script(run)
        runs.append(run)
    insist_on_the_same_bits(*runs)
    runs[1].strategy.close()
    return runs[1]


def insist_on_the_same_bits(eager: Run, graphed: Run) -> None:
    assert eager.trace, "the script noted nothing"
    assert differences(eager.trace, graphed.trace) == []
    for number, (mine, theirs) in enumerate(zip(eager.kept, graphed.kept, strict=True)):
        assert torch.equal(mine, theirs), f"result {number} changed after it was returned"


def steps(num_steps: int = 5, num_microbatches: int = 1, **shape: int) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        for _ in range(num_steps):
            run.step(num_microbatches, **shape)

    return script
