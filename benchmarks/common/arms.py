"""The arms: ways to run the same step. A new arm is one class and one entry in ``ARMS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from common.case import Case, FlatGradients, Gradients, StepBatches, zeroing_step
from common.clocks import seconds_of
from common.hugging_face import QwenTwin, why_no_twin
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.config import CudaGraphConfig, CudaGraphImpl
from graphstep.models import GPTModel
from graphstep.models.weight_gradients import fuse_weight_gradients
from graphstep.strategies import (
    ForwardBackward,
    FullCudaGraphWrapper,
    Strategy,
    build_strategy,
    make_graphed_callables,
)
from graphstep.training.update import Joined


class Arm(Protocol):
    """One way to run the step. NEW -> BUILT -> CLOSED: ``build`` once, ``step`` any number of times, ``close`` last."""

    name: ClassVar[str]
    """As on the command line and in results."""
    is_ours: ClassVar[bool]
    """Part of the project: its failure is a failure of the benchmark."""
    has_our_parameters: ClassVar[bool]
    """Its model has the parameters of the project's, in the same order and layout."""
    capture_seconds: float | None
    """After ``build``: time of capture or compilation alone; None where there is neither."""

    def why_not(self, case: Case) -> str | None:
        """Why the arm cannot run here, or None. Asked before ``build``; builds nothing."""

    def build(self, case: Case) -> None:
        """Copy the model and get ready: afterwards a step is a steady one, captured or compiled."""

    def step(self, batches: StepBatches) -> Tensor:
        """Zero grads, forward and backward; does not wait for the device. Returns losses [num_microbatches], fp32."""

    def gradients(self) -> Gradients:
        """Where the gradients of the last step are."""

    def details(self) -> dict[str, Any]:
        """What a reader should know of how it ran (regions, replays, graph breaks), as plain data."""

    def close(self) -> None:
        """Free everything, also after a failed ``build``. May be called twice."""


@dataclass(frozen=True)
class _Parts:
    """What every arm is made of."""

    model: nn.Module
    gradients: Gradients
    function: ForwardBackward


