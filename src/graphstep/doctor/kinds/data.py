"""Findings: where batches come from, and what is in them."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

DATA: tuple[Kind, ...] = (
    Kind(
        code="GS-D001",
        title="an entry of the batch is no tensor and differs from batch to batch",
        severity=Severity.warning,
        effect=Effect.slow,
        why="What is no tensor is a constant of the graph. A replay with another value would be wrong, so graphs are "
        "keyed "
        "by it: each value is captured anew, or runs eagerly.",
        fix="give it as a tensor, or leave it out of the batch if the step does not compute with it",
        broken="""
batches = [{"x": torch.randn(8, 4), "scale": 1.0 + index} for index in range(4)]


def step(batch):  # here
    (layer(batch["x"]) * batch["scale"]).sum().backward()
""",
        mended="""
batches = [{"x": torch.randn(8, 4), "scale": torch.tensor(1.0 + index)} for index in range(4)]


def step(batch):
    (layer(batch["x"]) * batch["scale"]).sum().backward()
""",
    ),
    Kind(
        code="GS-D002",
        title="the last batch is shorter than the others",
        severity=Severity.warning,
        effect=Effect.slow,
        why="A graph serves one shape: the short batch is captured for itself, with memory of its own, or runs "
        "eagerly.",
        fix="DataLoader(..., drop_last=True), or pad the last batch",
        broken="""
from torch.utils.data import DataLoader, TensorDataset

batches = DataLoader(TensorDataset(torch.randn(30, 4)), batch_size=8, pin_memory=True)  # here


def step(x):
    layer(x).sum().backward()
""",
        mended="""
from torch.utils.data import DataLoader, TensorDataset

batches = DataLoader(TensorDataset(torch.randn(30, 4)), batch_size=8, pin_memory=True, drop_last=True)


def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-D003",
        title="batches lie in memory that is not pinned",
        severity=Severity.warning,
        effect=Effect.slow,
        why="The copy to the device cannot overlap with the step: the host waits for it, and with graphs that is "
        "most of "
        "what the host still does.",
        fix="DataLoader(..., pin_memory=True), and .to(device, non_blocking=True) before the step",
        broken="""
from torch.utils.data import DataLoader, TensorDataset

batches = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)  # here


def step(x):
    layer(x).sum().backward()
""",
        mended="""
from torch.utils.data import DataLoader, TensorDataset

batches = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, pin_memory=True)


def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-D004",
        title="the batch is taken inside the step",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="A replay runs no Python: it takes no batch, and computes with the one of the capture again and again.",
        fix="take the batch before the step and give it as an argument",
        broken="""
stream = iter([torch.randn(8, 4) for _ in range(20)])


def step():
    x = next(stream)  # here
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-D005",
        title="shapes differ from batch to batch",
        severity=Severity.warning,
        effect=Effect.memory,
        why="A graph serves one shape. With many lengths there are as many captures, each with memory and time of "
        "its own.",
        fix="pad to one length or to a few (buckets)",
        broken="""
batches = [torch.randn(length, 4) for length in (8, 6, 7, 5)]


def step(x):  # here
    layer(x).sum().backward()
""",
        mended="""
batches = [F.pad(torch.randn(length, 4), (0, 0, 0, 8 - length)) for length in (8, 6, 7, 5)]


def step(x):
    layer(x).sum().backward()
""",
    ),
)
