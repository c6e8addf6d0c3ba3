"""Calls of modules answered by others, by an attribute without a public name that torch looks at in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def module_calls_replaced(instead: Iterable[tuple[nn.Module, Callable[[Callable[..., Any]], Any]]]) -> Iterator[None]:
    """Have calls of modules, hooks included, answered by others: each is made from what would run."""
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for module, make in instead:
            replaced.append((module, module.__dict__.get("_compiled_call_impl")))
            module.__dict__["_compiled_call_impl"] = make(replaced[-1][1] or module._call_impl)
        yield
    finally:
        for module, before in reversed(replaced):
            if before is None:
                module.__dict__.pop("_compiled_call_impl", None)
            else:
                module.__dict__["_compiled_call_impl"] = before
