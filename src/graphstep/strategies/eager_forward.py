"""Eager calls of a step whose order is watched: when their backward begins, and when none will come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.tree import flatten


class EagerForward:
    """Kept by autograd until the backward of an eager call begins, or by nobody.

    Args:
        begins: called when its backward begins; refuses it by an error.
        ends: called once, when its backward has begun or will never come.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends
        self._has_ended = False

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run what is called, and watch its result."""
        result = function(*arguments, **named)
        self.watch(result)
        return result

    def watch(self, result: Any) -> None:
        """Wait for the backward through any tensor of the result."""
        wanted = [tensor for tensor in flatten(result)[0] if tensor.requires_grad]
        if wanted:
            torch.autograd.graph.register_multi_grad_hook(wanted, self._backward_begins, mode="any")

    def _backward_begins(self, _gradient: Tensor) -> None:
        self._begins()
        self.end()

    def end(self) -> None:
        """It is no longer in flight. May be called twice."""
        if not self._has_ended:
            self._has_ended = True
            self._ends()

    def __del__(self) -> None:
        self.end()
