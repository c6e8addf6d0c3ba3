"""Where in the user's code an operation came from."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from types import FrameType

import torch

import graphstep

_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(os.path.dirname(graphstep.__file__), part) + os.sep for part in ("engine", "capture", "strategies")),
)
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple(os.sep + folder + os.sep for folder in ("site-packages", "dist-packages"))


@dataclass(frozen=True, slots=True)
class UserLine:
    """One line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        place = f"{self.file}:{self.line} in {self.function}"
        return f"{place}: {text}" if text else place


def user_line(frame: FrameType | None = None) -> UserLine | None:
    """The innermost frame that belongs to neither torch, the standard library nor the capture machinery.

    During a backward pass that is the line that called ``backward``, unless the operation stands in a custom function.
    Code without a file (``python -c``, a console) counts only where no file is found.
    """
    frame = frame if frame is not None else sys._getframe(1)
    without_file = None
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_users(name):
            return UserLine(name, frame.f_lineno, frame.f_code.co_name)
        if without_file is None and _is_typed_in(name):
            without_file = UserLine(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return without_file


def user_line_of(error: BaseException) -> UserLine | None:
    """The innermost frame of an error's traceback that belongs to the user."""
    for entry in reversed(list(traceback.walk_tb(error.__traceback__))):
        frame, line = entry
        if _is_users(frame.f_code.co_filename) or _is_typed_in(frame.f_code.co_filename):
            return UserLine(frame.f_code.co_filename, line, frame.f_code.co_name)
    return None


def _is_users(filename: str) -> bool:
    if filename.startswith(_SKIPPED) or filename.startswith("<"):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or any(folder in filename for folder in _INSTALLED)


def _is_typed_in(filename: str) -> bool:
    return filename in ("<stdin>", "<string>") or filename.startswith(("<ipython-input", "<python-input"))
