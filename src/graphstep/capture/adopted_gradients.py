"""Gradients that a recording makes anew each time, shown as ``.grad`` where the recording has made them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Final

import torch
from torch import Tensor

from graphstep.capture.gradients import UNHELD, Home, Homes, fits, is_stale, refuse_alias, show
from graphstep.engine.torch_private import HolderCount

_grad_of: Final = attrgetter("grad")


class AdoptedGradients:
    """For a step that drops the gradients from before it: what it makes is kept in the memory where it was made.

    That memory belongs to the first recording of the session that makes the gradient. It is held from then on, so that
    it is not given to anything else, and later recordings copy their gradient there. Recordings that were there before
    may work in the same memory: beside them, a gradient gets a home outside, and is copied there. A gradient that
    somebody keeps from one step to the next gets memory of its own before it would be overwritten.

    Args:
        shared: of all recordings of a session.
    """

    def __init__(self, shared: Homes) -> None:
        self._shared = shared
        self._homes: list[Home] = []
        self._leaves: list[Tensor] = []
        self._shown: list[Tensor] = []
        self._made: list[Tensor] = []
        """Leaves that have got a home outside for the capture that is to come."""
        self._holders = HolderCount(())
        self._num_holders: list[int] = []
        self._unheld = _references_of_a_gradient()

    def standing(self, leaf: Tensor) -> Tensor | None:
        """Where the gradient of a leaf lives already, if anywhere."""
        home = self._shared.get(id(leaf))
        return home.tensor if home is not None and not is_stale(home) and fits(home.tensor, leaf) else None

    def make_homes(self, leaves: Iterable[Tensor]) -> None:
        """Before a capture beside earlier recordings: give gradients that live nowhere yet a home outside the pool."""
        for leaf in leaves:
            if self.standing(leaf) is None:
                with torch.no_grad():
                    made = torch.empty_like(leaf, memory_format=torch.preserve_format)
                self._shared[id(leaf)] = Home(leaf, made, made.data_ptr(), False, made.detach(), True)
                self._made.append(leaf)

    def forget_made(self) -> None:
        """After a capture that failed."""
        for leaf in self._made:
            self._shared.pop(id(leaf), None)
        self._made = []

    def adopt(self, leaf: Tensor, gradient: Tensor) -> None:
        """Keep the gradient that a recording makes for a leaf; if it lives elsewhere already, it stays there."""
        if self.standing(leaf) is None:
            made = gradient.detach()
            self._shared[id(leaf)] = Home(leaf, made, made.data_ptr(), False, made.detach(), True)
        self._homes.append(self._shared[id(leaf)])
        self._leaves.append(leaf)

    def note_holders(self) -> None:
        """Once captured, and nobody else holds the memory."""
        self._shown = [home.shown for home in self._homes]
        for home in self._homes:
            home.note_holders()
        self._holders = HolderCount([home.tensor for home in self._homes])
        self._num_holders = self._holders.now()

    def let_go(self) -> None:
        """Before a replay: give what others keep memory of its own. Costs about 0.2 microseconds a gradient.

        Raises:
            LifecycleError: a gradient is kept through another tensor over its memory, and would be overwritten.
        """
        kept = [
            home
            for home in self._homes
            # Two references are the home's and that of the list; leaf.grad may keep one to the Python object, too.
            if sys.getrefcount(home.shown) > (self._unheld if home.leaf.grad is home.shown else UNHELD + 1)
        ]
        if kept:
            self._shown = []
            for home in kept:
                show(home)
            self._shown = [home.shown for home in self._homes]
        if self._holders.now() != self._num_holders:
            for home in self._homes:
                refuse_alias(home)
            self._num_holders = self._holders.now()

    def show(self) -> None:
        """After a replay: let ``.grad`` of every leaf be what was made."""
        if all(map(is_, map(_grad_of, self._leaves), self._shown)) and not any(map(_has_moved, self._homes)):
            return
        self._shown = []
        for home in self._homes:
            if home.leaf.grad is not home.shown or _has_moved(home):
                show(home)
        self._shown = [home.shown for home in self._homes]


def _references_of_a_gradient() -> int:
    """What ``sys.getrefcount`` tells of a gradient that is shown and listed, and nowhere else."""
    leaf = torch.zeros(1, requires_grad=True)
    home = Home(leaf, leaf.detach(), 0, False, torch.zeros(1))
    leaf.grad = home.shown
    listed = [home.shown]
    number = sys.getrefcount(home.shown)
    listed.clear()
    return number


def _has_moved(home: Home) -> bool:
    return home.shown.data_ptr() != home.address
