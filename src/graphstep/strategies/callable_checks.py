"""Compares the arguments of a call with a sample, and names those that differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.capture.signature import Signature, TensorLayout
from graphstep.capture.tree import flatten, tensor_paths
from graphstep.errors import InputMismatchError

_MISSING: Final = " is missing"
_EXTRA: Final = " was not there at capture"
"""How differences of signatures end."""


def layout_guard(signature: Signature) -> Callable[..., bool] | None:
    """A fast check of plain positional tensors, if the sample had nothing else."""
    paths = tensor_paths(signature.structure)
    if paths != [f"[0][{index}]" for index in range(len(paths))]:
        return None
    layouts = signature.layouts

    def holds(*tensors: Tensor) -> bool:
        return all(TensorLayout.of(tensor) == layout for tensor, layout in zip(tensors, layouts, strict=True))

    return holds


def named_differences(mine: Signature, given: Signature, names: Sequence[str]) -> list[str]:
    """In words, with the names of arguments. Strides do not matter: arguments are copied."""
    if mine == given:
        return []
    layouts = tuple(
        replace(theirs, stride=own.stride) if own.shape == theirs.shape else theirs
        for own, theirs in zip(mine.layouts, given.layouts, strict=False)
    )
    if len(layouts) == len(given.layouts):
        given = Signature(given.structure, layouts, given.ambient, given.training, mine.repeated)
    return _without_moves([_with_name(text, names) for text in mine.differences(given, "")])


def argument_names(signature: Signature, names: Sequence[str]) -> list[str]:
    """Of each argument tensor, in words."""
    return [_with_name(path, names) for path in tensor_paths(signature.structure)]


def refuse_sparse(tensors: Sequence[Tensor], arguments: Any, names: Sequence[str], where: str) -> None:
    """A graph reads memory with strides.

    Raises:
        InputMismatchError: names the arguments that have none.
    """
    if all(tensor.layout is torch.strided for tensor in tensors):
        return
    paths = tensor_paths(flatten(arguments)[1])
    wrong = [
        f"{_with_name(path, names)} is a {str(tensor.layout).removeprefix('torch.')} tensor"
        for path, tensor in zip(paths, tensors, strict=True)
        if tensor.layout is not torch.strided
    ]
    raise InputMismatchError(
        f"{'; '.join(wrong)}; a graph needs tensors with strides", where=where, fix="call to_dense()"
    )


def _without_moves(texts: list[str]) -> list[str]:
    """What is missing in one place and too much in the other was given in another way."""
    missing = [text.removesuffix(_MISSING) for text in texts if text.endswith(_MISSING)]
    moved = {name for name in missing if f"{name}{_EXTRA}" in texts}
    kept = [text for text in texts if text.removesuffix(_MISSING).removesuffix(_EXTRA) not in moved]
    return kept + [
        f"{name} was given by position in the sample and by keyword now, or the other way round"
        for name in dict.fromkeys(missing)
        if name in moved
    ]


def names_of(function: Callable[..., Any]) -> Sequence[str]:
    """Of the positional arguments of a function, or of a module's forward."""
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        return ()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _with_name(text: str, names: Sequence[str]) -> str:
    """``[0][1].mask changed shape`` as ``argument 'context'.mask changed shape``."""
    for index in range(text.count("[") + len(names)):
        start = f"[0][{index}]"
        if text.startswith(start):
            name = repr(names[index]) if index < len(names) else f"number {index + 1}"
            return f"argument {name}{text[len(start) :]}"
    if text.startswith("[1]['"):
        name, rest = text[len("[1]['") :].split("']", 1)
        return f"argument {name!r}{rest}"
    return text
