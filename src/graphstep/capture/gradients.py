"""Gradients at fixed addresses outside the pool, whatever the training loop does to ``.grad``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, contains
from typing import Any, Final, cast

import torch
from torch import Tensor

from graphstep.capture.fast_check import all_same
from graphstep.capture.saved_tensors import nodes_behind
from graphstep.engine import torch_private
from graphstep.errors import LifecycleError, StaleAddressError


@dataclass(slots=True, eq=False)
class Home:
    """Where the gradient of one leaf lives. Shared by all recordings of a session that write it."""

    leaf: Tensor
    tensor: Tensor
    """Over the memory that recordings write. Nobody else has it."""
    address: int
    is_main_grad: bool
    shown: Tensor
    """What ``.grad`` (or ``main_grad``) is while the gradient is at home, over the same memory."""
    is_own: bool = False
    """The memory was allocated here, and not by the loop."""
    num_holders: int = 0
    """Of the memory, when nobody else held it; 0 where that is not known."""

    def note_holders(self) -> None:
        """Once captured: more holders of the memory than now are others who keep the gradient."""
        if self.is_own:
            self.num_holders = sum(torch_private.HolderCount([self.tensor]).now())


Homes = dict[int, Home]
"""By identity of the leaf."""
Guests = dict[int, Tensor]
"""By identity of the leaf: gradients that are not at home, and are filled after a replay."""


class GradientHomes:
    """The storage that a recording accumulates each parameter's gradient into.

    That is the parameter's ``main_grad`` where the training loop keeps one (Megatron's protocol), else its ``.grad``.
    A parameter without a gradient gets one here, allocated outside any capture, so that ``.grad`` never aliases memory
    of the pool.

    Args:
        shared: of all recordings of a session.
    """

    def __init__(self, shared: Homes | None = None) -> None:
        self._shared = shared if shared is not None else {}
        self._homes: Homes = {}
        self._is_new: set[int] = set()
        """Leaves that had no gradient before."""
        self._look = QuickLook(())

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Settle where the gradients of these leaves live. Their values are not changed."""
        for leaf in leaves:
            if id(leaf) not in self._homes:
                self._homes[id(leaf)] = self._find(leaf)
        self._look = QuickLook(self._homes.values())

    def _find(self, leaf: Tensor) -> Home:
        main = getattr(leaf, "main_grad", None)
        known = self._shared.get(id(leaf))
        if isinstance(main, Tensor):
            if known is None or not known.is_main_grad or known.shown is not main:
                known = self._shared[id(leaf)] = Home(leaf, main.detach(), main.data_ptr(), True, main)
            return known
        if known is None or is_stale(known) or not fits(known.tensor, leaf):
            gradient, is_own = leaf.grad, leaf.grad is None
            if gradient is None:
                gradient = torch.zeros_like(leaf, memory_format=torch.preserve_format).detach()
            known = Home(leaf, gradient.detach(), gradient.data_ptr(), False, gradient, is_own)
            self._shared[id(leaf)] = known
        if leaf.grad is None:
            self._is_new.add(id(leaf))
            give_memory(known)
            known.tensor.zero_()
            show(known)
        elif leaf.grad is not known.shown:
            give_memory(known)
            known.tensor.copy_(leaf.grad)
            show(known)
        return known

    def of(self, leaf: Tensor) -> Tensor:
        """The gradient storage of a leaf that was added."""
        return self._homes[id(leaf)].tensor

    def forget(self) -> None:
        """Undo :meth:`add`: leaves that had no gradient have none again."""
        for home in self._homes.values():
            if id(home.leaf) in self._is_new and home.leaf.grad is home.shown:
                home.leaf.grad = None
        self._homes = {}
        self._is_new.clear()
        self._look = QuickLook(())

    @staticmethod
    def look_at_all(homes: Iterable[GradientHomes]) -> QuickLook:
        """A look at several of these at once, good as long as nothing is added to them."""
        return QuickLook({id(home.leaf): home for each in homes for home in each._homes.values()}.values())

    def settle(self) -> Guests:
        """Before a replay that accumulates: see :meth:`QuickLook.settle`."""
        return self._look.settle()

    def accumulate(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add gradients to the homes of these leaves, where they are."""
        pairs = [(self.of(leaf), g) for leaf, g in zip(leaves, gradients, strict=True) if g is not None]
        # One launch for all gradients of a dtype instead of one each; the arithmetic is that of `add_`.
        for dtypes in dict.fromkeys((home.dtype, gradient.dtype) for home, gradient in pairs):
            group = [pair for pair in pairs if (pair[0].dtype, pair[1].dtype) == dtypes]
            torch._foreach_add_([home for home, _ in group], [gradient for _, gradient in group])

    def accumulate_eagerly(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a leaf outside of any recording: to ``main_grad``, or to ``.grad`` as it is."""
        home = self._homes[id(leaf)]
        with torch.no_grad():
            if home.is_main_grad:
                home.tensor.add_(gradient)
            elif leaf.grad is None:
                leaf.grad = torch.empty_like(leaf, memory_format=torch.preserve_format).copy_(gradient)
            else:
                leaf.grad.add_(gradient)

    def hand_out(self, guests: Guests) -> None:
        """After a replay: give the gradients that stand for these homes what was accumulated."""
        for number, gradient in guests.items():
            home = self._homes.get(number)
            if home is not None:
                gradient.copy_(home.tensor)

    def hide_new(self) -> None:
        """After a capture: leaves that had no gradient have none until a backward gives them one."""
        for home in self._homes.values():
            if id(home.leaf) in self._is_new and home.leaf.grad is home.shown:
                home.leaf.grad = None
        self._is_new.clear()


class QuickLook:
    """Some gradients together: the common cases of settling them at the speed of C."""

    def __init__(self, homes: Iterable[Home]) -> None:
        self.homes = list(homes)
        self._addresses = [home.address for home in self.homes]
        self._inside = frozenset(self._addresses)
        self._main = [home for home in self.homes if home.is_main_grad]
        self._plain = [home for home in self.homes if not home.is_main_grad]
        self._main_leaves = [home.leaf for home in self._main]
        self._plain_leaves = [home.leaf for home in self._plain]
        self._plain_attributes = [leaf.__dict__ for leaf in self._plain_leaves]

    def settle(self) -> Guests:
        """See that every home holds what its ``.grad`` stands for.

        ``None`` means zero (``zero_grad(set_to_none=True)``), and the home is shown again. Another tensor that the loop
        has put there stays there: its values are copied in, and out again after the replay. A gradient that somebody
        has kept from before stays as it is: it gets memory of its own. Costs about 0.2 microseconds a parameter where
        the loop left ``.grad`` alone, and one launch for all that were set to ``None``.

        Returns:
            Those other tensors, by identity of the leaf.

        Raises:
            StaleAddressError: a gradient that the recording writes has moved where this class cannot follow.
            LifecycleError: a gradient is kept through another tensor over its memory, and would be overwritten.
        """
        guests: Guests = {}
        if self.all_at_home():
            return guests
        changed = []
        for home in self.homes:
            if is_stale(home):
                raise StaleAddressError(_how_it_moved(home), where="before a backward replay", fix=_FIX)
            gradient = home.leaf.grad
            if not home.is_main_grad and gradient is not home.shown:
                refuse_alias(home)
                # What lies in some home's memory is taken out before any home changes.
                is_inside = gradient is not None and gradient.data_ptr() in self._inside
                changed.append((home, gradient.clone() if is_inside and gradient is not None else gradient, is_inside))
        for home, gradient, is_inside in changed:
            if gradient is None or is_inside:
                show(home)
        to_zero = [home.tensor for home, gradient, _ in changed if gradient is None]
        if to_zero:
            torch._foreach_zero_(to_zero)
        for home, gradient, is_inside in changed:
            if gradient is not None:
                if not is_inside:
                    give_memory(home)
                home.tensor.copy_(gradient)
                if not is_inside:
                    guests[id(home.leaf)] = gradient
        return guests

    def has_hooks(self) -> bool:
        """True if one of the leaves has a hook on its gradient."""
        return any(map(_hooks_of, self._plain_leaves)) or any(map(_hooks_of, self._main_leaves))

    def all_at_home(self) -> bool:
        """True if no gradient has to be moved or refused."""
        return (
            all_same(list(map(_shown_of, self._plain)), map(_grad_of, self._plain_leaves))
            and all_same(list(map(_shown_of, self._main)), map(_main_grad_of, self._main_leaves))
            and not any(map(contains, self._plain_attributes, repeat("main_grad")))
            and list(map(_address_of, map(_shown_of, self.homes))) == self._addresses
        )


@contextmanager
def holders_counted(homes: Iterable[Home]) -> Iterator[None]:
    """Count what the body makes or drops that holds the memory of gradients as the session's own."""
    own = [home for home in homes if home.num_holders]
    counts = torch_private.HolderCount([home.tensor for home in own])
    before = counts.now()
    yield
    for home, earlier, later in zip(own, before, counts.now(), strict=True):
        home.num_holders += later - earlier


def fits(gradient: Tensor, leaf: Tensor) -> bool:
    """True if a tensor can be the gradient of a leaf."""
    return (gradient.shape, gradient.device) == (leaf.shape, leaf.device)


def is_stale(home: Home) -> bool:
    """True if the gradient is somewhere else by now, where it cannot be followed."""
    main = getattr(home.leaf, "main_grad", None)
    has_moved = home.shown.data_ptr() != home.address
    if home.is_main_grad:
        return has_moved or main is not home.shown
    return main is not None or (has_moved and home.leaf.grad is home.shown)


def refuse_alias(home: Home) -> None:
    """Raise a :class:`LifecycleError` if others hold the memory of a gradient than the loop gave it to."""
    if home.num_holders and sum(torch_private.HolderCount([home.tensor]).now()) > home.num_holders:
        raise LifecycleError(
            f"the gradient of a parameter of shape {tuple(home.leaf.shape)} is still kept through another tensor over "
            "its memory (detach(), .data or a view of .grad), which the next backward would overwrite",
            where="before a backward replay",
            fix="keep a clone of it, or the .grad tensor itself; give graphs that use the same gradients one session "
            "(session=...)",
        )


def show(home: Home) -> None:
    """Let ``.grad`` be the home, and not a tensor that somebody has kept."""
    give_memory(home)
    home.leaf.grad = home.shown


def give_memory(home: Home) -> None:
    """Give a gradient that somebody has kept memory of its own, so that the home can be written."""
    if home.shown.data_ptr() != home.address:
        home.shown = home.tensor.detach()  # The loop has given the old one other memory.
    elif sys.getrefcount(home.shown) > UNHELD:
        kept = home.shown
        home.shown = home.tensor.detach()
        with torch.no_grad():
            kept.data = kept.clone()


def _references_of_one_attribute() -> int:
    example: Any = object()
    home = Home(example, example, 0, False, cast(Tensor, object()))
    return sys.getrefcount(home.shown)


UNHELD: Final = _references_of_one_attribute()
"""What ``sys.getrefcount`` tells of a tensor that only its home refers to."""
_shown_of: Final = attrgetter("shown")
_address_of: Final = Tensor.data_ptr


def _main_grad_of(leaf: Tensor) -> Any:
    return getattr(leaf, "main_grad", None)


_grad_of: Final = attrgetter("grad")
_hooks_of: Final = attrgetter("_backward_hooks")

_FIX = (
    "keep the gradient tensors for the whole run and write into them, or drop the graphs (reset_cuda_graph(), or close "
    "and attach or build again) and let them be captured anew"
)


def _how_it_moved(home: Home) -> str:
    main = getattr(home.leaf, "main_grad", None)
    name = "main_grad" if home.is_main_grad or main is not None else "grad"
    what = f"{name} of a parameter of shape {tuple(home.leaf.shape)}"
    if home.is_main_grad and main is None:
        return f"{what} was removed"
    if not home.is_main_grad and main is not None:
        return f"{what} was not there at capture"
    if main is not None and main is not home.shown:
        return f"{what} was replaced by another tensor"
    return f"{what} moved: captured at {home.address:#x}, now at {home.shown.data_ptr():#x}"


def leaves_reached(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors that a backward pass from ``outputs`` would accumulate into, in a fixed order."""
    outputs = list(outputs)
    found: dict[int, Tensor] = {id(output): output for output in outputs if output.requires_grad and output.is_leaf}
    for node in nodes_behind(outputs):
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.setdefault(id(variable), variable)
    return list(found.values())


def reaches_outside(outputs: Iterable[Tensor], since: int | None) -> bool:
    """True if a backward pass from ``outputs`` runs on into what was computed before :func:`moment`."""
    if since is None:
        return False
    numbers = (torch_private.node_number(node) for node in nodes_behind(outputs))
    return any(number is not None and number <= since for number in numbers)


def moment() -> int | None:
    """The number of an autograd node made now; later ones of this thread have higher ones."""
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
    return torch_private.node_number(node)


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
