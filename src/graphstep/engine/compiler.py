"""What is said to ``torch.compile``: to leave handlers of modes alone, and to stand back where work is recorded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Final, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COMPILER = "torch._dynamo"
_TURNS: Final = threading.Lock()  # Taken to change the compiler's stance, which is one for the process.


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does without the compiler.

    PyTorch wraps the handler of a mode so that ``torch.compile`` leaves it alone, and the wrapper imports the compiler
    on first use: seconds, in the middle of a capture, for a program that compiles nothing. So the handler is wrapped
    here, and only where the compiler is there already. Versions that do not know the method wrap it themselves.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as such. Else it would be skipped, in this call and in all later ones."""
        return True

    def __enter__(self) -> Self:
        compiler = sys.modules.get(_COMPILER)
        if compiler is not None and "__torch_dispatch__" not in self.__dict__:
            handler = compiler.disable(type(self).__torch_dispatch__)
            self.__dict__["__torch_dispatch__"] = MethodType(handler, self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.__dict__.pop("__torch_dispatch__", None)


@contextmanager
def compiled_code_off() -> Iterator[None]:
    """Have what this thread calls under ``torch.compile`` run as it was written: compiled kernels pass a mode by.

    Other threads go on with their compiled code. Costs nothing in a program that compiles nothing.
    """
    if _COMPILER not in sys.modules:
        yield
        return
    frames: Any = sys.modules.get(f"{_COMPILER}.eval_frame")
    if not hasattr(frames, "_set_stance") or not hasattr(frames, "_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    stance = _EagerHere()
    with _TURNS:
        stance.prior = frames._stance
        frames._set_stance(stance)
    try:
        yield
    finally:
        stance.is_over = True
        with _TURNS:
            left = _without_those_over(frames._stance)
            if left is not frames._stance:
                frames._set_stance(left)


class _EagerHere:
    """A stance of the compiler that holds in one thread, until it is over; else the one before it speaks.

    torch has one stance for the process. Threads that set and restore it in turns would leave what one of them had set
    for a while to all, for good.
    """

    prior: Any

    def __init__(self) -> None:
        self.is_over, self._thread = False, threading.get_ident()

    @property
    def stance(self) -> str:
        """What the compiler goes by."""
        return "force_eager" if self._holds else self.prior.stance

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        """Are guards trusted without a look?"""
        return False if self._holds else self.prior.skip_guard_eval_unsafe

    @property
    def backend(self) -> Any:
        """Another backend than the one that was asked for, if any."""
        return None if self._holds else self.prior.backend

    @property
    def _holds(self) -> bool:
        return not self.is_over and threading.get_ident() == self._thread


def _without_those_over(stance: Any) -> Any:
    """Return what is left of a chain of stances. One of somebody else's is left as it is, with all that is below."""
    if not isinstance(stance, _EagerHere):
        return stance
    stance.prior = _without_those_over(stance.prior)
    return stance.prior if stance.is_over else stance
