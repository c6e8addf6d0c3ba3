"""Finds what a word of the command line names: ``file.py:function``, ``module:function``, or a model's folder."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import Tensor, nn

from graphstep.config.suggest import suggestion
from graphstep.doctor.stand_in import cuda_stood_in
from graphstep.doctor.target import Target, needs_arguments, takes_any, takes_arguments, target_of
from graphstep.errors import Problem, UserInputError

_FIX: Final = "write file.py:function or package.module:function, or the folder or config.json of a model"
BATCHES: Final = "batches"
"""The variable of the target's module that holds its batches, unless another is named."""


def load_target(word: str, *, batches: str = BATCHES) -> Target:
    """Import what is named, and set it up.

    A function that takes no arguments and returns a function, a module, or one of these and its batches is a set-up:
    what it returns is the step. Any other function is the step itself; so is, where there are batches, one with
    ``*args``, which a decorator may have made of a step.

    Args:
        word: of the command line.
        batches: the variable with the batches of a step that takes arguments.

    Raises:
        UserInputError: there is no such file, module or name, it cannot be called, or it fails.
    """
    path, colon, name = word.rpartition(":")
    if not colon:
        if _is_model(Path(word)):
            from graphstep.doctor.hugging_face import model_target

            return model_target(Path(word))
        where = Path(word)
        what = f"{word} names no function" if where.is_file() or where.suffix == ".py" else f"there is no {word}"
        if where.is_dir():
            what = f"{word} has no config.json"
        fix = f"write {word}:step, with the name of the function" if where.suffix == ".py" else _FIX
        raise UserInputError(Problem("target-form", what, "TARGET", fix))
    module = _import_file(Path(path)) if path.endswith(".py") else _import_module(path)
    value = _attribute(module, name, word)
    may_be_given = hasattr(module, batches) and takes_any(value)
    step, given = (value, None) if may_be_given else _set_up(value, word)
    if given is None:
        given = getattr(module, batches, None)
        loader_name = batches
        if given is None and batches != BATCHES:
            what = f"{path} has no {batches}"
            fix = suggestion(batches, vars(module), "define it there: a list, one entry for each call")
            raise UserInputError(Problem("target-batches", what, "--batches", fix))
    else:
        loader_name = ""
    with _explained(word):
        target = target_of(step, given if given is not None else (), word)
    if not isinstance(step, nn.Module | type) and not takes_arguments(step):
        target.batches = ()
    target.loader_name = loader_name
    is_module = isinstance(step, nn.Module) or (isinstance(step, type) and issubclass(step, nn.Module))
    if given is None and (is_module or needs_arguments(target.step)):
        what = f"{word} takes arguments, and {path} has no {batches}"
        fix = f"add a list {batches} to the file, one entry for each call, or name another variable with --batches"
        raise UserInputError(Problem("target-batches", what, "TARGET", fix))
    return target


def failed(error: BaseException, where: str, doing: str) -> UserInputError:
    """What to say about an error of the user's own code."""
    text = _text_of(error).strip().splitlines()
    what = f"{doing} raised {type(error).__name__}{': ' + text[0] if text else ''}"
    entries = traceback.extract_tb(error.__traceback__)
    own = [e for e in entries if not any(part in e.filename for part in ("site-packages", "graphstep", "<frozen"))]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        where = f"{error.filename}:{error.lineno}"
    place = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else where
    fix = "make it run by itself first: the doctor looks at steps that work"
    if isinstance(error, SystemExit):
        fix = "let the step return; what ends the program belongs after it"
    elif isinstance(error, ImportError) and "relative import" in _text_of(error):
        fix = (
            "name the file as a module of its package: package.module:function, from the folder that holds the package"
        )
    elif "CUDA" in _text_of(error) or "NVIDIA" in _text_of(error):
        fix = 'let the step run without a GPU too: device = "cuda" if torch.cuda.is_available() else "cpu"'
    return UserInputError(Problem("target-failed", what, place, fix))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # Its own text fails, too.
        return ""


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path.is_file() and path.suffix == ".json")


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = f"there is no file {path}"
        raise UserInputError(Problem("target-file", what, "TARGET", "check the path; it counts from this folder"))
    spec = importlib.util.spec_from_file_location(f"_diagnosed_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise UserInputError(Problem("target-file", f"{path} is no file of Python", "TARGET", _FIX))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickle look there.
    with _found_in(path.resolve().parent), _explained(str(path)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    with _found_in(Path.cwd()), _explained(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise
            what = f"there is no module {name}"
            raise UserInputError(Problem("target-module", what, "TARGET", _FIX)) from error
        except (ValueError, TypeError) as error:
            raise UserInputError(Problem("target-form", f"{name!r} is no name of a module", "TARGET", _FIX)) from error


def _attribute(module: ModuleType, name: str, word: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            owner = word.rpartition(":")[0] if value is module else type(value).__name__
            what = f"{owner} has no {part or 'empty name'}"
            names = [each for each, held in vars(module).items() if callable(held) and not each.startswith("_")]
            raise UserInputError(Problem("target-name", what, word, suggestion(part, names, "name a function of it")))
        value = getattr(value, part)
    return value


def _set_up(value: Any, word: str) -> tuple[Any, Iterable[Any] | None]:
    """The step and, if a set-up gave them, its batches."""
    if not callable(value) or isinstance(value, nn.Module | type) or needs_arguments(value):
        return value, None
    with _explained(word):
        result = value()
    if isinstance(result, tuple) and len(result) == 2 and _is_step(result[0]) and not isinstance(result[1], Tensor):
        return result[0], result[1]
    return (result, None) if _is_step(result) else (value, None)


def _is_step(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | Tensor)


@contextmanager
def _explained(word: str) -> Iterator[None]:
    """Turn errors of the user's code into one message."""
    try:
        with cuda_stood_in(_unnoted):
            yield
    except UserInputError:
        raise
    except SystemExit as error:
        what = f"{word} ended the program while it was imported or set up"
        fix = 'put what the script does under if __name__ == "__main__":'
        raise UserInputError(Problem("target-exit", what, word, fix)) from error
    except Exception as error:
        raise failed(error, word, f"importing or setting up {word}") from error


def _unnoted(_code: str, _operation: str) -> None:
    """What is done before the step is no concern of graphs."""


@contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    """Let imports of the body find what lies in a folder."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
