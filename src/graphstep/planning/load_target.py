"""Finds the step and the model that ``file.py:function`` or ``module:function`` sets up."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from graphstep.config.suggest import suggestion
from graphstep.engine.user_frame import user_line_of
from graphstep.errors import GraphstepError, Problem, UserInputError


def load_target(word: str) -> tuple[Callable[[], Any], nn.Module]:
    """Import what is named, and call it: it sets up a step and its model.

    Args:
        word: ``file.py:function`` or ``package.module:function``.

    Returns:
        The step, which takes no arguments, and the model that it trains.

    Raises:
        UserInputError: there is no such file, module or name, it fails, or it returns something else.
    """
    path, _, name = word.rpartition(":")
    folder = Path(path).resolve().parent if path.endswith(".py") else Path.cwd()
    with _found_in(folder):
        module = _imported(path, word)
        function = getattr(module, name, None)
        if not callable(function):
            known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            fix = suggestion(name, known, "name a function of it")
            raise UserInputError(Problem("target-name", f"{path} has no function {name}", word, fix))
        try:
            found = function()
        except Exception as error:
            what = f"setting up {word} raised {type(error).__name__}: {error}"
            raise UserInputError(Problem("target-failed", what, word, "make it run by itself first")) from error
    if (
        not isinstance(found, tuple)
        or len(found) != 2
        or not callable(found[0])
        or isinstance(found[0], nn.Module)
        or not isinstance(found[1], nn.Module)
    ):
        what = f"{word} returned {type(found).__name__}, and not a step and its model"
        raise UserInputError(Problem("target-result", what, word, "return step, model: a function and a module"))
    return found[0], found[1]


def blamed_on_target(word: str, step: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a step so that what it raises is a ``UserInputError`` that names the target and the line.

    Errors of this package pass: they say what, where and how to fix.
    """

    def run() -> Any:
        try:
            return step()
        except GraphstepError:
            raise
        except Exception as error:
            what = f"the step of {word} raised {type(error).__name__}: {error}"
            where = str(user_line_of(error) or word)
            raise UserInputError(Problem("target-step-failed", what, where, "make it run by itself first")) from error

    return run


def _imported(path: str, word: str) -> ModuleType:
    try:
        if not path.endswith(".py"):
            return importlib.import_module(path)
        file = Path(path)
        if not file.is_file():
            fix = "check the path; it counts from this folder"
            raise UserInputError(Problem("target-file", f"there is no file {path}", word, fix))
        spec = importlib.util.spec_from_file_location(f"_planned_{file.stem}", file.resolve())
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no file of Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # Dataclasses and pickle look there.
        spec.loader.exec_module(module)
        return module
    except UserInputError:
        raise
    except Exception as error:
        what = f"importing {path} raised {type(error).__name__}: {error}"
        raise UserInputError(Problem("target-import", what, word, "make it importable by itself first")) from error


@contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    """Let imports of the body find what lies in a folder."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
