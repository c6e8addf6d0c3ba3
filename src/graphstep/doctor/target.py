"""What is looked at: a step, its batches, and where it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.doctor.findings import SourceLine
from graphstep.errors import Problem, UserInputError


@dataclass(kw_only=True, slots=True)
class Target:
    """A step of training, or any function whose calls are to be captured."""

    name: str
    step: Callable[..., Any]
    batches: Iterable[Any] = ()
    """Arguments of the calls; none where the step takes none."""
    where: SourceLine
    """Where it is defined: for what has no line of its own."""
    loader_name: str = ""
    """Of the variable that holds the batches."""
    has_libraries: bool = False
    """Its code is a library's, whose lines are the ones to name."""
    functions: list[Callable[..., Any]] = field(default_factory=list)
    """What its code is; the step unless it was made here."""


def target_of(step: Any, batches: Iterable[Any], name: str = "") -> Target:
    """The target that a function, a module or a class of modules is.

    Args:
        step: what is called for each batch; of a module, forward and backward.
        batches: one for each call: a tensor, a tuple of arguments, or a dict of named ones.
        name: how to call it.

    Raises:
        UserInputError: it cannot be called, or it is a class of modules that is built with arguments.
    """
    name = name or getattr(step, "__qualname__", type(step).__name__)
    if isinstance(step, type) and issubclass(step, nn.Module):
        if needs_arguments(step):
            what = f"{name} is a class that is built with arguments"
            fix = "name an object of it, or a function without arguments that returns one"
            raise UserInputError(Problem("target-class", what, name, fix))
        step = step()
    step = _without_graphs(step)
    if not callable(step):
        what = f"{name} is {_article(type(step).__name__)}, and cannot be called"
        raise UserInputError(Problem("target-not-callable", what, name, "name a function that makes one step"))
    if isinstance(step, nn.Module):
        forward = inspect.getattr_static(type(step), "forward", step)
        return Target(
            name=name, step=trained(step), batches=batches, where=_defined_at(forward, name), functions=[step.forward]
        )
    return Target(name=name, step=step, batches=batches, where=_defined_at(step, name), functions=[step])


def _without_graphs(step: Any) -> Any:
    """The plain function of a step that would launch graphs; other decorators belong to the step."""
    plain, inner = step, step
    while not isinstance(inner, nn.Module) and hasattr(inner, "__wrapped__"):
        launches = getattr(type(inner), "launches_graphs", False)
        inner = inner.__wrapped__
        plain = inner if launches else plain
    return plain


def trained(module: nn.Module) -> Callable[..., None]:
    """A step of a module alone: forward, and the backward of its loss or of the mean of what it returns."""

    def step(*args: Any, **kwargs: Any) -> None:
        loss = _loss_of(module(*args, **kwargs))
        if loss is not None and loss.requires_grad:
            loss.backward()

    return step


def call_of(step: Callable[..., Any], batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is given: as the one argument where there is one, a tuple as several, a dict by its names."""
    if isinstance(batch, list | tuple | Mapping):
        try:
            signature = inspect.signature(step)
        except (TypeError, ValueError):
            signature = None
        if signature is not None and not _takes_one(signature):
            return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
        if signature is not None and isinstance(batch, list | tuple) and len(batch) == 1:
            return tuple(batch), {}  # as TensorDataset has it
    return (batch,), {}


def needs_arguments(function: Callable[..., Any]) -> bool:
    """True if it cannot be called with none."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:
        return False
    return False


def takes_arguments(function: Callable[..., Any]) -> bool:
    """True if it can be called with some."""
    try:
        return bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return True


def takes_any(function: Any) -> bool:
    """True if it takes any number of arguments, or any named ones."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)


def _takes_one(signature: inspect.Signature) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in signature.parameters.values() if p.kind in kinds]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    return len(required) == 1 or (not required and len(positional) == 1)


def _loss_of(value: Any) -> Tensor | None:
    loss = getattr(value, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    found = [tensor for tensor in _floats(value) if tensor.requires_grad]
    return torch.stack([tensor.float().mean() for tensor in found]).sum() if found else None


def _floats(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for each in value for tensor in _floats(each)] if isinstance(value, list | tuple) else []


def _defined_at(function: Any, name: str) -> SourceLine:
    code = getattr(inspect.unwrap(function), "__code__", None)
    code = code or getattr(inspect.getattr_static(type(function), "__call__", None), "__code__", None)
    if code is None:
        return SourceLine(name)
    return SourceLine(code.co_filename, code.co_firstlineno, code.co_qualname)


def _article(word: str) -> str:
    return f"an {word}" if word[:1].lower() in "aeiou" else f"a {word}"
