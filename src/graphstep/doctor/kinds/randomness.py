"""Findings: random numbers that a replay would repeat, or that a capture refuses."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

RANDOMNESS: tuple[Kind, ...] = (
    Kind(
        code="GS-R001",
        title="a random number is drawn on the host",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="Numbers of Python's random and of NumPy become constants of the graph: every replay uses the one of the "
        "capture.",
        fix="draw on the device with torch (torch.rand(..., device=)), or draw outside and give it as a tensor",
        broken="""
def step(x):
    scale = random.random()  # here
    (layer(x) * scale).sum().backward()
""",
        mended="""
def step(x):
    scale = torch.rand((), device=x.device)
    (layer(x) * scale).sum().backward()
""",
    ),
    Kind(
        code="GS-R002",
        title="a generator of its own is drawn from",
        severity=Severity.warning,
        effect=Effect.capture_fails,
        why="A graph of CUDA advances only generators that were registered with it. graph_step and attach find them "
        "in the "
        "warmup runs; torch.cuda.graph does not.",
        fix="use the default generator, or register it: GraphSession.capture(..., generators=[...]), or "
        "CUDAGraph.register_generator_state",
        broken="""
generator = torch.Generator().manual_seed(3)


def step(x):
    noise = torch.randn(8, 4, generator=generator, device=x.device)  # here
    layer(x + noise).sum().backward()
""",
        mended="""
def step(x):
    layer(x + torch.randn_like(x)).sum().backward()
""",
    ),
    Kind(
        code="GS-R003",
        title="random numbers are seeded in the step",
        severity=Severity.error,
        effect=Effect.silently_wrong,
        why="CUDA refuses to seed in a capture; where it is done on the host, a replay does not do it again and "
        "draws other "
        "numbers than the eager step.",
        fix="seed once, before the first step",
        broken="""
def step(x):
    torch.manual_seed(7)  # here
    F.dropout(layer(x), 0.5).sum().backward()
""",
        mended="""
torch.manual_seed(7)


def step(x):
    F.dropout(layer(x), 0.5).sum().backward()
""",
    ),
    Kind(
        code="GS-R004",
        title="a recomputed forward draws random numbers",
        severity=Severity.warning,
        effect=Effect.silently_wrong,
        why="The recompute has to draw the mask of the forward again. Where forward and backward are two graphs, as "
        "with "
        "one pair of graphs a layer, the generator cannot be put back, and the gradient belongs to another mask.",
        fix="turn off recompute or dropout there, or capture the whole step (graph_step, full_iteration)",
        broken="""
from torch.utils.checkpoint import checkpoint

block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


def step(x):
    checkpoint(block, x, use_reentrant=False).sum().backward()  # here
""",
        mended="""
from torch.utils.checkpoint import checkpoint

block = nn.Sequential(nn.Linear(4, 4), nn.GELU())


def step(x):
    checkpoint(block, x, use_reentrant=False).sum().backward()
""",
    ),
)
