"""Gradients at fixed addresses outside the pool, whatever the training loop does to ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class GradientHomes:
    """The storage that a recording accumulates each parameter's gradient into.

    That is the parameter's ``main_grad`` where the training loop keeps one (Megatron's protocol), else its ``.grad``.
    A parameter without a gradient gets one here, allocated outside any capture, so that ``.grad`` never aliases memory
    of the pool.
    """

    def __init__(self) -> None:
        self._homes: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Settle where the gradients of these leaves live. Their values are not changed."""
        for leaf in leaves:
            if id(leaf) not in self._homes:
                self._homes[id(leaf)] = (leaf, self._find(leaf))

    @staticmethod
    def _find(leaf: Tensor) -> Tensor:
        main = getattr(leaf, "main_grad", None)
        if isinstance(main, Tensor):
            return main
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf, memory_format=torch.preserve_format).detach()
        return leaf.grad

    def of(self, leaf: Tensor) -> Tensor:
        """The gradient storage of a leaf that was added."""
        return self._homes[id(leaf)][1]

    def settle(self) -> None:
        """Before a replay that accumulates: make every ``.grad`` its home again, with the value it stands for.

        ``None`` means zero (``zero_grad(set_to_none=True)``); another tensor is copied in. Costs nothing where the
        loop left ``.grad`` alone.
        """
        for leaf, home in self._homes.values():
            gradient = leaf.grad
            if gradient is home or getattr(leaf, "main_grad", None) is home:
                continue
            if gradient is None:
                home.zero_()
            else:
                home.copy_(gradient)
            leaf.grad = home


def leaves_reached(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors that a backward pass from ``outputs`` would accumulate into, in a fixed order."""
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.setdefault(id(variable), variable)
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return list(found.values())
