"""Gradients that a backward pass gives to parameters, added many at a time: one launch instead of one a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.gradient_branch import CallsBy, GradientBranch, leaves_hooked
from graphstep.capture.memory_extents import Extent, Use, extent_of, is_only_a_view
from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.cuda_driver import capturing_node_count
from graphstep.engine.tape_ops import tensors_in

_LEAST_BYTES, _MOST_BYTES, _PART = 2**20, 32 * 2**20, 16
"""Gradients that wait: a sixteenth of all, but no more than a few large ones, as their memory is in use so long.

A gradient that is as large by itself is added by autograd: there is no launch to be saved.
"""


class GatheredGradients:
    """Adds gradients to where they live in groups, while a backward pass is captured.

    Autograd adds the gradient of each parameter as soon as it has it, in a launch of its own, that is in a node of the
    graph that the next one waits for. Here it is taken when autograd would add it, and added with others: at the end of
    the pass, or when those that wait are large. The arithmetic is that of autograd, with its order for each element.
    What else autograd does with a gradient is left to it: hooks of the user's own after it, sparse gradients, those of
    other types, and those that are themselves differentiated.

    Before an operation that writes what waits, or uses where it will be, it is added. A hook that a step registers on
    the node itself, and that does nothing with tensors, is given None.

    Args:
        leaves: those whose ``.grad`` nothing else looks at before the end of the pass, see :class:`GradientWatch`.
        branch: where to add them, beside the rest of the pass.
    """

    def __init__(self, leaves: Iterable[Tensor], *, branch: GradientBranch | None = None) -> None:
        self._branch = branch
        self._leaves = [leaf for leaf in leaves if leaf.grad is not None and _is_plain(leaf.grad)]
        self._homes = {id(leaf): leaf.grad for leaf in self._leaves if leaf.grad is not None}
        num_bytes = sum(home.nbytes for home in self._homes.values())
        self._limit = min(max(num_bytes // _PART, _LEAST_BYTES), _MOST_BYTES)
        self._waiting: dict[int, tuple[Tensor, Tensor, int]] = {}
        """By identity of the leaf: where the gradient lives, what is to be added, and the version of that."""
        self._num_bytes = 0
        self._uses: list[Use] = []
        """Of what waits: it reads the gradient, and writes where that lives."""
        self._num_nodes: int | None = 0
        self._is_adding = False
        self._open_passes: set[int] = set()
        """Those that have begun and not ended, as far as gradients wait for their end."""
        self._stream: torch.cuda.Stream | None = None
        self.went_wrong = False
        """A gradient that waited was overwritten, or a pass did not come to its end: eager execution is something else.

        Or others than operations of torch have worked while gradients waited, and may have met them. The capture is to
        be made again without this.
        """

    @contextmanager
    def taken(self) -> Iterator[None]:
        """In the body gradients are gathered. Backward passes that begin in it end in it."""
        device = next((leaf.device for leaf in self._leaves if leaf.is_cuda), None)
        self._stream = torch.cuda.current_stream(device) if device is not None else None
        with ExitStack() as around:
            around.enter_context(leaves_hooked(self._leaves, self._take))
            if self._leaves:
                around.enter_context(CallsBy(self._call))
            if self._branch is not None:
                around.enter_context(self._branch.beside())
            yield
        met_others = self._branch is not None and self._branch.met_others
        self.went_wrong = self.went_wrong or met_others or bool(self._open_passes or self._waiting)
        self._waiting.clear()
        self._uses.clear()

    def takes(self, leaf: Tensor) -> bool:
        """Whether what comes for a leaf now would be gathered."""
        return leaf.grad is not None and leaf.grad is self._homes.get(id(leaf))

    def _take(self, leaf: Tensor, gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
        """Before autograd adds: leave it nothing to add."""
        gradient, home, number = gradients[0], self._homes[id(leaf)], torch_private.backward_pass()
        if gradient is None:
            return None
        fits = _is_plain(gradient) and (gradient.dtype, gradient.device) == (home.dtype, home.device)
        is_here = self._stream is None or torch.cuda.current_stream(self._stream.device) == self._stream
        is_ours = leaf.grad is home and not leaf._post_accumulate_grad_hooks and not torch.is_grad_enabled()
        if id(leaf) in self._waiting:
            self._add()
        if not fits or not is_here or not is_ours or number is None or home.nbytes >= self._limit:
            return None
        self._look_for_others()
        self._waiting[id(leaf)] = (home, gradient, gradient._version)
        self._uses.append(Use([extent_of(gradient)], [extent_of(home)]))
        self._num_bytes += gradient.nbytes
        self._num_nodes = self._count_nodes()
        if number not in self._open_passes:
            self._open_passes.add(number)
            torch_private.after_backward_pass(partial(self._end, number))
        if self._num_bytes >= self._limit:
            self._add()
        return (None,)

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation, which has nothing to do with what waits, or comes after it."""
        if not self._uses or self._is_adding:
            return func(*args, **kwargs)
        self._look_for_others()
        if any(use.meets(func, args, kwargs) for use in self._uses):
            self._add()
            if self._branch is not None:
                self._branch.join()
        result = func(*args, **kwargs)
        self._num_nodes = self._count_nodes()
        return result

    def _count_nodes(self) -> int | None:
        if self._branch is not None:
            return self._branch.num_nodes()
        return 0 if self._stream is None else capturing_node_count(self._stream)

    def _look_for_others(self) -> None:
        """Kernels that no operation launches may use what waits."""
        if self._uses and not self.went_wrong:
            number = self._count_nodes()
            self.went_wrong = number is None or number != self._num_nodes

    def _end(self, number: int) -> None:
        self._open_passes.discard(number)
        stream = self._stream
        caller = torch.cuda.current_stream(stream.device) if stream is not None else None
        with torch.cuda.stream(stream) if stream != caller else nullcontext():
            self._add()
            if self._branch is not None:
                self._branch.join()
        if caller is not None and stream is not None and caller != stream:
            caller.wait_stream(stream)

    def _add(self) -> None:
        waiting = list(self._waiting.values())
        if not waiting:
            return
        self._look_for_others()
        moved = any(extent_of(home) != use.writes[0] for (home, _, _), use in zip(waiting, self._uses, strict=True))
        self._waiting, self._uses, self._num_bytes = {}, [], 0
        self.went_wrong = self.went_wrong or moved
        self.went_wrong = self.went_wrong or any(gradient._version != version for _, gradient, version in waiting)
        homes, gradients = [home for home, _, _ in waiting], [gradient for _, gradient, _ in waiting]
        self._is_adding, was_adding = True, self._is_adding
        try:
            if self._branch is None:
                _add_to(homes, gradients)
            else:
                self._branch.run(partial(_add_to, homes, gradients), reads=gradients, writes=homes)
        finally:
            self._is_adding = was_adding


