"""Where in the user's code an operation came from."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from dataclasses import dataclass
from types import FrameType

import torch

import graphstep

_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(os.path.dirname(graphstep.__file__), part) + os.sep for part in ("engine", "capture", "strategies")),
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
)


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
    """The innermost frame that belongs to neither torch nor the capture machinery.

    During a backward pass that is the line that called ``backward``, unless the operation stands in a custom function.
    """
    frame = frame if frame is not None else sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_users(name):
            return UserLine(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def user_line_of(error: BaseException) -> UserLine | None:
    """The innermost frame of an error's traceback that belongs to the user."""
    for entry in reversed(list(traceback.walk_tb(error.__traceback__))):
        frame, line = entry
        if _is_users(frame.f_code.co_filename):
            return UserLine(frame.f_code.co_filename, line, frame.f_code.co_name)
    return None


def _is_users(filename: str) -> bool:
    return not filename.startswith(_SKIPPED) and not filename.startswith("<")
