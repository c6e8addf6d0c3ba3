"""What a captured step does with gradients: adds to them, makes them anew, or drops them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Final

import torch
from torch import Tensor, nn

from graphstep.capture.adopted_gradients import AdoptedGradients
from graphstep.capture.gathered_gradients import GatheredGradients, GradientWatch
from graphstep.capture.gradient_branch import GradientBranch, LeafWork, LeafWorkWatch
from graphstep.capture.gradients import GradientHomes, Guests, Homes
from graphstep.capture.observe import Observation
from graphstep.engine import torch_private
from graphstep.engine.branch import Branch
from graphstep.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the gradient of a leaf was before a run, without keeping it alive."""

    leaf: Tensor
    gradient: weakref.ref[Tensor] | None = None
    storage_key: int = 0
    storage: torch_private.WeakStorage | None = None
    """Keeps the key from being another storage's."""

    @classmethod
    def of(cls, leaf: Tensor) -> Earlier:
        """As it is now."""
        gradient = leaf.grad
        if gradient is None:
            return cls(leaf)
        storage = torch_private.WeakStorage(gradient)
        return cls(leaf, weakref.ref(gradient), torch_private.storage_key(gradient), storage)

    def is_still_there(self) -> bool:
        """True if ``.grad`` is what it was."""
        now = self.leaf.grad
        if now is None or self.gradient is None:
            return now is None and self.gradient is None
        return now is self.gradient()


Before = list[Earlier]

_grad_of: Final = attrgetter("grad")


@dataclass(slots=True)
class _Kinds:
    """Which leaf has which kind of gradient; all others are added to where they are."""

    fresh: dict[int, Tensor] = field(default_factory=dict)
    """Dropped and made anew by the step (``zero_grad(set_to_none=True)`` in it), and there after it."""
    fresh_from_none: dict[int, Tensor] = field(default_factory=dict)
    """The same, but as far as is known only if there is none before the step."""
    dropped: dict[int, Tensor] = field(default_factory=dict)
    """Not there after the step, whatever was there before."""
    never_there: dict[int, Tensor] = field(default_factory=dict)
    """Neither there before the step nor after it."""
    was_none: dict[int, Tensor] = field(default_factory=dict)
    """There after the step and not before: made by it, or added to what stood for zero."""
    replaced: list[Tensor] = field(default_factory=list)
    """Used by the step, and then replaced by another tensor."""


class NotGatheredError(CaptureError):
    """The capture is to be made again, with each gradient added by itself."""


