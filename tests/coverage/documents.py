"""Reports, models and traces that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import graphstep
from graphstep.capture.report import CaptureReport, PoolUse, RegionStats
from graphstep.config import CudaGraphConfig
from graphstep.coverage import StepMeasurement, Timeline, coverage_document, measure_steps, read_timeline

HOSTILE = "</script><img src=x onerror=\"window.hit = 1\"> & 'quoted' <b>"


class Block(nn.Module):
    """Two linear layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """An input layer, blocks, and a head."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Loop:
    """A model with an optimizer; calling it trains a step."""

    def __init__(self, model: nn.Module | None = None, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.model = (model if model is not None else Model()).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 8, device=self.device)).square().mean().backward()
        self.optimizer.step()


def measured_document(patterns: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Of a model whose blocks are captured, with measured steps before and after."""
    loop = Loop()
    before = measure_steps(loop, loop.device, num_timed=3)
    with graphstep.attach(
        loop.model, CudaGraphConfig(impl="local"), regions=patterns or {"layers.*": "layer"}
    ) as manager:
        after = measure_steps(loop, loop.device, num_timed=3)
        return coverage_document(manager.report().to_json(), model=loop.model, before=before, after=after)


def hostile_document() -> dict[str, Any]:
    """Every text that comes from a user, or from a kernel, is an attack."""
    row = RegionStats(HOSTILE, HOSTILE, num_recordings=2, num_operations=3, num_replays=4)
    other = RegionStats(f"{HOSTILE}.1", "layer", why_not_captured=HOSTILE, last_mismatch=(HOSTILE,))
    other.eager_calls[HOSTILE] = 2
    report = CaptureReport("cuda", (row, other), 5 * 2**20, pools=(PoolUse(HOSTILE, 2**20),), workspace_bytes=2**20)
    timeline = read_timeline(gpu_events(HOSTILE), num_steps=1)
    measured = StepMeasurement(step_ms=2.0, host_ms=1.0, timeline=timeline)
    return coverage_document(report.to_json(), before=measured, after=measured, title=HOSTILE)


def gpu_events(name: str = "gemm") -> list[dict[str, Any]]:
    """A trace: two kernels launched by themselves, a graph of three, a copy; a driver call inside a runtime call."""
    host = {"ph": "X", "cat": "cuda_runtime", "pid": 1, "tid": 7}
    device = {"ph": "X", "pid": 0, "tid": 20}

    def kernel(start: float, correlation: int) -> dict[str, Any]:
        arguments = {"correlation": correlation, "stream": 7}
        return {**device, "cat": "kernel", "name": name, "ts": start, "dur": 10.0, "args": arguments}

    return [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {**host, "name": "cudaLaunchKernel", "ts": 100.0, "dur": 8.0, "args": {"correlation": 1}},
        {**host, "cat": "cuda_driver", "name": "cuLaunchKernel", "ts": 101.0, "dur": 5.0, "args": {"correlation": 1}},
        {**host, "name": "cudaLaunchKernel", "ts": 120.0, "dur": 8.0, "args": {"correlation": 2}},
        {**host, "name": "cudaGraphLaunch", "ts": 140.0, "dur": 12.0, "args": {"correlation": 3}},
        {**host, "name": "cudaMemcpyAsync", "ts": 160.0, "dur": 4.0, "args": {"correlation": 4}},
        {**host, "name": "cudaStreamSynchronize", "ts": 170.0, "dur": 40.0, "args": {"correlation": 5}},
        kernel(110.0, 1),
        kernel(130.0, 2),
        kernel(150.0, 3),
        kernel(160.0, 3),
        kernel(170.0, 3),
        {
            **device,
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoH",
            "ts": 185.0,
            "dur": 5.0,
            "args": {"correlation": 4, "stream": 7},
        },
        {**device, "cat": "gpu_user_annotation", "name": "mark", "ts": 100.0, "dur": 90.0, "args": {}},
    ]


def gpu_timeline(num_steps: int = 1) -> Timeline:
    """The timeline of these events."""
    return read_timeline(gpu_events(), num_steps=num_steps)
