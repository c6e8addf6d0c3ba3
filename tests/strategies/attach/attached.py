"""Plain training loops around an attached manager, each with an eager twin that must leave the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tests.strategies.models import Decoder, Layer, in_order
from tests.strategies.runs import Run, insist_on_the_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphstep
from graphstep.capture.report import CaptureReport
from graphstep.config import CudaGraphConfig

WITH_DROPOUT = partial(Decoder, dropout=0.2)


class Loop(Run):
    """A loop that knows nothing of graphs; ``graphs`` attaches a manager to its model.

    ``options`` are those of :class:`Run`; ``config`` those of ``CudaGraphConfig``.
    """

    def __init__(
        self,
        device: torch.device,
        graphs: bool,
        *,
        config: Mapping[str, Any] | None = None,
        regions: Mapping[str, str] | None = None,
        build: Callable[[], nn.Module] = Decoder,
        dtype: torch.dtype = torch.float32,
        ends_steps: bool = False,
        **options: Any,
    ) -> None:
        self.graphs, self.ends_steps = graphs, ends_steps
        self.config, self.regions = {"warmup_steps": 1, **(config or {})}, regions
        self.build, self.options = lambda: build().to(dtype), options
        self.closed_reports: list[CaptureReport] = []
        super().__init__(device, "none", build=self.build, **options)
        self.manager = self._attach()

    def _attach(self) -> Any:
        if not self.graphs:
            return None
        return graphstep.attach(self.model, CudaGraphConfig(impl="local", **self.config), regions=self.regions)

    def step(
        self, num_microbatches: int = 1, *, batches: Sequence[Any] = (), optimize: bool = True, **shape: int
    ) -> Tensor:
        losses = super().step(num_microbatches, batches=batches, optimize=optimize, **shape)
        if self.manager is not None and self.ends_steps:
            self.manager.end_step()
        return losses

    def resume(self) -> None:
        """Go on in another process: a new model and optimizer, with the state of the old ones loaded."""
        saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        generators, kept = (torch.get_rng_state(), self.data), (self.trace, self.kept)
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.close()
        super().__init__(self.device, "none", build=self.build, **self.options)
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.trace, self.kept = kept
        self.data = generators[1]
        self.manager = self._attach()
        torch.set_rng_state(generators[0])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.device)

    def close(self) -> None:
        if self.manager is not None:
            self.closed_reports.append(self.manager.report())
            self.manager.close()
            assert self.manager.report().pool_bytes == 0
            self.manager = None

    @property
    def report(self) -> CaptureReport:
        report: CaptureReport = self.manager.report() if self.manager is not None else self.closed_reports[-1]
        return report

    @property
    def num_recordings(self) -> int:
        return self.report.num_recordings

    @property
    def num_eager(self) -> int:
        return sum(self.reasons().values())


def twins(device: torch.device, script: Callable[[Loop], Any], **options: Any) -> Loop:
    """Run ``script`` eagerly and with a manager, and insist on the same bits. Returns the closed loop with the manager.

    ``options`` are those of :class:`Loop`, and ``schedule``, which makes a forward-backward function for each.
    """
    schedule = options.pop("schedule", None)
    loops = []
    for graphs in (False, True):
        loop = Loop(device, graphs, **options, **({"forward_backward": schedule()} if schedule else {}))
        script(loop)
        loops.append(loop)
    insist_on_the_same_bits(*loops)
    loops[1].close()
    return loops[1]


def schedule(*orders: str) -> Callable[[], Any]:
    """Each loop gets a schedule of its own, whose turns begin anew."""
    return lambda: in_order(*orders)


class RecomputedMlp(Layer):
    """A checkpoint inside of the layer."""

    def _mlp(self, x: Tensor, *context: Tensor) -> Tensor:
        result: Tensor = checkpoint(super()._mlp, x, *context, use_reentrant=False)
        return result


class RecomputedLayers(Decoder):
    """Every layer inside a checkpoint that does not re-enter autograd: an error where coverage is required."""

    def __init__(self, num_layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__(num_layers, dropout)
        around = [Recompute(layer) for layer in self.layers]
        self.layers = nn.ModuleList(around)


class Recompute(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, *context, use_reentrant=False)
        return result


class TiedWeights(Decoder):
    """Two layers share a weight; the head has the embedding's anyway."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.layers[1].mix.query.weight = self.layers[0].mix.query.weight
        self.layers[1].mix.out.weight = self.layers[0].mix.query.weight
        self.norm.weight = self.layers[0].mlp[0].weight


class Frozen(Decoder):
    """A part of one layer is frozen, and the whole of another one, which passes gradients on."""

    def __init__(self) -> None:
        super().__init__(3, 0.2)
        for parameter in (*self.layers[0].mix.parameters(), *self.layers[1].parameters()):
            parameter.requires_grad_(False)


class Failing(Layer):
    """Reads a value on the host in its second half."""

    reads = True

    def _mlp(self, x: Tensor, *context: Tensor) -> Tensor:
        y = super()._mlp(x, *context)
        if self.reads:
            y = y * (1 + 0 * y.sum().item())  # the line to name
        return y


class OneFails(Decoder):
    """Of three layers the middle one cannot be captured."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(3, dropout, layer=Failing)
        self.layers[0].reads = self.layers[2].reads = False
