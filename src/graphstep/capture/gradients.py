"""Gradients at fixed addresses outside the pool, whatever the training loop does to ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, contains
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.capture.fast_check import all_same
from graphstep.errors import StaleAddressError


@dataclass(frozen=True, slots=True)
class _Home:
    leaf: Tensor
    tensor: Tensor
    address: int
    is_main_grad: bool
    is_new: bool
    """``.grad`` was ``None`` before."""


class GradientHomes:
    """The storage that a recording accumulates each parameter's gradient into.

    That is the parameter's ``main_grad`` where the training loop keeps one (Megatron's protocol), else its ``.grad``.
    A parameter without a gradient gets one here, allocated outside any capture, so that ``.grad`` never aliases memory
    of the pool.

    Args:
        shared: parameters, by identity, with the gradients that were made for them. Given to several homes, it keeps
            each of them from making its own.
    """

    def __init__(self, shared: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self._homes: dict[int, _Home] = {}
        self._shared = shared if shared is not None else {}
        self._quick = QuickLook(())

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Settle where the gradients of these leaves live. Their values are not changed."""
        for leaf in leaves:
            if id(leaf) not in self._homes:
                self._homes[id(leaf)] = self._find(leaf)
        self._quick = QuickLook(self._homes.values())

    def _find(self, leaf: Tensor) -> _Home:
        main = getattr(leaf, "main_grad", None)
        if isinstance(main, Tensor):
            return _Home(leaf, main, main.data_ptr(), is_main_grad=True, is_new=False)
        is_new = leaf.grad is None
        if leaf.grad is None:
            leaf.grad = self._made_for(leaf)
        return _Home(leaf, leaf.grad, leaf.grad.data_ptr(), is_main_grad=False, is_new=is_new)

    def _made_for(self, leaf: Tensor) -> Tensor:
        _, made = self._shared.get(id(leaf), (leaf, None))
        if made is None or (made.shape, made.dtype, made.device) != (leaf.shape, leaf.dtype, leaf.device):
            made = torch.zeros_like(leaf, memory_format=torch.preserve_format).detach()
            self._shared[id(leaf)] = leaf, made
        return made.zero_()

    def of(self, leaf: Tensor) -> Tensor:
        """The gradient storage of a leaf that was added."""
        return self._homes[id(leaf)].tensor

    def forget(self) -> None:
        """Undo :meth:`add`: leaves that had no gradient have none again."""
        for home in self._homes.values():
            if home.is_new and home.leaf.grad is home.tensor:
                home.leaf.grad = None
        self._homes.clear()
        self._quick = QuickLook(())

    @staticmethod
    def look_at_all(homes: Iterable[GradientHomes]) -> QuickLook:
        """A look at several of these at once, good as long as nothing is added to them."""
        return QuickLook(home for each in homes for home in each._homes.values())

    def settle(self) -> None:
        """Before a replay that accumulates: make every ``.grad`` its home again, with the value it stands for.

        ``None`` means zero (``zero_grad(set_to_none=True)``); another tensor is copied in. Costs nothing where the
        loop left ``.grad`` alone.

        Raises:
            StaleAddressError: a gradient that the recording writes has moved where this class cannot follow.
        """
        if self._quick.all_at_home():
            return
        for home in self._homes.values():
            leaf, tensor = home.leaf, home.tensor
            if home.is_main_grad:
                is_stale = getattr(leaf, "main_grad", None) is not tensor
            else:
                is_stale = leaf.__dict__.get("main_grad") is not None  # the fast way to ask for what is rarely there
            if is_stale or tensor.data_ptr() != home.address:
                raise StaleAddressError(_how_it_moved(home), where="before a backward replay", fix=_FIX)
            gradient = leaf.grad
            if home.is_main_grad or gradient is tensor:
                continue
            if gradient is None:
                tensor.zero_()
            else:
                tensor.copy_(gradient)
            leaf.grad = tensor


class QuickLook:
    """The common case of :meth:`GradientHomes.settle`, where the loop left everything in place, at the speed of C."""

    def __init__(self, homes: Iterable[_Home]) -> None:
        homes = list(homes)
        self._tensors = [home.tensor for home in homes]
        self._addresses = [home.address for home in homes]
        self._main = [home.leaf for home in homes if home.is_main_grad]
        self._main_tensors = [home.tensor for home in homes if home.is_main_grad]
        self._plain = [home.leaf for home in homes if not home.is_main_grad]
        self._plain_tensors = [home.tensor for home in homes if not home.is_main_grad]
        self._plain_attributes = [leaf.__dict__ for leaf in self._plain]

    def all_at_home(self) -> bool:
        """True if no gradient has to be moved or refused."""
        return (
            all_same(self._plain_tensors, map(_grad_of, self._plain))
            and all_same(self._main_tensors, map(_main_grad_of, self._main))
            and not any(map(contains, self._plain_attributes, repeat("main_grad")))
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        )


def _main_grad_of(leaf: Tensor) -> Any:
    return getattr(leaf, "main_grad", None)


_grad_of: Final = attrgetter("grad")

_FIX = (
    "keep the gradient tensors for the whole run and write into them, or drop the graphs (reset_cuda_graph(), or close "
    "and build a new strategy) and let them be captured again"
)


def _how_it_moved(home: _Home) -> str:
    main = getattr(home.leaf, "main_grad", None)
    name = "main_grad" if home.is_main_grad or main is not None else "grad"
    what = f"{name} of a parameter of shape {tuple(home.leaf.shape)}"
    if home.is_main_grad and main is None:
        return f"{what} was removed"
    if not home.is_main_grad and main is not None:
        return f"{what} was not there at capture"
    if main is not None and main is not home.tensor:
        return f"{what} was replaced by another tensor"
    return f"{what} moved: captured at {home.address:#x}, now at {home.tensor.data_ptr():#x}"


def leaves_reached(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors that a backward pass from ``outputs`` would accumulate into, in a fixed order."""
    outputs = list(outputs)
    found: dict[int, Tensor] = {id(output): output for output in outputs if output.requires_grad and output.is_leaf}
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


def has_gradient_hooks(leaf: Tensor) -> bool:
    """True if hooks on this leaf want to see, or change, each gradient before it is accumulated."""
    return bool(leaf._backward_hooks)


@contextmanager
def hooks_off(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Take the hooks on the gradients of leaves off for the body: they run in each backward, not in a capture."""
    installed = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    kept = [(hooks, dict(hooks)) for hooks in installed]
    for hooks in installed:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)
