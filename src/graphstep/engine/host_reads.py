"""Host reads that the dispatcher does not show, refused at the Python call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphstep.engine.assignments import DataAssignments
from graphstep.engine.backward_calls import through_edges
from graphstep.engine.refusals import Refusals
from graphstep.engine.tape_ops import tensors_in

_OUT_OF_TORCH = "do the computation with torch operations"
_METHODS = MappingProxyType(
    {
        "tolist": "keep the values in a tensor, or compute the list before the captured call",
        "numpy": _OUT_OF_TORCH,
        "__array__": _OUT_OF_TORCH,
        "__dlpack__": _OUT_OF_TORCH,
        "cpu": "keep the tensor on the device and read it after the replay",
        "__repr__": "print the tensor after the replay",
        "__format__": "print the tensor after the replay",
        "storage": "use the tensor itself",
        "__reduce_ex__": "save or send the tensor after the replay",
        "__deepcopy__": "use clone()",
        "apply_": _OUT_OF_TORCH,
        "map_": _OUT_OF_TORCH,
        "map2_": _OUT_OF_TORCH,
    }
)
_BUILDERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
_RAW_LOOPS = frozenset(
    {
        torch._sobol_engine_draw,
        torch._sobol_engine_ff_,
        torch._sobol_engine_scramble_,
        torch._sobol_engine_initialize_state_,
    }
)


class HostReadGuard(TorchFunctionMode):
    """Refuses Python calls that hand tensor values to the host, while a tape records.

    It also notes assignments to ``.data``.

    Some of them never reach the dispatcher on the CPU, and ``Tensor.cpu`` does nothing there; on a GPU each would wait
    for the device and break the capture.
    """

    def __init__(self, refusals: Refusals, assignments: DataAssignments) -> None:
        super().__init__()
        self._refusals = refusals
        self._assignments = assignments

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        fix = _METHODS.get(name)
        if fix is not None and getattr(Tensor, name, None) is func:
            self._refusals.host_read(f"Tensor.{name}", fix)
        if func in _BUILDERS:
            self._refuse_values_of_tensors(name, func, args, kwargs)
        elif func in _RAW_LOOPS:
            self._refusals.host_read(f"torch.{name}", "draw the numbers before the captured call")
        elif func in (torch.tensor_split, Tensor.tensor_split):
            if any(isinstance(given, Tensor) for given in (*args[1:], *kwargs.values())):
                self._refusals.host_read(
                    f"{name} with a tensor of positions", "give the positions as a list of numbers"
                )
        elif name == "__set__" and func.__self__ is Tensor.data:
            self._assignments.note(args[0])
        elif func is Tensor.untyped_storage and _is_pickling():
            self._refusals.host_read("pickling a tensor", _METHODS["__reduce_ex__"])
        elif func is torch.nn.functional.one_hot:
            encoded = _one_hot_without_reading(*args, **kwargs)
            if encoded is not None:
                return encoded
        backward = through_edges(func, args, kwargs)
        if backward is not None:
            with self:
                return backward()
        return func(*args, **kwargs)

    def _refuse_values_of_tensors(self, name: str, func: Any, args: Any, kwargs: Any) -> None:
        """``torch.tensor([a, b])`` reads its tensors one by one; ``torch.tensor(a)`` copies on the device."""
        given = args[1:] if func is Tensor.new_tensor else args[:1]
        values = [*given, *(value for key, value in kwargs.items() if key in ("data", "obj"))]
        if any(True for value in values if not isinstance(value, Tensor) for _ in tensors_in(value)):
            self._refusals.host_read(f"{name} of a list with tensors in it", "use torch.stack or torch.cat")


def _is_pickling() -> bool:
    """True below ``Tensor.__reduce_ex__``, which does not tell function modes about plain tensors."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(5):
        if frame is None:
            return False
        if frame.f_code.co_name == "_reduce_ex_internal":
            return True
        frame = frame.f_back
    return False


def _one_hot_without_reading(tensor: Tensor, num_classes: int = -1) -> Tensor | None:
    """``one_hot`` checks its values on the CPU but not on a GPU: with a given width nothing has to be read."""
    if num_classes < 0:
        return None
    encoded = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return encoded.scatter_(-1, tensor.unsqueeze(-1), 1)


class _CapturingAnswer:
    """Stands in for ``torch.cuda.is_current_stream_capturing`` while a tape records in some thread."""

    def __init__(self, is_inside: Callable[[], bool], ask: Callable[[], bool]) -> None:
        self.ask = ask
        self.is_over = False
        self._is_inside = is_inside

    def is_inside(self) -> bool:
        return not self.is_over and self._is_inside()

    def __call__(self) -> bool:
        return self.is_inside() or self.ask()


def is_capturing_here() -> bool:
    """True in a thread whose work is being captured, by a tape or a GPU."""
    asked: Any = torch.cuda.is_current_stream_capturing
    while isinstance(asked, _CapturingAnswer):
        if asked.is_inside():
            return True
        asked = asked.ask
    return torch.cuda.is_available() and bool(asked())  # Without a GPU the plain function raises.


@contextmanager
def answers_as_capturing(is_inside: Callable[[], bool]) -> Iterator[None]:
    """Make ``torch.cuda.is_current_stream_capturing`` say yes where a tape records.

    Libraries read values when run eagerly and not under capture, and ask this function which it is. ``is_inside``
    tells whether the asking thread is the one that records; all others get the true answer. Captures in several
    threads may end in any order: whoever ends last on top removes all that are over.
    """
    answer = _CapturingAnswer(is_inside, torch.cuda.is_current_stream_capturing)
    torch.cuda.is_current_stream_capturing = answer
    try:
        yield
    finally:
        answer.is_over = True
        installed: Any = torch.cuda.is_current_stream_capturing
        while isinstance(installed, _CapturingAnswer) and installed.is_over:
            installed = installed.ask
        torch.cuda.is_current_stream_capturing = installed
