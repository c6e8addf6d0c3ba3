"""Without a GPU: the CPU in place of the device ``cuda``, so that steps written for a GPU run as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Note = Callable[[str, str], Any]
"""Takes the code of a finding and an operation."""

_CPU: Final = torch.device("cpu")


@contextmanager
def cuda_stood_in(note: Note) -> Iterator[None]:
    """Let the body name the device ``cuda``, and use streams and events; does nothing where there is a GPU.

    Functions of ``torch.cuda`` are replaced meanwhile, for the whole process.

    Args:
        note: told of waits of the host and of memory that is given back.
    """
    if torch.cuda.is_available():
        yield
        return
    # Loads the compiler, which optimizers load anyway: it looks at the functions of torch.cuda by identity when it is
    # loaded, and must find the true ones.
    torch.compiler.disable(_replacements)
    replacements = _replacements(note)
    kept = {name: getattr(torch.cuda, name) for name in replacements}
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    try:
        with _OnCpu():
            yield
    finally:
        for name, value in kept.items():
            setattr(torch.cuda, name, value)


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what is wanted on ``cuda``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func is Tensor.record_stream:
            return None
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is Tensor.to:
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event: everything on the CPU is done when it is called."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def synchronize(self) -> None:
        self._note("GS-H010", "synchronize of a stream or event")

    def query(self) -> bool:
        self._note("GS-H010", "query of a stream or event")
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else self

    def wait_stream(self, _stream: Any) -> None:
        return None

    def wait_event(self, _event: Any) -> None:
        return None

    def record(self, _stream: Any = None) -> None:
        return None

    def wait(self, _stream: Any = None) -> None:
        return None


def _replacements(note: Note) -> Mapping[str, Any]:
    def stream(*_arguments: Any, **_named: Any) -> _Stream:
        return _Stream(note)

    def nothing(*_arguments: Any, **_named: Any) -> int:
        return 0

    def inside(*_arguments: Any, **_named: Any) -> nullcontext[None]:
        return nullcontext()

    def synchronize(_device: Any = None) -> None:
        note("GS-H010", "torch.cuda.synchronize")

    def empty_cache() -> None:
        note("GS-C002", "torch.cuda.empty_cache")

    return {
        "Stream": stream,
        "Event": stream,
        "stream": stream,
        "current_stream": stream,
        "default_stream": stream,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "set_stream": nothing,
        "set_device": nothing,
        "device": inside,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_arguments: (0, 0),
        "nvtx": SimpleNamespace(range_push=nothing, range_pop=nothing, mark=nothing, range=inside),
        "current_device": nothing,
        "memory_allocated": nothing,
        "max_memory_allocated": nothing,
        "memory_reserved": nothing,
        "reset_peak_memory_stats": nothing,
    }


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