class StepGradients:
    """The gradients of one captured step, before, in and after its graph.

    A gradient that the step adds to lives at a fixed address outside of the graph's memory, see
    :class:`GradientHomes`. One that the step makes anew lives where the first graph of the session has made it, in
    memory that is not given to anything else; graphs captured later copy theirs there. Where the session has other
    graphs already, it lives outside of their memory too.

    Args:
        shared: of all recordings of a session.
        gathers: gradients that are added to are added many at a time, see :class:`GatheredGradients`.
        is_parallel: there is a branch for gradients, see :class:`GradientBranch`.
    """

    def __init__(self, shared: Homes, *, gathers: bool = False, is_parallel: bool = False) -> None:
        self._shared = shared
        self._gathers, self._is_parallel = gathers, is_parallel
        self._can_wait: dict[int, Tensor] = {}
        """Leaves whose gradients nothing has looked at before the end of a backward pass."""
        self._leaf_work: dict[int, LeafWork] = {}
        """What can go to a branch of the graph."""
        self._zeroes_beside = True
        self._homes = GradientHomes(shared)
        self._adopted = AdoptedGradients(shared)
        self._kinds = _Kinds()
        self._filled: list[Tensor] = []
        """Leaves whose gradient an eager run has added to or made."""
        self._known: set[int] = set()
        """Leaves that the eager run was watched for."""
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._aside: list[tuple[Tensor, Tensor]] = []
        """Leaves, each with a copy on the host of a gradient that no replay will read."""
        self._where = ""

    def again(self) -> StepGradients:
        """For another capture of the same step."""
        made = StepGradients(self._shared, gathers=self._gathers, is_parallel=self._is_parallel)
        made._kinds, made._filled, made._known = self._kinds, self._filled, self._known
        made._can_wait, made._leaf_work = self._can_wait, self._leaf_work
        made._zeroes_beside = self._zeroes_beside
        return made

    @property
    def wants_branch(self) -> bool:
        """True if there is to be a branch of the graph."""
        return self._is_parallel and self.are_filled()

    # ----- around an eager run

    @staticmethod
    def before(modules: Iterable[nn.Module], others: Iterable[Tensor]) -> Before:
        """The gradients of all parameters before an eager run that :meth:`learn` is told of."""
        own = (p for module in modules for p in module._parameters.values() if p is not None)
        found = {id(p): p for p in (*own, *others) if p.requires_grad}
        return [Earlier.of(p) for p in found.values()]

    @contextmanager
    def watching(self, before: Before) -> Iterator[None]:
        """Around that run: see which gradients can wait to be added to others."""
        leaves = [earlier.leaf for earlier in before]
        watch = GradientWatch(leaves) if self._gathers else None
        work = LeafWorkWatch(leaves) if self._is_parallel else None
        with ExitStack() as watches:
            if watch is not None:
                watches.enter_context(watch.watching())
            if work is not None:
                watches.enter_context(work.watching())
            yield
        self._can_wait = {} if watch is None else {id(leaf): leaf for leaf in watch.can_wait()}
        self._leaf_work = {} if work is None else work.found

    def learn(self, before: Before, observation: Observation) -> None:
        """Tell the kinds apart by what was there before and after an eager run, and by what it used."""
        used = observation.used()
        kinds = self._kinds = _Kinds()
        self._filled, self._known = [], {id(earlier.leaf) for earlier in before}
        for earlier in before:
            leaf, is_same = earlier.leaf, earlier.is_still_there()
            main = getattr(leaf, "main_grad", None)
            # Seen by what happened to it: what compiled code does with the leaf itself, no observer sees.
            if isinstance(main, Tensor):
                if torch_private.storage_key(main) in used:
                    self._filled.append(leaf)
                continue
            if leaf.grad is not None and (not is_same or torch_private.storage_key(leaf.grad) in used):
                self._filled.append(leaf)
            if is_same:
                if earlier.gradient is None:
                    kinds.never_there[id(leaf)] = leaf
            elif earlier.gradient is None:
                kinds.was_none[id(leaf)] = leaf
            elif earlier.storage_key in used:
                kinds.replaced.append(leaf)
            elif leaf.grad is None:
                kinds.dropped[id(leaf)] = leaf
            else:
                kinds.fresh[id(leaf)] = leaf

    def are_filled(self) -> bool:
        """True if the run that was learned from gave gradients to something."""
        return bool(self._filled or self._kinds.dropped or self._kinds.replaced)

    # ----- around a capture

    def ready(self, leaves: Iterable[Tensor], where: str, *, is_alone: bool = True) -> None:
        """Before a capture: have every gradient where the graph is to find it, or not there.

        Args:
            leaves: those that the step fills.
            where: for errors.
            is_alone: nothing else is captured that works in the same memory.

        Raises:
            CaptureError: the step uses gradients from before it, and then replaces them.
        """
        kinds, self._where = self._kinds, where
        if kinds.replaced:
            raise CaptureError(_REPLACED.format(len(kinds.replaced)), where=where, fix=_NOT_REPLACED)
        anew = self._made_anew() | kinds.dropped | kinds.never_there
        # Having a gradient is not to be given one: of those that were watched, what happened to them counts.
        others = (leaf for leaf in leaves if id(leaf) not in self._known)
        leaves = list({id(leaf): leaf for leaf in (*others, *self._filled)}.values())
        self._homes.add(leaf for leaf in leaves if id(leaf) not in anew)
        self._before = [(leaf, leaf.grad) for leaf in leaves if id(leaf) not in anew]
        for leaf in anew.values():
            # The graph will make it in memory of its own: there should not be two of each meanwhile.
            if leaf.grad is not None:
                self._aside.append((leaf, leaf.grad.to("cpu", copy=True)))
            leaf.grad = None
        if not is_alone:
            self._adopted.make_homes(self._made_anew().values())

    @contextmanager
    def gathered(self, branch: Branch | None) -> Iterator[None]:
        """In the captured function, around the step: add gradients together where they can wait.

        Args:
            branch: of the capture.
        """
        waiting = (leaf for leaf, gradient in self._before if gradient is not None and id(leaf) in self._can_wait)

        def may_take(leaf: Tensor) -> bool:
            return leaf.grad is None or gathered.takes(leaf)

        leaves = [leaf for leaf in waiting if not hasattr(leaf, "main_grad")]
        beside = None
        if branch is not None:
            may_zero = self._is_for(leaves) if self._zeroes_beside else _nothing
            beside = GradientBranch(branch, self._leaf_work, may_take, may_zero)
        gathered = GatheredGradients(leaves, branch=beside)
        with gathered.taken():
            yield
        if gathered.went_wrong:
            if beside is not None and beside.met_others:
                # Zeroes are pending for all of the forward: without, it may do.
                self._zeroes_beside, self._is_parallel = False, self._zeroes_beside
            else:
                self._can_wait, self._gathers, self._is_parallel = {}, False, False
            raise NotGatheredError("gradients cannot wait until the end of the backward pass", where=self._where)

    def _is_for(self, leaves: Iterable[Tensor]) -> Callable[[Tensor], bool]:
        """What tells whether memory is that of gradients of these leaves, and of no other's."""
        own = {id(leaf) for leaf in leaves}
        grads = [(leaf, gradient) for leaf, gradient in self._before if gradient is not None]
        shared = {torch_private.storage_key(gradient) for leaf, gradient in grads if id(leaf) not in own}
        keys = {torch_private.storage_key(gradient) for leaf, gradient in grads if id(leaf) in own} - shared

        def is_theirs(tensor: Tensor) -> bool:
            is_plain = type(tensor) is Tensor and torch_private.has_plain_memory(tensor)
            return is_plain and torch_private.storage_key(tensor) in keys

        return is_theirs

    def collect(self) -> None:
        """At the end of the captured function: bring the gradients that it made to where they live already."""
        made = [(self._adopted.standing(leaf), leaf.grad) for leaf in self._made_anew().values()]
        pairs = [(home, gradient) for home, gradient in made if home is not None and gradient is not None]
        if pairs:
            torch._foreach_copy_([home for home, _ in pairs], [gradient for _, gradient in pairs])

    def problem(self) -> CaptureError | None:
        """After a capture: what a replay could not do, although it was captured."""
        is_gone = [leaf for leaf in self._made_anew().values() if leaf.grad is None]
        is_there = [leaf for kind in (self._kinds.dropped, self._kinds.never_there) for leaf in kind.values()]
        is_there = [leaf for leaf in is_there if leaf.grad is not None]
        moved = [leaf for leaf, gradient in self._before if gradient is not None and leaf.grad is not gradient]
        number = len({id(leaf) for leaf in (*is_gone, *is_there, *moved)})
        fix = _NOT_REPLACED if self._known else _LET_IT_BE_SEEN
        return CaptureError(_REPLACED.format(number), where=self._where, fix=fix) if number else None

    def take_as_made_anew(self) -> bool:
        """After :meth:`problem`: whether gradients that there were none of before the step can be the reason.

        If so, they count as made by the step from now on, and the capture can be tried again.
        """
        kinds = self._kinds
        kinds.fresh_from_none, kinds.was_none = kinds.was_none, {}
        return bool(kinds.fresh_from_none)

    def keep(self) -> None:
        """After a capture that stays: note where the gradients are that its graph makes."""
        for leaf in self._made_anew().values():
            if leaf.grad is not None:
                self._adopted.adopt(leaf, leaf.grad)
        self._aside = []  # The replay that follows makes them.

    def put_back(self) -> None:
        """Give every leaf the gradient that it had before the capture, and none where the graph is to make it."""
        for leaf, gradient in self._before:
            if leaf.grad is not gradient:
                leaf.grad = gradient
        for leaf in (*self._made_anew().values(), *self._kinds.dropped.values(), *self._kinds.never_there.values()):
            leaf.grad = None
        for leaf, kept in self._aside:
            leaf.grad = kept.to(leaf.device)
        self._before, self._aside = [], []
        self._adopted.note_holders()

    def forget(self) -> None:
        """After a failed capture: leaves that had no gradient have none again."""
        self._homes.forget()
        self._adopted.forget_made()

    # ----- around a replay

    def why_not(self) -> str | None:
        """Why the graph would not do what the step does with the gradients that are there now, or None."""
        for kind in (self._kinds.never_there, self._kinds.fresh_from_none):
            if not all(map(is_, map(_grad_of, kind.values()), repeat(None))):
                return "a gradient was there before the step"
        return None

    def knows_too_little(self) -> bool:
        """True if no run was seen that began with the gradients that it made anew."""
        return bool(self._kinds.fresh_from_none)

    def settle(self) -> Guests:
        """Before a replay: see :meth:`GradientHomes.settle`."""
        self._adopted.let_go()
        return self._homes.settle()

    def hand_out(self, guests: Guests) -> None:
        """After a replay: let ``.grad`` be what eager execution would have left."""
        self._homes.hand_out(guests)
        self._adopted.show()
        dropped = self._kinds.dropped
        if not all(map(is_, map(_grad_of, dropped.values()), repeat(None))):
            for leaf in dropped.values():
                leaf.grad = None

    def _made_anew(self) -> dict[int, Tensor]:
        return self._kinds.fresh | self._kinds.fresh_from_none


def _nothing(_: Tensor) -> bool:
    return False


_REPLACED: Final = "the step replaces .grad of {} parameters; a graph writes gradients where they were"
_NOT_REPLACED: Final = (
    "zero gradients outside the step, at its start, or with set_to_none=False; let DistributedDataParallel, which "
    "moves them in its second step, warm up for at least 3 steps"
)
_LET_IT_BE_SEEN: Final = (
    "have at least one warmup step (cuda_graph_warmup_steps), in which it is seen what the step does with gradients; "
    "or zero gradients outside the step, or with set_to_none=False"
)
