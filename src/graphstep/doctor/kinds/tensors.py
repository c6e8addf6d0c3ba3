"""Findings: a tensor comes from the host while the step runs."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

TENSORS: tuple[Kind, ...] = (
    Kind(
        code="GS-T001",
        title="a tensor is made from Python values",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="The values lie in ordinary memory of the host: the copy to the device waits, which CUDA refuses in a "
        "capture; "
        "where it is a single number it becomes a constant of the graph.",
        fix="use torch.full or a plain number, or make the tensor before the step (register_buffer)",
        broken="""
def step(x):
    y = layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)  # here
    y.sum().backward()
""",
        mended="""
scales = torch.tensor([1.0, 2.0, 3.0, 4.0])


def step(x):
    y = layer(x) * scales
    y.sum().backward()
""",
    ),
    Kind(
        code="GS-T002",
        title="a tensor is made on the CPU",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="Without device= it lies on the host, whatever the others do. Its work is not a part of the graph, and "
        "bringing "
        "it to the device waits, which CUDA refuses in a capture.",
        fix="give the device: device=x.device, or torch.zeros_like(x), x.new_zeros(...)",
        broken="""
def step(x):
    positions = torch.arange(x.shape[0])  # here
    (layer(x) * positions[:, None]).sum().backward()
""",
        mended="""
def step(x):
    positions = torch.arange(x.shape[0], device=x.device)
    (layer(x) * positions[:, None]).sum().backward()
""",
    ),
    Kind(
        code="GS-T003",
        title="the batch is moved to the device inside the step",
        severity=Severity.warning,
        effect=Effect.silently_wrong,
        why="A captured copy reads the memory of the host that the batch of the capture had, and from memory that is "
        "not "
        "pinned it cannot be captured at all.",
        fix="move the batch before the step, from pinned memory with non_blocking=True; graph_step and "
        "FullCudaGraphWrapper do so with their arguments",
        broken="""
device = "cuda" if torch.cuda.is_available() else "cpu"


def step(x):
    x = x.to(device)  # here
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-T004",
        title="a number is written at positions that a tensor tells",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="The number becomes a tensor of the host first, whose copy to the device waits: CUDA refuses that in a "
        "capture.",
        fix="use index_fill_ or scatter_, which take numbers, or write a tensor of the device",
        broken="""
rows = torch.tensor([0, 2])


def step(x):
    y = layer(x) * 1
    y[rows] = 0.5  # here
    y.sum().backward()
""",
        mended="""
rows = torch.tensor([0, 2])


def step(x):
    y = layer(x) * 1
    y.index_fill_(0, rows, 0.5)
    y.sum().backward()
""",
    ),
    Kind(
        code="GS-T005",
        title="the CPU is named as a device",
        severity=Severity.warning,
        effect=Effect.capture_fails,
        why="On a GPU this is a copy to the host or work on it: the host waits for the device, which CUDA refuses in a "
        "capture, and what it computes is not a part of the graph.",
        fix="stay on the device of the other tensors (device=x.device), or do it after the step",
        broken="""
def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return loss.detach().to("cpu")  # here
""",
        mended="""
def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return loss.detach()
""",
    ),
)