class GradientWatch:
    """Sees in an eager run which gradients can wait until the end of the backward pass.

    Some are looked at before: a hook may read gradients, an optimizer may step, or a function may add to a gradient
    itself, all in the middle of a pass. And some are in memory that is not theirs: a function may write gradients of
    several layers to the same place, one after another. Memory is compared, not tensors: many gradients can be views
    of one buffer.

    Args:
        leaves: those to watch.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = [leaf for leaf in leaves if not leaf._post_accumulate_grad_hooks and leaf.requires_grad]
        self._seen: dict[int, Tensor] = {}
        self._left_out: set[int] = set()
        self._given: list[tuple[int, int, int]] = []
        """Begin, end and leaf of gradients that were given since the last operation outside of a pass."""
        self._come_in: dict[int, tuple[int, Extent, int]] = {}
        """By leaf: storage, place and version of what comes to the node that is to add it."""
        self._added: list[tuple[int, int, int, torch_private.WeakStorage]] = []
        """Begin, end and leaf of what was added, as long as its memory is there."""
        self._owners: dict[int, tuple[int, torch_private.WeakStorage]] = {}
        """By storage: the leaf that was given a gradient in it."""
        self._made: dict[int, torch_private.WeakStorage] = {}
        """Memory that was made since then, and has not been given to a leaf."""

    def can_wait(self) -> list[Tensor]:
        """The leaves that were given gradients of their own which nothing has looked at too early."""
        return [leaf for number, leaf in self._seen.items() if number not in self._left_out]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The body is the run."""
        each_call = _EachCall(self._note_hooks, self._look_at, self._note_made)
        with leaves_hooked(self._leaves, self._come, self._note), each_call:
            yield
        for kept in (self._given, self._made, self._come_in, self._added, self._owners):
            kept.clear()

    def _come(self, leaf: Tensor, gradients: tuple[Tensor | None, ...]) -> None:
        """A gradient is about to be added."""
        gradient = gradients[0]
        if gradient is None:
            return
        made = None
        if _is_plain(gradient):
            # Not the tensor: autograd looks at who holds that.
            key = torch_private.storage_key(gradient)
            self._come_in[id(leaf)] = key, extent_of(gradient), gradient._version
            made = self._made.pop(key, None)
            owner, storage = self._owners.get(key, (id(leaf), None))
            if storage is not None and not storage.is_gone():
                self._left_out.add(owner)  # Memory that is used for gradients again.
            self._owners[key] = id(leaf), torch_private.WeakStorage(gradient)
        if made is None or made.is_gone():
            self._left_out.add(id(leaf))

    def _note(self, leaf: Tensor, _: Any, given: tuple[Tensor | None, ...]) -> None:
        """It was added."""
        gradient = leaf.grad
        came, added = self._come_in.pop(id(leaf), None), given[0]
        if came is not None and added is not None and _is_plain(added):
            key = torch_private.storage_key(added)
            if (key, extent_of(added), added._version) != came:
                self._left_out.add(id(leaf))  # Hooks of that node change it.
            elif gradient is not None and _is_plain(gradient) and torch_private.storage_key(gradient) != key:
                self._added.append((*extent_of(added), id(leaf), torch_private.WeakStorage(added)))
        elif came is not None:
            self._left_out.add(id(leaf))
        self._seen[id(leaf)] = leaf
        if gradient is None or not _is_plain(gradient) or torch_private.backward_pass() is None:
            self._left_out.add(id(leaf))
        else:
            self._given.append((*extent_of(gradient), id(leaf)))

    def _note_hooks(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """What is done at the node of a leaf, and not with its gradient, is done by hooks of others on that node."""
        leaf = getattr(torch_private.current_node(), "variable", None)
        if leaf is None or is_only_a_view(func):
            return
        came = self._come_in.get(id(leaf))
        own = [extent_of(leaf.grad)] if leaf.grad is not None and _is_plain(leaf.grad) else []
        use = Use([*own, *([came[1]] if came is not None else [])], [])
        if came is None or not any(use.is_read(extent_of(t)) for t in tensors if torch_private.has_plain_memory(t)):
            self._left_out.add(id(leaf))

    def _look_at(self, tensor: Tensor) -> None:
        if torch_private.backward_pass() is None:  # Passes inside of a pass are a part of it.
            self._given.clear()
            self._made.clear()
            self._added.clear()
        if not (self._given or self._added) or not torch_private.has_plain_memory(tensor):
            return
        first, last = extent_of(tensor)
        self._added = [each for each in self._added if not each[3].is_gone()]
        self._left_out.update(number for begin, end, number, _ in self._added if first < end and begin < last)
        self._left_out.update(number for begin, end, number in self._given if first < end and begin < last)

    def _note_made(self, tensor: Tensor) -> None:
        if torch_private.has_plain_memory(tensor):
            self._made[torch_private.storage_key(tensor)] = torch_private.WeakStorage(tensor)


class _EachCall(DispatchMode):
    """Shows operations, the tensors that they are given, and those of their results that are in memory of their own."""

    def __init__(
        self,
        called: Callable[[Any, Sequence[Tensor]], None],
        given: Callable[[Tensor], None],
        made: Callable[[Tensor], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called, self._given, self._made = called, given, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_private.unwraps_itself(types):
            return NotImplemented
        tensors, known = list(tensors_in([*args, *kwargs.values()])), set()
        self._called(func, tensors)
        for tensor in tensors:
            self._given(tensor)
            if torch_private.has_plain_memory(tensor):
                known.add(torch_private.storage_key(tensor))
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if torch_private.has_plain_memory(tensor) and torch_private.storage_key(tensor) not in known:
                self._made(tensor)
        return result


@torch.no_grad()
def _add_to(homes: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Large ones too: a kernel for many takes few of the GPU's processors, and leaves the others to the pass."""
    together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for home, gradient in zip(homes, gradients, strict=True):
        left, right = together.setdefault(home.dtype, ([], []))
        left.append(home)
        right.append(gradient)
    for left, right in together.values():
        torch._foreach_add_(left, right)


def _is_plain(gradient: Tensor) -> bool:
    is_tensor = type(gradient) is Tensor and torch_private.has_plain_memory(gradient)
    return is_tensor and not (gradient.is_conj() or gradient.is_neg())
