"""Host reads that the dispatcher does not show, refused at the Python call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphstep.engine.user_frame import user_line
from graphstep.errors import CaptureError

_READS = MappingProxyType(
    {
        "tolist": "keep the values in a tensor, or compute the list before the captured call",
        "numpy": "do the computation with torch operations",
        "__array__": "do the computation with torch operations",
        "cpu": "keep the tensor on the device and read it after the replay",
        "__repr__": "print the tensor after the replay",
        "__format__": "print the tensor after the replay",
        "storage": "use the tensor itself",
    }
)


class HostReadGuard(TorchFunctionMode):
    """Refuses Python calls that hand tensor values to the host, while a tape records.

    Some of them never reach the dispatcher on the CPU, and ``Tensor.cpu`` does nothing there; on a GPU each would wait
    for the device and break the capture.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        fix = _READS.get(name)
        if fix is not None and getattr(Tensor, name, None) is func:
            raise host_read_error(f"Tensor.{name}", fix)
        kwargs = kwargs or {}
        if func is torch.nn.functional.one_hot:
            replaced = _one_hot_without_reading(*args, **kwargs)
            if replaced is not None:
                return replaced
        return func(*args, **kwargs)


def host_read_error(operation: str, fix: str) -> CaptureError:
    """The error for an operation that needs a value on the host."""
    return CaptureError(
        f"{operation} reads a value of a tensor on the host; a graph has no host to read it",
        where=str(user_line() or "no Python frame of the user's"),
        fix=fix,
    )


def _one_hot_without_reading(tensor: Tensor, num_classes: int = -1) -> Tensor | None:
    """``one_hot`` checks its values on the CPU but not on a GPU: with a given width nothing has to be read."""
    if num_classes < 0:
        return None
    encoded = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return encoded.scatter_(-1, tensor.unsqueeze(-1), 1)


@contextmanager
def answers_as_capturing(is_inside: Callable[[], bool]) -> Iterator[None]:
    """Make ``torch.cuda.is_current_stream_capturing`` say yes where a tape records.

    Libraries read values when run eagerly and not under capture, and ask this function which it is. ``is_inside``
    tells whether the asking thread is the one that records; all others get the true answer.
    """
    ask = torch.cuda.is_current_stream_capturing

    def is_current_stream_capturing() -> bool:
        return is_inside() or ask()

    torch.cuda.is_current_stream_capturing = is_current_stream_capturing
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = ask
