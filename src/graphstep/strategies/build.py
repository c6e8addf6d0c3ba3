"""The strategy that a configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.static_inputs import to_device
from graphstep.config import CudaGraphConfig, CudaGraphImpl
from graphstep.strategies.full_iteration import FullCudaGraphWrapper
from graphstep.strategies.local import LocalGraphs
from graphstep.strategies.protocol import ForwardBackward, Strategy
from graphstep.strategies.transformer_engine import TransformerEngineGraphs


class EagerStrategy:
    """``none``: runs the wrapped function as it is, on batches moved to the device."""

    def __init__(self, forward_backward_func: ForwardBackward, *, model: nn.Module, device: torch.device) -> None:
        self._function = forward_backward_func
        self._model = model
        self._device = device

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Run the step eagerly; returns losses [num_microbatches]."""
        return self._function(
            data_iterator=(to_device(batch, self._device) for batch in data_iterator),
            model=self._model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
        )

    def end_step(self) -> None:
        """Nothing to do."""

    def report(self) -> CaptureReport:
        """An empty report."""
        return CaptureReport("none", (), 0)

    def close(self) -> None:
        """Nothing to free."""


def build_strategy(
    graphs: CudaGraphConfig,
    *,
    model: nn.Module,
    forward_backward_func: ForwardBackward,
    device: torch.device,
    optimizers: Sequence[Optimizer] = (),
) -> Strategy:
    """The strategy of ``graphs.impl`` for a model on a device.

    Args:
        graphs: what is captured, and how.
        model: what ``forward_backward_func`` is called with.
        forward_backward_func: forward and backward of a step.
        device: where it runs.
        optimizers: those that step in ``forward_backward_func``; only ``full_iteration`` captures such a function.

    Raises:
        ConfigError: nothing in the model to capture.
    """
    if graphs.impl is CudaGraphImpl.none:
        return EagerStrategy(forward_backward_func, model=model, device=device)
    if graphs.impl is CudaGraphImpl.full_iteration:
        return FullCudaGraphWrapper(
            forward_backward_func,
            model=model,
            session=GraphSession(device),
            cuda_graph_warmup_steps=graphs.warmup_steps,
            max_graphs=max(2, graphs.max_signatures),
            policy=graphs.policy,
            on_mismatch=graphs.on_mismatch,
            use_single_mempool=graphs.use_single_mempool,
            optimizers=optimizers,
        )
    if graphs.impl is CudaGraphImpl.local:
        return LocalGraphs(
            forward_backward_func,
            model=model,
            session=GraphSession(device),
            config=graphs,
        )
    if graphs.impl is CudaGraphImpl.transformer_engine:
        return TransformerEngineGraphs(
            forward_backward_func,
            model=model,
            session=GraphSession(device),
            config=graphs,
        )
    assert_never(graphs.impl)
