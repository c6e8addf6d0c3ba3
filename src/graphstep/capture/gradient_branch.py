"""Products and sums whose results are gradients of parameters, on a branch of the captured backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from graphstep.capture.memory_extents import Use, extent_of, is_only_a_view
from graphstep.capture.optimizer_parts import parts_of
from graphstep.engine import torch_private
from graphstep.engine.branch import Branch
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.tape_ops import tensors_in

_aten: Final = torch.ops.aten
_OUT_VARIANTS: Final[Mapping[Any, Any]] = MappingProxyType(
    {_aten.mm.default: _aten.mm.out, _aten.sum.dim_IntList: _aten.sum.IntList_out}
)
"""What goes to the branch, and how it is called there: with memory of the first stream, which others give back to."""
_PRODUCTS: Final = frozenset({_aten.mm.default})
_ZEROING: Final = frozenset({_aten.zero_.default, _aten._foreach_zero_.default})
_MAKERS: Final = frozenset(
    {"AddmmBackward0", "MmBackward0", "AddBackward0", "SubBackward0", "MulBackward0", "ExpandBackward0"}
)
"""Nodes of autograd's own whose gradients are products and sums."""
_VIEWS: Final = frozenset({"TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0"})
_LONGEST_PATH: Final = 4


@dataclass(frozen=True, slots=True)
class LeafWork:
    """One call whose result was the gradient of a leaf, and nothing else."""

    leaf: Tensor
    operation: Any
    result: _Shape


