"""What the compiled part offers. Types for the checker; nothing here runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Facts(Protocol):
    """What must be as it was for a replay to be right."""

    def entry(self, owner: dict[Any, Any], key: Any, value: Any, /) -> None:
        """The dict has this object there."""

    def slot(self, owner: Any, name: str, value: Any, /) -> None:
        """The attribute is this object."""

    def whole(self, owner: dict[Any, Any], values: tuple[Any, ...], /) -> None:
        """The dict has these objects and no others, in this order."""

    def elements(self, owner: Any, values: tuple[Any, ...], /) -> None:
        """The sequence has these objects and no others, in this order."""

    def size(self, owner: Any, number: int, /) -> None:
        """The container has so many entries."""

    def tensor(self, tensor: Tensor, address: int, requires_grad: int, has_no_hooks: bool, has_layout: bool, /) -> None:
        """The tensor lies there; it requires grad (1) or not (0) or either (-1); its sizes and strides are as now."""

    def answer(self, function: Callable[..., Any], arguments: tuple[Any, ...], expected: Any, /) -> None:
        """The function returns an equal of this."""

    def modes(self, tensor: Tensor, grad: bool, inference: bool, autocast: bool, dtype: Any, cache: bool, /) -> None:
        """Modes of the thread, autocast for the device of the tensor."""

    def hold(self) -> bool:
        """True if surely all of it is so."""


class Pattern(Protocol):
    """What the arguments of a call look like."""

    def flat(self, arguments: tuple[Any, ...], named: dict[str, Any], /) -> tuple[Tensor, ...] | None:
        """The tensors of a call that surely fits, each another one; ``None``: look closer."""


class Call(Protocol):
    """Stands where a captured layer is called."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the expected replay, or the fallback."""

    def drop(self) -> None:
        """End the forward pass that waits for it."""


class Relay(Protocol):
    """The steps of a chain."""

    def step(self, *described: Any) -> None:
        """Add a step: see ``relay_step`` in the source."""

    def home(self, home: Any, leaf: Tensor, address: int, is_main: bool, /) -> None:
        """Where a gradient lives that backward halves write; ``home.shown`` is the tensor that the loop sees."""

    def handover(self, place: int | str, output: int, /) -> None:
        """An argument of each step is this result of the one before."""

    def begin(
        self,
        run: Any,
        span: Any,
        versions: list[list[int]],
        handles: list[list[Tensor]],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        ambient: tuple[Any, ...],
        first: int,
        /,
    ) -> None:
        """Expect the step after ``first``, which has just run."""

    def landmarks(self, first: int, /) -> list[Tensor]:
        """Of each step from there on a parameter that its backward half gives a gradient, if autograd runs no hooks."""

    def results(self, first: int, /) -> tuple[Tensor, ...]:
        """Tensors over the outputs of each step from there on, without a history."""

    def backward(
        self, session: Any, grad_outputs: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...], /
    ) -> None:
        """All backward halves may be launched one after the other, where all of them are wanted.

        Args:
            session: has ``is_closed``, ``ahead`` and ``settle_ahead()``.
            grad_outputs: where the gradients of the last step's results are read.
            incoming: gradients that autograd is given: of the first step's inputs, then of parameters.
        """

    def replay(
        self,
        run: Any,
        stop: int,
        tensors: Sequence[Tensor],
        leaves: tuple[Tensor, ...],
        landmarks: list[Tensor],
        skipped: list[int],
        /,
    ) -> tuple[Tensor, ...]:
        """Results of ``run.forward(stop, tensors)``, with a history.

        Its backward launches all backward halves if surely nothing has changed, and else gives the gradients that
        ``run.replayed_backward(gradients, accumulates_all)`` returns for the leaves.

        Args:
            run: a :class:`ChainRun`.
            stop: for ``forward``.
            tensors: for ``forward``.
            leaves: tensors that want a gradient.
            landmarks: parameters whose gradients the backward halves accumulate: a backward pass towards them alone
                comes by here.
            skipped: positions of results without a gradient.
        """

    def launch_backward(self) -> None:
        """Launch them all, last first."""


class FastPath(Protocol):
    """The compiled module."""

    def Facts(self) -> Facts:  # noqa: N802
        """Without any."""

    def Pattern(self, arguments: tuple[Any, ...], named: tuple[Any, ...], /) -> Pattern:  # noqa: N802
        """Of trees: see ``read_shape`` in the source.

        Raises:
            TypeError: one of them is no such tree.
        """

    def Relay(self, lane: Any, /) -> Relay:  # noqa: N802
        """Without steps."""

    def Call(  # noqa: N802
        self, fallback: Callable[..., Any], resume: Callable[..., None], takes_first: bool, /
    ) -> Call:
        """Not expected yet."""
