"""The modules that a callable uses, and the device on which callables run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn


def modules_of(function: Any) -> list[nn.Module]:
    """The modules that a callable shows that it uses: itself, its owner, what it was given, what it closes over."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, partial):
        given = [function.func, *function.args, *function.keywords.values()]
        return list(dict.fromkeys(module for each in given for module in modules_of(each)))
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    owner = getattr(function, "__self__", None)
    return list(dict.fromkeys(each for each in (owner, *cells) if isinstance(each, nn.Module)))


def name_of(function: Any) -> str:
    """What to call it: the class of a module, ``encode of Block`` for a method of one, else the function's own name."""
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    owner = getattr(function, "__self__", None)
    return f"{name} of {type(owner).__name__}" if isinstance(owner, nn.Module) else name


def all_modules_of(function: Any) -> list[nn.Module]:
    """The same, with all modules inside of them."""
    return list(dict.fromkeys(each for module in modules_of(function) for each in module.modules()))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def device_of(tensors: Sequence[Tensor], callables: Sequence[Callable[..., Any]]) -> torch.device:
    """Where samples and parameters are; if that is in several places, the first one that is not the CPU."""
    parameters = (p for each in callables if isinstance(each, nn.Module) for p in each.parameters())
    devices = {tensor.device: None for tensor in (*tensors, *parameters)}
    accelerated = [device for device in devices if device.type != "cpu"]
    return accelerated[0] if accelerated else torch.device("cpu")