@dataclass(frozen=True, slots=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class LeafWorkWatch:
    """Sees in an eager run which products and sums of its backward passes only serve the gradients of leaves.

    Args:
        leaves: those to look for.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._number = 0
        self._open: dict[int, tuple[int, torch_private.WeakStorage, Any, _Shape]] = {}
        """By storage: results that nothing has read."""
        self.found: dict[int, LeafWork] = {}
        """By the number of the call among those of its kind."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The body is the run."""
        with leaves_hooked(self._leaves, self._come), CallsBy(self._call):
            yield
        self._open.clear()

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not is_only_a_view(func):
            for tensor in tensors_in([*args, *kwargs.values()]):
                if torch_private.has_plain_memory(tensor):
                    self._open.pop(torch_private.storage_key(tensor), None)
        result = func(*args, **kwargs)
        if is_candidate(func):
            number, self._number = self._number, self._number + 1
            if type(result) is Tensor and torch_private.has_plain_memory(result):
                shape = _Shape(tuple(result.size()), result.stride(), result.dtype)
                self._open[torch_private.storage_key(result)] = number, torch_private.WeakStorage(result), func, shape
        return result

    def _come(self, leaf: Tensor, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is None or type(gradient) is not Tensor or not torch_private.has_plain_memory(gradient):
            return
        made = self._open.pop(torch_private.storage_key(gradient), None)
        if made is not None and not made[1].is_gone():
            number, _, func, shape = made
            self.found[number] = LeafWork(leaf, func, shape)


class GradientBranch:
    """Puts such work on a branch while a backward pass is captured.

    What the branch does is after all that was issued before it. What is issued meanwhile is looked at: before an
    operation that would read what the branch writes, or write what the branch works with, the branch is joined. So it
    is at the end of the pass. Kernels that come with no operation of torch, as those of Triton do, cannot be looked at:
    one that is launched while something is pending shows in the number of nodes, and :attr:`met_others` tells of it.
    The arithmetic is the same.

    Args:
        branch: of the capture.
        work: as :class:`LeafWorkWatch` has found it.
        may_take: whether the gradient of a leaf may come later than it would.
        may_zero: whether some memory has nothing but gradients that only autograd adds to, so that it can be zeroed on
            the branch as well, until the next backward pass begins.
    """

    def __init__(
        self,
        branch: Branch,
        work: Mapping[int, LeafWork],
        may_take: Callable[[Tensor], bool],
        may_zero: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        self._branch, self._work, self._may_take, self._may_zero = branch, work, may_take, may_zero
        self._is_zeroing = False
        self._number = 0
        self._uses: list[Use] = []
        """Of what is pending, the latest last."""
        self._kept: list[list[tuple[torch.UntypedStorage, int]]] = []
        """Its memory, and the size that it had."""
        self._open_passes: set[int] = set()
        self._is_own = False
        self._num_nodes: int | None = None
        """Of the captured graph, when it was last looked at with something pending."""
        self.met_others = False
        """Kernels were launched beside the branch that may have met it: the capture is to be made again without."""
        self.num_taken = 0
        """Calls that went to the branch."""

    @contextmanager
    def beside(self) -> Iterator[None]:
        """In the body backward passes use the branch. Those that begin in it end in it."""
        try:
            with CallsBy(self._call):
                yield
        except BaseException:
            with suppress(RuntimeError):  # So that the capture can be ended. It may have failed already.
                self.join()
            raise
        self.join()

    def num_nodes(self) -> int | None:
        """Nodes of the captured graph so far."""
        return self._branch.num_nodes()

    def run(self, work: Callable[[], None], *, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Do work on the branch: in a backward pass, after all that was issued."""
        number = torch_private.backward_pass()
        if number is not None and number not in self._open_passes:
            self._open_passes.add(number)
            torch_private.after_backward_pass(partial(self._end, number))
        self._look_for_others()
        use = Use([extent_of(tensor) for tensor in reads], [extent_of(tensor) for tensor in writes])
        # Storages, and not what is written itself: autograd looks at who holds that. Tensors can be given other memory.
        storages = [tensor.untyped_storage() for tensor in (*reads, *writes)]
        self._is_own, was_own = True, self._is_own
        try:
            self._branch.run(work, (*reads, *storages))
        finally:
            self._is_own = was_own
        self._uses = [*self._uses, use][-self._branch.num_pending :]
        self._kept = [*self._kept, [(s, s.nbytes()) for s in storages]][-self._branch.num_pending :]
        self._num_nodes = self._branch.num_nodes()

    def join(self) -> None:
        """What is issued next waits for the branch."""
        self._look_for_others()
        self._branch.join()
        self._uses, self._kept, self._is_zeroing = [], [], False

    def _look_for_others(self) -> None:
        if self._uses and not self.met_others:
            number = self._branch.num_nodes()
            is_resized = any(storage.nbytes() != size for kept in self._kept for storage, size in kept)
            # None: the driver does not tell.
            self.met_others = number is None or number != self._num_nodes or is_resized

    def _end(self, number: int) -> None:
        self._open_passes.discard(number)
        self.join()

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._is_own:
            return func(*args, **kwargs)
        self._look_for_others()
        if not self._branch.is_here:
            self.met_others = True  # Another stream knows nothing of what is forked and joined here.
        result = self._called(func, args, kwargs)
        if self._uses:
            self._num_nodes = self._branch.num_nodes()
        return result

    def _called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_candidate(func):
            number, self._number = self._number, self._number + 1
            work = self._work.get(number)
            if work is not None and self._fits(work, func, args):
                return self._beside(work, func, args, kwargs)
        is_in_pass = torch_private.backward_pass() is not None
        if is_in_pass and self._is_zeroing and not is_only_a_view(func):
            self.join()
        if any(use.meets(func, args, kwargs) for use in self._uses):
            self.join()
        if not is_in_pass and self._branch.is_here:
            if func in _ZEROING and not kwargs and all(map(self._may_zero, tensors_in(list(args)))):
                self._is_zeroing = True
                self.run(partial(func, *args), reads=(), writes=list(tensors_in(list(args))))
                return args[0] if func._schema.returns else None
            parts = parts_of(func, args, self._branch.width)
            if len(parts) > 1:
                self._branch.spread([partial(func, *part, **kwargs) for part in parts])
                return None
        return func(*args, **kwargs)

    def _fits(self, work: LeafWork, func: Any, args: Sequence[Any]) -> bool:
        leaf, node = work.leaf, torch_private.current_node()
        is_known = func is work.operation and node is not None and type(node).__name__ in _MAKERS
        if not is_known or _size_of(func, args) != work.result.size or args[0].dtype != work.result.dtype:
            return False  # Another call than the one that was seen in its place.
        tensors = list(tensors_in(list(args)))
        is_plain = all(_is_plain(t) and t.device == leaf.device for t in tensors)
        is_quiet = not leaf._backward_hooks and not torch_private.post_accumulate_hooks(leaf)
        is_here = self._branch.is_here and (func not in _PRODUCTS or self._branch.may_multiply)
        return is_plain and is_quiet and is_here and self._may_take(leaf) and _leads_to(node, leaf)

    def _beside(self, work: LeafWork, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        self.num_taken += 1
        reads = list(tensors_in(list(args)))
        if self._uses and any(use.is_written(extent_of(tensor)) for use in self._uses for tensor in reads):
            self.join()  # Work of the branch is in order itself; this is for what it holds.
        shape = work.result
        result = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=reads[0].device)
        self.run(partial(_OUT_VARIANTS[func], *args, **kwargs, out=result), reads=reads, writes=[result])
        return result


class CallsBy(DispatchMode):
    """Lets somebody make the calls of all operations."""

    def __init__(self, call: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch_private.unwraps_itself(types):
            return NotImplemented
        return self._call(func, args, kwargs or {})


def is_candidate(func: Any) -> bool:
    """Is this a call that may go to the branch, here: in a backward pass that is not differentiated itself?"""
    is_one = func in _OUT_VARIANTS and not torch.is_grad_enabled()
    return is_one and torch_private.backward_pass() is not None


Given = tuple[Tensor | None, ...]
"""What a node is given: for a leaf, one gradient."""


@contextmanager
def leaves_hooked(
    leaves: Iterable[Tensor],
    before: Callable[[Tensor, Given], Given | None],
    after: Callable[[Tensor, Given, Given], None] | None = None,
) -> Iterator[None]:
    """In the body a gradient that comes to a leaf is shown before and after it is added.

    Args:
        leaves: those that want gradients.
        before: is given the leaf and its gradient; may return another.
        after: is given the leaf, nothing, and what was added.
    """
    # Held: a leaf does not keep the node that adds its gradients, and another one would have no hooks.
    nodes = _nodes_of(leaves)
    with ExitStack() as hooks:
        for leaf, node in nodes:
            hooks.callback(node.register_prehook(partial(before, leaf)).remove)
            if after is not None:
                hooks.callback(node.register_hook(partial(after, leaf)).remove)
        yield


def _nodes_of(leaves: Iterable[Tensor]) -> list[tuple[Tensor, Node]]:
    """What adds gradients to these leaves. In inference mode there is no such thing, and nothing to add."""
    return (
        []
        if torch.is_inference_mode_enabled()
        else [(leaf, get_gradient_edge(leaf).node) for leaf in leaves if leaf.requires_grad]
    )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and torch_private.has_plain_memory(tensor) and not tensor.is_conj()


def _leads_to(node: Any, leaf: Tensor) -> bool:
    """Whether a gradient of this node goes to a leaf, through views at most, so that nobody else sees it."""
    return any(getattr(_past_views(following), "variable", None) is leaf for following, _ in node.next_functions)


def _size_of(func: Any, args: Sequence[Any]) -> tuple[int, ...] | None:
    """The size of what a call returns."""
    if func is _aten.mm.default:
        return args[0].size(0), args[1].size(1)
    size, given = list(args[0].size()), args[1]
    if given is None or not size:
        return None
    dims = {dim % len(size) for dim in given} or set(range(len(size)))
    has_all = len(args) > 2 and bool(args[2])
    return tuple(1 if dim in dims else n for dim, n in enumerate(size) if has_all or dim not in dims)


def _past_views(node: Any) -> Any:
    for _ in range(_LONGEST_PATH):
        if node is None or type(node).__name__ not in _VIEWS:
            break
        node = node.next_functions[0][0]
    return node
