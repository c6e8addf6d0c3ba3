"""Gradients that a backward pass gives to parameters, added many at a time: one launch instead of one a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.tape_ops import tensors_in

_LEAST_BYTES, _MOST_BYTES, _PART = 2**20, 32 * 2**20, 16
"""Gradients that wait: a sixteenth of all, but no more than a few large ones, as their memory is in use so long."""
_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class GatheredGradients:
    """Adds gradients to where they live in groups, while a backward pass is captured.

    Autograd adds the gradient of each parameter as soon as it has it, in a launch of its own, that is in a node of the
    graph that the next one waits for. Here it is taken when autograd would add it, and added with others: at the end of
    the pass, or when those that wait are large. The arithmetic is that of autograd, with its order for each element.
    What else autograd does with a gradient is left to it: hooks of the user's own, sparse gradients, those of other
    types, and those that are themselves differentiated.

    Args:
        leaves: those whose ``.grad`` nothing else looks at before the end of the pass, see :class:`GradientWatch`.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = [leaf for leaf in leaves if leaf.grad is not None and not has_hooks(leaf)]
        self._homes = {id(leaf): leaf.grad for leaf in self._leaves if leaf.grad is not None}
        num_bytes = sum(home.nbytes for home in self._homes.values())
        self._limit = min(max(num_bytes // _PART, _LEAST_BYTES), _MOST_BYTES)
        self._taken: set[int] = set()
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity of the leaf: where the gradient lives, and what is to be added."""
        self._num_bytes = 0
        self._passes: set[int | None] = set()
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """In the body gradients are gathered. Backward passes that begin in it end in it."""
        device = self._leaves[0].device if self._leaves else torch.device("cpu")
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        before: dict[int, Callable[[Tensor], None]] = {id(leaf): partial(self._take, leaf) for leaf in self._leaves}
        with hooked(self._leaves, before=before, after=self._keep):
            try:
                yield
                self._add()
            finally:
                for leaf in self._leaves:
                    if id(leaf) in self._taken:
                        leaf.grad = self._homes[id(leaf)]
                self._taken.clear()
                self._waiting.clear()

    def _take(self, leaf: Tensor, gradient: Tensor) -> None:
        """Before autograd adds: let it find nothing to add to, so that it leaves what it has."""
        home = self._homes[id(leaf)]
        is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
        fits = is_plain and (gradient.dtype, gradient.device) == (home.dtype, home.device)
        is_here = self._stream is None or torch.cuda.current_stream(self._stream.device) == self._stream
        if fits and is_here and leaf.grad is home and not torch.is_grad_enabled():
            leaf.grad = None
            self._taken.add(id(leaf))

    def _keep(self, leaf: Tensor) -> None:
        """After autograd has left it: show what was there before again."""
        if id(leaf) not in self._taken:
            return
        self._taken.discard(id(leaf))
        gradient, home = leaf.grad, self._homes[id(leaf)]
        leaf.grad = home
        if gradient is None:
            return
        if id(leaf) in self._waiting:
            self._add()
        self._waiting[id(leaf)] = (home, gradient)
        self._num_bytes += gradient.nbytes
        number = torch_private.backward_pass()
        if self._num_bytes >= self._limit or number is None:
            self._add()
        elif number not in self._passes:
            self._passes.add(number)
            torch_private.after_backward_pass(self._add)

    def _add(self) -> None:
        waiting, self._waiting, self._num_bytes = list(self._waiting.values()), {}, 0
        if not waiting:
            return
        stream = self._stream
        caller = torch.cuda.current_stream(stream.device) if stream is not None else None
        with torch.no_grad(), torch.cuda.stream(stream) if stream != caller else nullcontext():
            for dtype in dict.fromkeys(home.dtype for home, _ in waiting):
                group = [pair for pair in waiting if pair[0].dtype == dtype]
                torch._foreach_add_([home for home, _ in group], [gradient for _, gradient in group])
        if caller is not None and stream is not None and caller != stream:
            caller.wait_stream(stream)


class GradientWatch:
    """Sees in an eager run whose ``.grad`` is looked at between its last gradient and the end of the backward pass.

    A hook may read gradients, an optimizer may step, or a function may add to a gradient itself, all in the middle of a
    pass. Those gradients cannot wait. Memory is compared, not tensors: many gradients can be views of one buffer.

    Args:
        leaves: those to watch.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = [leaf for leaf in leaves if not has_hooks(leaf)]
        self._seen: dict[int, Tensor] = {}
        self._looked_at: set[int] = set()
        self._given: dict[int, list[tuple[int, int, int]]] = {}
        """By storage: begin, end and leaf of gradients that were given since the last operation outside of a pass."""

    def can_wait(self) -> list[Tensor]:
        """The leaves that were given gradients which nothing has looked at too early."""
        return [leaf for number, leaf in self._seen.items() if number not in self._looked_at]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The body is the run."""
        with hooked(self._leaves, after=self._note), _EachCall(self._look_at):
            yield
        self._given.clear()

    def _note(self, leaf: Tensor) -> None:
        gradient = leaf.grad
        self._seen[id(leaf)] = leaf
        if gradient is None or not torch_private.has_plain_memory(gradient) or torch_private.backward_pass() is None:
            self._looked_at.add(id(leaf))
            return
        begin, end = _extent(gradient)
        self._given.setdefault(torch_private.storage_key(gradient), []).append((begin, end, id(leaf)))

    def _look_at(self, tensor: Tensor) -> None:
        if self._given and torch_private.backward_pass() is None:
            self._given.clear()  # Passes inside of a pass are a part of it.
        if not self._given or not torch_private.has_plain_memory(tensor):
            return
        for begin, end, number in self._given.get(torch_private.storage_key(tensor), ()):
            first, last = _extent(tensor)
            if first < end and begin < last:
                self._looked_at.add(number)


class _EachCall(DispatchMode):
    """Shows the tensors that operations are given."""

    def __init__(self, show: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._show = show

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_private.unwraps_itself(types):
            return NotImplemented
        for value in (*args, *kwargs.values()):
            for tensor in tensors_in(value):
                self._show(tensor)
        return func(*args, **kwargs)


def has_hooks(leaf: Tensor) -> bool:
    """True if hooks of the user's own run before or after a gradient of this leaf is added."""
    return any(getattr(leaf, name, None) for name in _HOOKS)


@contextmanager
def hooked(
    leaves: Iterable[Tensor],
    *,
    after: Callable[[Tensor], None],
    before: dict[int, Callable[[Tensor], None]] | None = None,
) -> Iterator[None]:
    """Call these around each addition that autograd makes to a gradient in the body; leaves have no other hooks.

    Args:
        leaves: those to hook.
        after: takes the leaf.
        before: by identity of the leaf, what takes the gradient.
    """
    leaves = list(leaves)
    with ExitStack() as stack:
        for leaf in leaves:
            stack.callback(_forget_tables, leaf)
            if before is not None:
                stack.callback(leaf.register_hook(before[id(leaf)]).remove)
            stack.callback(leaf.register_post_accumulate_grad_hook(after).remove)
        yield


def _forget_tables(leaf: Tensor) -> None:
    """As it was: a leaf without hooks has no table of them."""
    for name in _HOOKS:
        if not getattr(leaf, name, None):
            setattr(leaf, name, None)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one behind its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
