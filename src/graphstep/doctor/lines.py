"""Which line of the user's code is at work, and what of torch stands between it and an operation."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Final

import torch

import graphstep
from graphstep.doctor.findings import SourceLine
from graphstep.engine import torch_private

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_PACKAGE: Final = os.path.dirname(graphstep.__file__) + os.sep
_MACHINERY: Final = tuple(_PACKAGE + part + os.sep for part in ("doctor", "engine", "capture", "strategies"))
_STANDARD_LIBRARY: Final = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED: Final = tuple(os.sep + folder + os.sep for folder in ("site-packages", "dist-packages"))
_TYPED_IN: Final = ("<stdin>", "<ipython-input", "<python-input")
_TRACED: Final = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)

OPTIMIZER: Final = "optim" + os.sep
SCALER: Final = os.path.join("amp", "grad_scaler.py")
CLIPPING: Final = os.path.join("nn", "utils", "clip_grad.py")
CHECKPOINT: Final = os.path.join("utils", "checkpoint.py")
LOADING: Final = os.path.join("utils", "data") + os.sep
_PARTS: Final = (OPTIMIZER, SCALER, CLIPPING, CHECKPOINT, LOADING)
"""Parts of torch that explain an operation in them, by the beginning of their path."""


def call_observed(step: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Call the step. Frames outside of this one are not the step's."""
    return step(*args, **kwargs)


_OUTERMOST: Final[CodeType] = call_observed.__code__


@dataclass(frozen=True, slots=True)
class Spot:
    """Where something happens."""

    line: SourceLine
    is_own: bool
    """The line is the user's, not a library's."""
    is_direct: bool
    """No code of torch stands between the line and what happens."""
    inside: str
    """The line of a library that the user's line has called, if any."""
    parts: frozenset[str]
    """Parts of torch that the line has called, such as :data:`OPTIMIZER`."""
    around: frozenset[str]
    """The same, and those that have called the line's function."""
    is_in_backward: bool

    @property
    def part(self) -> str:
        """``forward``, ``backward``, ``optimizer`` or ``data``."""
        if LOADING in self.parts:
            return "data"
        if self.around & {OPTIMIZER, SCALER, CLIPPING}:
            return "optimizer"
        return "backward" if self.is_in_backward else "forward"


@dataclass(slots=True)
class Ground:
    """Whose code is whose.

    Args:
        fallback: the line for what no Python line is at work for: where the target is.
        has_libraries: the target is a library's, so that its lines are the ones to name.
    """

    fallback: SourceLine
    has_libraries: bool = False
    _owned: dict[str, bool] = field(default_factory=dict)

    def owns(self, filename: str) -> bool:
        """True for the user's files."""
        known = self._owned.get(filename)
        if known is None:
            is_library = any(folder in filename for folder in _INSTALLED) or filename.startswith(_PACKAGE)
            known = self._owned[filename] = not (
                filename.startswith((_TORCH, *_MACHINERY))
                or (filename.startswith("<") and not filename.startswith(_TYPED_IN))
                or (is_library and not self.has_libraries)
                or (filename.startswith(_STANDARD_LIBRARY) and not is_library)
            )
        return known

    def spot(self, frame: FrameType | None = None) -> Spot:
        """Where the code is that runs, from this frame outwards."""
        frame = frame if frame is not None else sys._getframe(1)
        own: SourceLine | None = None
        library: SourceLine | None = None
        is_direct: bool | None = None
        parts: set[str] = set()
        around: set[str] = set()
        while frame is not None and frame.f_code is not _OUTERMOST:
            name = frame.f_code.co_filename
            if own is None and self.owns(name):
                own = SourceLine(name, frame.f_lineno, frame.f_code.co_qualname)
                is_direct = is_direct is None and library is None
            elif own is None and name.startswith(_MACHINERY):
                is_direct, library = None, None  # What lies further in is the watcher's.
            elif name.startswith(_TORCH):
                below = name[len(_TORCH) :]
                found = {part for part in _PARTS if below.startswith(part)}
                if LOADING in found:  # The line that reads the loader counts, not those of its dataset.
                    own, library, is_direct = None, None, None
                around |= found
                parts |= found if own is None else set()
                if (
                    own is None
                    and is_direct is None
                    and not below.startswith(("overrides.py", "_tensor.py", "_dynamo"))
                ):
                    is_direct = False
            elif own is None and library is None and _is_library(name):
                library = SourceLine(name, frame.f_lineno, frame.f_code.co_name)
            frame = frame.f_back
        in_backward = torch_private.backward_pass() is not None
        line = own or library or self.fallback
        inside = f"in {_short(library.file)}:{library.line}" if own is not None and library is not None else ""
        return Spot(line, own is not None, bool(is_direct), inside, frozenset(parts), frozenset(around), in_backward)

    def made_in_forward(self) -> SourceLine | None:
        """In a backward: the line of the forward whose gradient is computed, where torch has kept it."""
        found = None
        for text in torch_private.forward_trace():
            for file, line, function in _TRACED.findall(text):
                if self.owns(file):
                    found = SourceLine(file, int(line), function)
        return found


def _is_library(name: str) -> bool:
    return not name.startswith((*_MACHINERY, "<")) and (
        name.startswith(_PACKAGE) or any(folder in name for folder in _INSTALLED)
    )


def _short(file: str) -> str:
    for folder in _INSTALLED:
        if folder in file:
            return file.split(folder, 1)[1]
    return file
