"""What launches cost on this machine: measured with the package's own graphs of next to no work.

A small model of one-element operations is trained eagerly and captured. Differences between a few and many regions, and
between short and long ones, give the cost of one call and of one operation. Nothing is taken from tables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphstep.capture.session import GraphSession
from graphstep.config import CudaGraphConfig, CudaGraphImpl
from graphstep.strategies import CudaGraphManager, FullCudaGraphWrapper

_FEW, _MANY = 2, 8
_SHORT, _LONG = 4, 36
_NODES: Final = (32, 512)
_NUM_ROUNDS: Final = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Times of this machine, in microseconds."""

    eager_operation_us: float
    """Host time of an eager operation that computes next to nothing, with its share of the backward."""
    graph_operation_us: float
    """The same of an operation in a graph: on the CPU a step of a tape, on a GPU a node, its kernel included."""
    small_kernel_us: float
    """Of that, what the kernel itself takes on the device; on the CPU 0."""
    region_call_us: float
    """One call of a captured region, forward and backward together, without its operations."""
    iteration_call_us: float
    """One call of a captured iteration, without its operations."""

    @property
    def graph_gap_us(self) -> float:
        """What a node of a graph takes beyond its kernel."""
        return max(0.0, self.graph_operation_us - self.small_kernel_us)

    def to_json(self) -> dict[str, float]:
        """The same as plain data."""
        return asdict(self)


class _Chain(nn.Module):
    """Some multiplications by one number, each with a backward of its own."""

    def __init__(self, num_operations: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.num_operations = num_operations

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_operations):
            x = x * 1.0
        return x * self.weight


class _Chains(nn.Module):
    def __init__(self, num_regions: int, num_operations: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Chain(num_operations) for _ in range(num_regions))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def calibrate(device: torch.device | str) -> Costs:
    """Measure what launches cost here; takes about a second.

    Args:
        device: where steps run. Its generators and the model of the caller are left alone.
    """
    device = torch.device(device)
    eager = {length: _eager_us(device, _MANY, length) for length in (_SHORT, _LONG)}
    captured = {regions: _captured_us(device, regions, _SHORT) for regions in (_FEW, _MANY)}
    iteration = _iteration_us(device, _SHORT)
    # Each multiplication has one operation in the forward and one in the backward.
    eager_operation = (eager[_LONG] - eager[_SHORT]) / (_MANY * 2 * (_LONG - _SHORT))
    graph_operation = _graph_operation_us(device)
    per_region = (captured[_MANY] - captured[_FEW]) / (_MANY - _FEW)
    # A chain also has the product with the weight: one operation forward, two backward and the sum of the gradient.
    own_us = (2 * _SHORT + 4) * graph_operation
    # On a GPU the host calls the next region while such short graphs run; on the CPU it runs them itself.
    region_call = per_region if device.type == "cuda" else per_region - own_us
    return Costs(
        eager_operation_us=max(0.0, eager_operation),
        graph_operation_us=graph_operation,
        small_kernel_us=_small_kernel_us(device),
        region_call_us=max(0.0, region_call),
        iteration_call_us=max(0.0, iteration - own_us),
    )


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _eager_us(device: torch.device, num_regions: int, num_operations: int) -> float:
    with _generators_kept(device):
        model = _Chains(num_regions, num_operations).to(device)
        return _least_us(_pass_of(model, device), device)


def _captured_us(device: torch.device, num_regions: int, num_operations: int) -> float:
    with _generators_kept(device):
        model = _Chains(num_regions, num_operations).to(device)
        run = _pass_of(model, device)
        config = CudaGraphConfig(impl=CudaGraphImpl.local, warmup_steps=1)
        with CudaGraphManager(model, config, regions={"layers.*": "layer"}, is_automatic=False) as manager:
            run()
            manager.end_step()
            return _least_us(run, device)


def _iteration_us(device: torch.device, num_operations: int) -> float:
    with _generators_kept(device), GraphSession(device) as session:
        model = _Chains(1, num_operations).to(device)
        x = torch.ones(1, device=device)

        def forward_backward(
            *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
        ) -> Tensor:
            del num_microbatches, forward_only
            loss: Tensor = model(next(data_iterator))
            loss.backward()
            return loss.detach().reshape(1)

        wrapper = FullCudaGraphWrapper(forward_backward, model=model, session=session, cuda_graph_warmup_steps=1)

        def run() -> None:
            wrapper(data_iterator=iter([x]), num_microbatches=1)

        for _ in range(3):
            run()
        return _least_us(run, device)


def _graph_operation_us(device: torch.device) -> float:
    """Of a recording by itself: the longer of two takes so much more for each operation that it has more."""
    times = []
    with _generators_kept(device), GraphSession(device) as session:
        x = torch.ones(1, device=device)
        for num_operations in _NODES:

            def run(num_operations: int = num_operations) -> None:
                for _ in range(num_operations):
                    x.mul_(1.0)

            recording = session.engine.capture(run)
            times.append(_least_us(recording.replay, device))
    return max(0.0, (times[1] - times[0]) / (_NODES[1] - _NODES[0]))


def _pass_of(model: nn.Module, device: torch.device) -> Callable[[], None]:
    x = torch.ones(1, device=device, requires_grad=True)

    def run() -> None:
        model(x).backward()

    return run


def _least_us(run: Callable[[], None], device: torch.device) -> float:
    """The least disturbed of some runs, the device idle before each, until it has finished."""
    for _ in range(3):
        run()
    times = []
    for _ in range(_NUM_ROUNDS):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        times.append((time.perf_counter() - started) * 1e6)
    return min(times)


def _small_kernel_us(device: torch.device) -> float:
    """What a kernel on one element takes on the device, as the profiler sees it."""
    if device.type != "cuda":
        return 0.0
    from graphstep.coverage import StepProfiler

    x = torch.ones(1, device=device)
    with StepProfiler(device) as profiler:
        profiler.start()
        for _ in range(20):
            x.mul(1.0)
        timeline = profiler.stop(num_steps=1)
    lengths = [span.duration_us for span in timeline.spans(is_device=True) if span.category == "kernel"]
    return statistics.median(lengths) if lengths else 0.0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
