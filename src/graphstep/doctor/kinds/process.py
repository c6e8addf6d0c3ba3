"""Findings: environment, streams, the allocator, and wrappers of modules."""

from __future__ import annotations

from graphstep.doctor.findings import Effect, Kind, Severity

PROCESS: tuple[Kind, ...] = (
    Kind(
        code="GS-E001",
        title="expandable segments, with buffers that NCCL registers",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="NCCL registers buffers of graphs at addresses that expandable segments of the allocator may unmap: a "
        "hang or "
        "an illegal access, on some GPUs only.",
        fix="set NCCL_GRAPH_REGISTER=0, or leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
        broken="""
import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # here


def step(x):
    layer(x).sum().backward()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(layer.weight.grad)
""",
        mended="""
import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
os.environ["NCCL_GRAPH_REGISTER"] = "0"


def step(x):
    layer(x).sum().backward()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(layer.weight.grad)
""",
    ),
    Kind(
        code="GS-E002",
        title="the host waits for every kernel or collective",
        severity=Severity.warning,
        effect=Effect.slow,
        why="Such a setting is for debugging: the host waits at every launch, and a wait inside of a capture fails.",
        fix="unset the variable",
        broken="""
import os

os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # here


def step(x):
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-E003",
        title="memory is not cached",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="Without torch's cache every allocation is one of the driver, which CUDA refuses in a capture.",
        fix="unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        broken="""
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # here


def step(x):
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-C001",
        title="a stream is forked and not joined",
        severity=Severity.error,
        effect=Effect.capture_fails,
        why="Work on another stream belongs to a capture only if that stream waits for the first one, and the first "
        "one "
        "waits for it at the end; else CUDA fails at the end of the capture, and names no line.",
        fix="side.wait_stream(torch.cuda.current_stream()) before, torch.cuda.current_stream().wait_stream(side) after",
        broken="""
def step(x):
    if x.is_cuda:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # here
            layer.weight.grad = None
    layer(x).sum().backward()
""",
        mended="""
def step(x):
    if x.is_cuda:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer.weight.grad = None
        torch.cuda.current_stream().wait_stream(side)
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-C002",
        title="memory is collected in the step",
        severity=Severity.warning,
        effect=Effect.capture_fails,
        why="Giving memory back to the driver fails in a capture, and a collection may run the destructor of an old "
        "graph in "
        "the middle of a new one. In eager runs it costs milliseconds a step.",
        fix="leave it out; once, before the capture, does no harm",
        broken="""
import gc


def step(x):
    layer(x).sum().backward()
    gc.collect()  # here
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-C003",
        title="a wrapper that graphs do not see through",
        severity=Severity.warning,
        effect=Effect.capture_fails,
        why="DataParallel starts a thread for each device and copies the model in each step; scripted modules run past "
        "Python, so that modules inside get no graphs of their own.",
        fix="use DistributedDataParallel with one process for each device; give the plain module",
        broken="""
model = nn.DataParallel(layer)


def step(x):
    model(x).sum().backward()  # here
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
    Kind(
        code="GS-C004",
        title="anomaly detection is on",
        severity=Severity.warning,
        effect=Effect.capture_fails,
        why="It looks for NaN after every operation of the backward, on the host: CUDA refuses that in a capture.",
        fix="turn it off, or give check_nan=False",
        broken="""
def step(x):
    with torch.autograd.detect_anomaly():  # here
        layer(x).sum().backward()
""",
        mended="""
def step(x):
    layer(x).sum().backward()
""",
    ),
)
