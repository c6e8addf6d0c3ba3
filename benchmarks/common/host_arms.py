"""Ways to run the layers of a model alone, with the host timed: what ``local_host_time.py`` compares.

Shapes: B batch, S sequence, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from common.arms import summed
from common.case import Case, Gradients
from common.clocks import seconds_of, synchronize
from graphstep.config import CudaGraphConfig, CudaGraphImpl
from graphstep.models import GPTModel
from graphstep.strategies import Strategy, build_strategy


class Layers(nn.Module):
    """The layers of a model, one after another."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.layers = model.layers

    def forward(self, hidden_BSH: Tensor, *context: Tensor) -> Tensor:
        """Run them."""
        for layer in self.layers:
            hidden_BSH = layer(hidden_BSH, *context)
        return hidden_BSH


@dataclass(kw_only=True, eq=False)
class Work:
    """What every arm runs, and the clock. Called as the step of a strategy: its batch is the layers' input."""

    device: torch.device
    layers: Layers
    gradients: Gradients
    context: tuple[Tensor, ...]
    """What every layer is given beside its input."""
    hidden: Tensor
    """Input of the first layer, a leaf [B, S, H]."""
    gradient: Tensor
    """Gradient of the last layer's output [B, S, H]."""
    forward_us: list[float] = field(default_factory=list)
    """Host time of all layers' forward, one value a step."""
    backward_us: list[float] = field(default_factory=list)

    @classmethod
    def make(cls, case: Case) -> Work:
        """Copy the layers; draw an input."""
        model = case.new_model()
        tokens_BS = case.batches(0)[0]["tokens"]
        with torch.no_grad():
            hidden_BSH: Tensor = model.embedding(tokens_BS)
            context = () if model.rotary is None else model.rotary(tokens_BS.shape[1], hidden_BSH.dtype)
        layers = Layers(model)
        return cls(
            device=case.device,
            layers=layers,
            gradients=case.new_gradients(layers),
            context=tuple(context),
            hidden=hidden_BSH.detach().requires_grad_(),
            gradient=torch.ones_like(hidden_BSH),
        )

    def run(self) -> None:
        """Run a step without a strategy."""
        self(data_iterator=iter([self.batch()]), model=self.layers, num_microbatches=1)

    def batch(self) -> Mapping[str, Tensor]:
        """The batch of every step."""
        return {"hidden": self.hidden}

    def __call__(
        self, *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Time one step."""
        del num_microbatches, forward_only
        hidden_BSH: Tensor = next(data_iterator)["hidden"]
        self.gradients.zero()
        hidden_BSH.grad = None
        outputs: list[Tensor] = []
        self.time(
            lambda: outputs.append(model(hidden_BSH, *self.context)),
            lambda: torch.autograd.backward(outputs, [self.gradient]),
        )
        return outputs[0].detach().float().mean().reshape(1)

    def time(self, forward: Callable[[], object], backward: Callable[[], object]) -> None:
        """Time both halves, the device idle before and after each."""
        for half, values in ((forward, self.forward_us), (backward, self.backward_us)):
            synchronize(self.device)
            started = time.perf_counter_ns()
            half()
            values.append((time.perf_counter_ns() - started) / 1e3)
        synchronize(self.device)

    def forget_times(self) -> None:
        """Start anew, after warmup."""
        self.forward_us.clear()
        self.backward_us.clear()


class HostArm(Protocol):
    """One way to run the layers: ``build`` once, ``step`` any number of times, ``close`` last."""

    name: ClassVar[str]
    is_ours: ClassVar[bool]

    def why_not(self, device: torch.device) -> str | None:
        """Why the arm cannot run here, or None."""

    def build(self, case: Case) -> Work:
        """Get ready: afterwards a step is a steady one, and its times are added to the work that is returned."""

    def step(self) -> None:
        """Run and time a step."""

    def details(self) -> dict[str, Any]:
        """What was captured, and how often it was replayed, as plain data."""

    def close(self) -> None:
        """Free everything, also after a failed ``build``."""


class EagerLayers:
    """The layers as they are."""

    name: ClassVar[str] = "eager"
    is_ours: ClassVar[bool] = True

    def __init__(self) -> None:
        self._work: Work | None = None

    def why_not(self, device: torch.device) -> str | None:
        """Runs everywhere."""
        del device
        return None

    def build(self, case: Case) -> Work:
        """Copy the layers."""
        self._work = Work.make(case)
        return self._work

    def step(self) -> None:
        """Run them."""
        self.work.run()

    def details(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Let go of the layers."""
        if self._work is not None:
            self._work.gradients.close()
            self._work = None

    @property
    def work(self) -> Work:
        """What is run."""
        if self._work is None:
            raise RuntimeError(f"arm {self.name} is not built, or closed")
        return self._work


class LocalLayers(EagerLayers):
    """``local``: each layer owns a pair of graphs; on the CPU, of the tape engine."""

    name: ClassVar[str] = "local"
    graphs: ClassVar[CudaGraphConfig] = CudaGraphConfig(impl=CudaGraphImpl.local)

    def __init__(self) -> None:
        super().__init__()
        self._strategy: Strategy | None = None

    def build(self, case: Case) -> Work:
        """Run the step that is observed, and the next, in which everything is captured at the latest."""
        work = super().build(case)
        self._strategy = build_strategy(self.graphs, model=work.layers, forward_backward_func=work, device=case.device)
        for _ in range(2):
            self.step()
        return work

    def step(self) -> None:
        """Run the layers through the strategy."""
        if self._strategy is None:
            raise RuntimeError(f"arm {self.name} is not built, or closed")
        self._strategy.forward_backward(data_iterator=iter([self.work.batch()]), num_microbatches=1)
        self._strategy.end_step()

    def details(self) -> dict[str, Any]:
        """The strategy's report."""
        if self._strategy is None:
            return {}
        report = self._strategy.report()
        return {**summed(report), "capture_seconds": report.capture_seconds}

    def close(self) -> None:
        """Free the graphs, then the layers."""
        if self._strategy is not None:
            self._strategy.close()
            self._strategy = None
        super().close()


class LocalMergedLayers(LocalLayers):
    """``local`` with as many neighbouring layers as can be launched as one graph."""

    name: ClassVar[str] = "local_merged"
    graphs: ClassVar[CudaGraphConfig] = CudaGraphConfig(impl=CudaGraphImpl.local, merge_layers=0)


class MakeGraphedCallables(EagerLayers):
    """``torch.cuda.make_graphed_callables`` on the same layers."""

    name: ClassVar[str] = "make_graphed_callables"
    is_ours: ClassVar[bool] = False

    def why_not(self, device: torch.device) -> str | None:
        """Needs CUDA graphs."""
        return None if device.type == "cuda" else "needs a CUDA device"

    def build(self, case: Case) -> Work:
        """Capture all layers in one call."""
        work = super().build(case)
        layers = tuple(work.layers.layers)
        samples = tuple((torch.randn_like(work.hidden).requires_grad_(), *work.context) for _ in layers)
        self._capture_seconds = seconds_of(lambda: torch.cuda.make_graphed_callables(layers, samples), case.device)
        return work

    def details(self) -> dict[str, Any]:
        """How long the capture took."""
        return {"capture_seconds": self._capture_seconds}


class BareReplay(MakeGraphedCallables):
    """The same graphs, launched by two loops over ``torch.cuda.CUDAGraph.replay()``: the least that a launch costs."""

    name: ClassVar[str] = "bare_replay"

    def __init__(self) -> None:
        super().__init__()
        self._forwards: list[torch.cuda.CUDAGraph] = []
        self._backwards: list[torch.cuda.CUDAGraph] = []
        self._kept: list[Any] = []
        """Tensors that the graphs read and write."""

    def build(self, case: Case) -> Work:
        """Capture the forward and the backward of each layer; no graph's input is another one's output."""
        work = EagerLayers.build(self, case)
        self._capture_seconds = seconds_of(lambda: self._capture(work), case.device)
        return work

    def step(self) -> None:
        """Replay all forwards, then all backwards in the opposite order."""
        self.work.time(self._replay_forwards, self._replay_backwards)

    def close(self) -> None:
        """Free the graphs, then the tensors and the layers."""
        self._forwards.clear()
        self._backwards.clear()
        self._kept.clear()
        super().close()

    def _replay_forwards(self) -> None:
        for graph in self._forwards:
            graph.replay()

    def _replay_backwards(self) -> None:
        for graph in self._backwards:
            graph.replay()

    def _capture(self, work: Work) -> None:
        stream, pool = torch.cuda.Stream(work.device), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(work.device))
        for layer in work.layers.layers:
            hidden_BSH = work.hidden.detach().clone().requires_grad_()
            gradient_BSH = torch.ones_like(hidden_BSH)
            wanted = (hidden_BSH, *layer.parameters())
            synchronize(work.device)
            with torch.cuda.stream(stream):
                for _ in range(3):
                    torch.autograd.grad([layer(hidden_BSH, *work.context)], wanted, [gradient_BSH])
            forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward, pool=pool, stream=stream):
                output_BSH = layer(hidden_BSH, *work.context)
            with torch.cuda.graph(backward, pool=pool, stream=stream):
                found = torch.autograd.grad([output_BSH], wanted, [gradient_BSH])
            self._forwards.append(forward)
            self._backwards.insert(0, backward)
            self._kept += [hidden_BSH, gradient_BSH, output_BSH.detach(), found]


HOST_ARMS: MappingProxyType[str, Callable[[], HostArm]] = MappingProxyType(
    {arm.name: arm for arm in (EagerLayers, LocalLayers, LocalMergedLayers, MakeGraphedCallables, BareReplay)}
)
"""Every arm by name, in the order in which they run."""