class EagerArm:
    """The step as it is, uncaptured.

    Args:
        step_of: makes the step of the gradients that it is to zero; all arms of a comparison are given the same.
    """

    name: ClassVar[str] = "eager"
    is_ours: ClassVar[bool] = True
    has_our_parameters: ClassVar[bool] = True

    def __init__(self, step_of: Callable[[Gradients], ForwardBackward] = zeroing_step) -> None:
        self.capture_seconds: float | None = None
        self._step_of = step_of
        self._made: _Parts | None = None

    def why_not(self, case: Case) -> str | None:
        """Runs everywhere."""
        del case
        return None

    def build(self, case: Case) -> None:
        """Copy the model; run a step, so that libraries set themselves up."""
        self._make(case)
        self.step(case.batches(0))

    def step(self, batches: StepBatches) -> Tensor:
        """Run the function."""
        return self._run(batches, self._parts.model)

    def gradients(self) -> Gradients:
        """Those of the copy of the model."""
        return self._parts.gradients

    def details(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Let go of the copy of the model."""
        if self._made is not None:
            self._made.gradients.close()
            self._made = None

    @property
    def _parts(self) -> _Parts:
        if self._made is None:
            raise RuntimeError(f"arm {self.name} is not built, or closed")
        return self._made

    def _make(self, case: Case) -> _Parts:
        model = case.new_model()
        gradients = case.new_gradients(model)
        self._made = _Parts(model, gradients, self._step_of(gradients))
        return self._made

    def _run(self, batches: StepBatches, model: nn.Module) -> Tensor:
        return self._parts.function(data_iterator=iter(batches), model=model, num_microbatches=len(batches))


class StrategyArm(EagerArm):
    """A strategy of the project around the function; on the CPU with the tape engine."""

    graphs: ClassVar[CudaGraphConfig]

    def __init__(self, step_of: Callable[[Gradients], ForwardBackward] = zeroing_step) -> None:
        super().__init__(step_of)
        self._strategy: Strategy | None = None
        self._first_seconds: list[float] = []

    def build(self, case: Case) -> None:
        """Run the strategy's warmup steps, and the one or two in which it captures."""
        parts = self._make(case)
        self._strategy = self._strategy_for(parts, case.device)
        self._first_seconds = [
            seconds_of(partial(self.step, case.batches(index)), case.device)
            for index in range(self.graphs.warmup_steps + 2)
        ]
        self.capture_seconds = self._strategy.report().capture_seconds

    def _strategy_for(self, parts: _Parts, device: torch.device) -> Strategy:
        return build_strategy(self.graphs, model=parts.model, forward_backward_func=parts.function, device=device)

    def step(self, batches: StepBatches) -> Tensor:
        """Run the step through the strategy."""
        if self._strategy is None:
            raise RuntimeError(f"arm {self.name} is not built, or closed")
        losses = self._strategy.forward_backward(data_iterator=iter(batches), num_microbatches=len(batches))
        self._strategy.end_step()
        return losses

    def details(self) -> dict[str, Any]:
        """The strategy's report, summed over its regions, and how long the steps took in which it got ready."""
        if self._strategy is None:
            return {}
        return {**summed(self._strategy.report()), "first_step_seconds": self._first_seconds}

    def close(self) -> None:
        """Free the graphs, then the model."""
        if self._strategy is not None:
            self._strategy.close()
            self._strategy = None
        super().close()


def summed(report: CaptureReport) -> dict[str, Any]:
    """A strategy's report as plain data, summed over its regions."""
    eager_calls: dict[str, int] = {}
    for row in report.rows:
        for reason, count in row.eager_calls.items():
            eager_calls[reason] = eager_calls.get(reason, 0) + count
    return {
        "engine": report.engine,
        "num_regions": len(report.rows),
        "num_recordings": report.num_recordings,
        "num_operations": sum(row.num_operations for row in report.rows),
        "num_replays": sum(row.num_replays for row in report.rows),
        "eager_calls": eager_calls,
        "pool_bytes": report.pool_bytes,
        "static_bytes": sum(row.static_bytes for row in report.rows),
    }


class FullIterationArm(StrategyArm):
    """``full_iteration``: the whole function, zeroing included, is one graph."""

    name: ClassVar[str] = "full_iteration"
    graphs: ClassVar[CudaGraphConfig] = CudaGraphConfig(impl=CudaGraphImpl.full_iteration)


class FullIterationParallelArm(FullIterationArm):
    """The same, with a branch in the graph where gradients are computed and added."""

    name: ClassVar[str] = "full_iteration_parallel"

    def _strategy_for(self, parts: _Parts, device: torch.device) -> Strategy:
        return FullCudaGraphWrapper(
            parts.function, model=parts.model, session=GraphSession(device), parallel_gradients=True
        )


class FullIterationFusedArm(FullIterationArm):
    """The same, with weight gradients of linear layers added by the products themselves."""

    name: ClassVar[str] = "full_iteration_fused"
    is_parallel: ClassVar[bool] = False

    def _make(self, case: Case) -> _Parts:
        parts = super()._make(case)
        gradients = fuse_weight_gradients(parts.model, is_parallel=self.is_parallel)
        self._made = replace(parts, function=Joined(parts.function, gradients))
        return self._made


class FullIterationFusedParallelArm(FullIterationFusedArm):
    """The same, with these products on a branch of the graph."""

    name: ClassVar[str] = "full_iteration_fused_parallel"
    is_parallel: ClassVar[bool] = True


class FullIterationCompileArm(FullIterationArm):
    """``full_iteration`` of a model under ``torch.compile``: compiled kernels in one graph."""

    name: ClassVar[str] = "full_iteration_compile"

    def why_not(self, case: Case) -> str | None:
        """Needs CUDA graphs: a tape records what is compiled as it was written."""
        return None if case.device.type == "cuda" else "needs a CUDA device"

    def close(self) -> None:
        """Drop all that is compiled in this process, too."""
        super().close()
        torch.compiler.reset()

    def _make(self, case: Case) -> _Parts:
        parts = super()._make(case)
        parts.model.compile()
        return parts


class LocalArm(StrategyArm):
    """``local``: a pair of graphs for each whole layer; embedding, head, loss and zeroing are eager."""

    name: ClassVar[str] = "local"
    graphs: ClassVar[CudaGraphConfig] = CudaGraphConfig(impl=CudaGraphImpl.local)


class LocalMergedArm(StrategyArm):
    """``local`` with neighbouring layers launched as one graph, as many as can be."""

    name: ClassVar[str] = "local_merged"
    graphs: ClassVar[CudaGraphConfig] = CudaGraphConfig(impl=CudaGraphImpl.local, merge_layers=0)


class LocalPartialArm(StrategyArm):
    """``local`` of attention, router and preprocessing: the experts between them are eager."""

    name: ClassVar[str] = "local_partial"
    graphs: ClassVar[CudaGraphConfig] = CudaGraphConfig(
        impl=CudaGraphImpl.local, modules=("attn", "moe_router", "moe_preprocess")
    )

    def why_not(self, case: Case) -> str | None:
        """Needs experts."""
        return None if case.config.moe.num_experts else "the model has no experts"


class TransformerEngineArm(StrategyArm):
    """``transformer_engine``: layers captured for the order of the schedule, here one microbatch after another."""

    name: ClassVar[str] = "transformer_engine"
    graphs: ClassVar[CudaGraphConfig] = CudaGraphConfig(impl=CudaGraphImpl.transformer_engine, warmup_steps=1)


class GraphedCallablesArm(EagerArm):
    """``graphstep.make_graphed_callables`` on the layers, gradients accumulated in the graphs; the rest is eager."""

    name: ClassVar[str] = "graphed_callables"

    def __init__(self, step_of: Callable[[Gradients], ForwardBackward] = zeroing_step) -> None:
        super().__init__(step_of)
        self._graphs: Any = None

    def details(self) -> dict[str, Any]:
        """The report, summed over the layers."""
        return summed(self._graphs.report()) if self._graphs is not None else {}

    def build(self, case: Case) -> None:
        """Capture all layers in one call."""
        model = self._make(case).model
        samples = layer_samples(case, model)
        self.capture_seconds = seconds_of(
            lambda: make_graphed_callables(tuple(model.layers), samples, accumulate_param_grads=True), case.device
        )
        self._graphs = model.layers[0].forward
        self.step(case.batches(0))

    def close(self) -> None:
        """Free the graphs, then the model."""
        if self._graphs is not None:
            self._graphs.reset()
            self._graphs = None
        super().close()


def layer_samples(case: Case, model: GPTModel) -> tuple[tuple[Tensor, ...], ...]:
    """Arguments of each layer."""
    tokens_BS = case.batches(0)[0]["tokens"]
    with torch.no_grad():
        hidden_BSH = model.embedding(tokens_BS)
        context = () if model.rotary is None else model.rotary(tokens_BS.shape[1], hidden_BSH.dtype)
    return tuple((torch.randn_like(hidden_BSH).requires_grad_(), *context) for _ in model.layers)


class MakeGraphedCallablesArm(EagerArm):
    """``torch.cuda.make_graphed_callables`` on the layers; everything else, accumulation included, is eager."""

    name: ClassVar[str] = "make_graphed_callables"
    is_ours: ClassVar[bool] = False

    def why_not(self, case: Case) -> str | None:
        """Needs CUDA graphs."""
        return None if case.device.type == "cuda" else "needs a CUDA device"

    def build(self, case: Case) -> None:
        """Capture all layers in one call."""
        model = self._make(case).model
        samples = layer_samples(case, model)
        self.capture_seconds = seconds_of(
            lambda: torch.cuda.make_graphed_callables(tuple(model.layers), samples), case.device
        )
        self.step(case.batches(0))


class HuggingFaceArm(EagerArm):
    """The same model in the code of transformers, eager; experts by its ``grouped_mm`` path."""

    name: ClassVar[str] = "hugging_face"
    is_ours: ClassVar[bool] = False
    has_our_parameters: ClassVar[bool] = False

    def why_not(self, case: Case) -> str | None:
        """Needs transformers, and a model that it has."""
        return why_no_twin(case)

    def _make(self, case: Case) -> _Parts:
        model = QwenTwin(case)
        gradients = FlatGradients(model)
        self._made = _Parts(model, gradients, self._step_of(gradients))
        return self._made


class CompileArm(EagerArm):
    """``torch.compile`` of the model, default mode; zeroing and accumulation are eager."""

    name: ClassVar[str] = "compile"
    is_ours: ClassVar[bool] = False
    mode: ClassVar[str] = "default"
    copies_loss: ClassVar[bool] = False
    """Copy the loss of a microbatch out of memory that the next one overwrites."""
    num_first_steps: ClassVar[int] = 2
    """Steps until nothing is compiled or recorded any more."""

    def __init__(self, step_of: Callable[[Gradients], ForwardBackward] = zeroing_step) -> None:
        super().__init__(step_of)
        self._compiled: nn.Module | None = None
        self._counts: dict[str, int] = {}

    def build(self, case: Case) -> None:
        """Compile, and run the steps in which compilation happens."""
        from torch._dynamo.utils import counters

        counters.clear()
        model = self._make(case).model
        compiled: Any = torch.compile(model, mode=self.mode)  # a module, of a module
        self._compiled = _CopiedLoss(compiled) if self.copies_loss and case.num_microbatches > 1 else compiled
        self.capture_seconds = seconds_of(
            lambda: [self.step(case.batches(index)) for index in range(self.num_first_steps)], case.device
        )
        self._counts = {
            "graph_breaks": sum(counters["graph_break"].values()),
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        }

    def step(self, batches: StepBatches) -> Tensor:
        """Run the function on the compiled model."""
        if self._compiled is None:
            raise RuntimeError(f"arm {self.name} is not built, or closed")
        return self._run(batches, self._compiled)

    def details(self) -> dict[str, Any]:
        """What hinders compilation."""
        return {"mode": self.mode, **self._counts}

    def close(self) -> None:
        """Drop all that is compiled in this process, then the model."""
        if self._compiled is not None:
            self._compiled = None
            torch.compiler.reset()
        super().close()


class CompileReduceOverheadArm(CompileArm):
    """``torch.compile(mode="reduce-overhead")``: compiled, and replayed by Inductor's own CUDA graphs."""

    name: ClassVar[str] = "compile_reduce_overhead"
    mode: ClassVar[str] = "reduce-overhead"
    copies_loss: ClassVar[bool] = True
    num_first_steps: ClassVar[int] = 5

    def why_not(self, case: Case) -> str | None:
        """Needs CUDA graphs."""
        return None if case.device.type == "cuda" else "needs a CUDA device"

    def step(self, batches: StepBatches) -> Tensor:
        """Tell Inductor that the last step's outputs are done with, then run."""
        torch.compiler.cudagraph_mark_step_begin()
        return super().step(batches)


class _CopiedLoss(nn.Module):
    """A model whose loss is a copy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens_BS, labels_BS)
        return loss.clone()


ARMS: MappingProxyType[str, Callable[[], Arm]] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            EagerArm,
            FullIterationArm,
            FullIterationParallelArm,
            FullIterationFusedArm,
            FullIterationFusedParallelArm,
            FullIterationCompileArm,
            LocalArm,
            LocalMergedArm,
            LocalPartialArm,
            TransformerEngineArm,
            GraphedCallablesArm,
            MakeGraphedCallablesArm,
            HuggingFaceArm,
            CompileArm,
            CompileReduceOverheadArm,
        )
    }
)
"""Every arm by name, in the order in which they run."""
