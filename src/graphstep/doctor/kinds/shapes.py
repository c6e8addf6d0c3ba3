"""Findings: a shape depends on values, or changes where a graph has it fixed."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

_WHY = (
    "The size of the result is known only when the values are: the host has to read it, which CUDA refuses in a "
    "capture, and "
)

SHAPES: tuple[Kind, ...] = (
    Kind(
        code="GS-S001",
        title="positions of what is not zero",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "the shapes of a graph are fixed.",
        fix="use torch.where(mask, a, b), a multiplication by the mask, or topk with a fixed k",
        broken="""
def step(x):
    y = layer(x)
    y[y[:, 0].detach().gt(0).nonzero().squeeze(1)].sum().backward()  # here
""",
        mended="""
def step(x):
    y = layer(x)
    (y * y[:, :1].detach().gt(0)).sum().backward()
""",
    ),
    Kind(
        code="GS-S002",
        title="entries are chosen by a mask",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "the shapes of a graph are fixed.",
        fix="use torch.where, masked_fill or a multiplication by the mask; divide by mask.sum() for a mean",
        broken="""
def step(x):
    y = layer(x)
    mask = x[:, 0] > 0
    y[mask].mean().backward()  # here
""",
        mended="""
def step(x):
    y = layer(x)
    mask = (x[:, :1] > 0).to(y.dtype)
    ((y * mask).sum() / (mask.sum() * 4).clamp(min=1)).backward()
""",
    ),
    Kind(
        code="GS-S003",
        title="different values are listed",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY + "the shapes of a graph are fixed.",
        fix="count with scatter_add_ or one_hot into a tensor as long as there can be values",
        broken="""
def step(x):
    labels = x.argmax(-1)
    values = torch.unique(labels)  # here
    layer(x).sum().backward()
    return values
""",
        mended="""
def step(x):
    labels = x.argmax(-1)
    counts = F.one_hot(labels, 4).sum(0)
    layer(x).sum().backward()
    return counts
""",
    ),
    Kind(
        code="GS-S004",
        title="an operation whose result has a size that depends on values",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why=_WHY
        + "the shapes of a graph are fixed. Some do so with a minimum length, or without a given output size, too.",
        fix="give the size (output_size= of repeat_interleave), or write into a tensor of fixed size (scatter_add_)",
        broken="""
repeats = torch.tensor([1, 2, 1, 2, 1, 2, 1, 2])


def step(x):
    y = layer(x).repeat_interleave(repeats, 0)  # here
    y.sum().backward()
""",
        mended="""
repeats = torch.tensor([1, 2, 1, 2, 1, 2, 1, 2])


def step(x):
    y = layer(x).repeat_interleave(repeats, 0, output_size=12)
    y.sum().backward()
""",
    ),
    Kind(
        code="GS-S005",
        title="values are written where a mask is set",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="As many values are written as the mask has set: the host has to count them, which CUDA refuses in a "
        "capture.",
        fix="use torch.where, masked_fill_ or masked_scatter_",
        broken="""
ROWS = torch.tensor([True, False] * 4)


def step(x):
    y = layer(x) * 1
    y[ROWS] = 2 * x[:4]  # here
    y.sum().backward()
""",
        mended="""
ROWS = torch.tensor([True, False] * 4)


def step(x):
    y = torch.where(ROWS[:, None], 2 * x, layer(x))
    y.sum().backward()
""",
    ),
    Kind(
        code="GS-S006",
        title="the memory of a tensor is resized or replaced",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="A graph works on memory at fixed addresses: memory that grows moves, and the graph would go on with the "
        "old.",
        fix="allocate the tensor at its final size before the step and write into it",
        broken="""
scratch = torch.empty(0)


def step(x):
    y = layer(x)
    scratch.resize_(16)  # here
    y.sum().backward()
""",
        mended="""
def step(x):
    y = layer(x)
    scratch = torch.empty(16, device=x.device)
    y.sum().backward()
""",
    ),
    Kind(
        code="GS-S007",
        title="the shape of a tensor from outside is changed in place",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="Shape and strides are Python's, not the device's: a replay does not change them again.",
        fix="use the form that returns a view, such as t() for t_()",
        broken="""
table = torch.randn(4, 4)


def step(x):
    y = layer(x) @ table.t_()  # here
    y.sum().backward()
""",
        mended="""
table = torch.randn(4, 4)


def step(x):
    y = layer(x) @ table.t()
    y.sum().backward()
""",
    ),
)
