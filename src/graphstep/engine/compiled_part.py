"""What the compiled part asks torch before a replay, and what it launches: private interfaces, each with a fallback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.nn.utils import parametrize

from graphstep.engine import torch_private


def thread_answers(device_type: str) -> tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...]:
    """Functions, arguments, answers: nobody takes what autograd saves, no weights are cached, nothing is captured."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
    return (
        (partial(getattr, parametrize, "_cache_enabled", 0), (), 0),
        *(((top, (True,), None),) if top is not None else ()),
        *(((capturing, (), False),) if device_type == "cuda" else ()),
    )


def unwrapped_answers() -> tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...]:
    """The same for calls that may come from anywhere: no capture, and no transform that sees through no replay."""
    return ((torch_private.capture_is_under_way, (), False), (torch_private.transforms_are_active, (), False))


def process_answers(
    deterministic: bool, matmul_precision: str, default_dtype: torch.dtype
) -> tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...]:
    """The same for modes of the process."""
    reads = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
    precision = getattr(torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision)
    return (
        (reads, (), deterministic),
        (precision, (), matmul_precision),
        (torch.get_default_dtype, (), default_dtype),
    )


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its preparations for ``torch.func``: for calls outside of transforms."""
    plain = getattr(super(torch.autograd.Function, function), "apply", None)
    return plain if plain is not None else function.apply


def graph_launcher(graph: torch.cuda.CUDAGraph) -> Callable[[], object]:
    """What launches a graph, without the Python around it where torch has some."""
    base = getattr(torch._C, "_CUDAGraph", None)
    return MethodType(base.replay, graph) if base is not None and isinstance(graph, base) else graph.replay
