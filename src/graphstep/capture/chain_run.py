"""Replays of graph pairs that follow each other: forward halves call by call, backward halves together.

Autograd sees one node for all of them. Its outputs are the results of every pair, made when the first pair is called
and handed out as the other calls come; a call that is not the expected one ends the run, and what was handed out stays
right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphstep.capture.gradients import GradientHomes, QuickLook
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.lanes import Lane, Span
from graphstep.engine import torch_private
from graphstep.errors import LifecycleError

Place = int | str
"""An argument of a call: its position or its keyword."""
Handover = tuple[tuple[Place, int], ...]
"""Which arguments of a call are which outputs of the call before."""


class Receiver(Protocol):
    """Where a region is called: finds there what to do at the next call."""

    pending: Pending | None


@dataclass(slots=True, eq=False)
class Chain:
    """Pairs of one slot, each of which takes the results of the one before.

    All other arguments are the same objects for all of them, and their static copies are shared.
    """

    pairs: tuple[GraphPair, ...]
    receivers: tuple[Receiver, ...]
    slot: int
    lane: Lane
    handover: Handover
    """The same between all of them."""
    anchor: Tensor
    """A leaf of every run, so that there is a backward at all, and to see which kind of pass it is."""

    @property
    def shares_copies(self) -> bool:
        """True if a copied argument is read by several pairs."""
        first = self.pairs[0]
        num_static = len(first.inputs) - len(first.in_place) - len(self.handover)
        return len(self.pairs) > 1 and num_static > 0

    _look: QuickLook | None = None

    def settle(self, pairs: Sequence[GraphPair]) -> None:
        """Before backward halves of these: see that gradients are where they were captured.

        Raises:
            StaleAddressError: one has moved.
        """
        if len(pairs) == len(self.pairs):
            if self._look is None:
                self._look = GradientHomes.look_at_all(pair.homes for pair in self.pairs)
            self._look.settle()
            return
        for pair in pairs:
            pair.homes.settle()

    def graph_at(self, index: int) -> tuple[GraphPair, ...]:
        """The pairs whose forward halves are launched together with that of ``index``, itself first."""
        stop = index + 1
        while stop < len(self.pairs) and self.pairs[stop].forward is None:
            stop += 1
        return self.pairs[index:stop]

    def limit(self, first: int) -> int:
        """Up to which pair, not included, a run that begins at ``first`` may go."""
        stop = first + len(self.graph_at(first))
        while stop < len(self.pairs):
            graph = self.graph_at(stop)
            if any(pair.num_in_flight or pair.is_held() for pair in graph):
                break
            stop += len(graph)
        return stop


class ChainRun:
    """One pass through a chain, or through a part of it, until its backward has run or its results are dropped.

    Args:
        chain: what to run.
        first: index of the first pair.
        on_close: called once when the run is over.
        before_backward: called before the backward halves run; refuses them by an error.
    """

    def __init__(
        self, chain: Chain, first: int, on_close: Callable[[], None], before_backward: Callable[[], None] | None = None
    ) -> None:
        self.chain = chain
        self._before_backward = before_backward
        self.first = first
        self.latest = first
        """Index of the last pair whose forward has run."""
        self.span = Span()
        self._on_close = on_close
        self._versions: list[list[int]] = []
        """Of the results handed out, to see whether somebody wrote into them."""
        self._is_open = False
        self._has_run = False

    def start(
        self, tensors: Sequence[Tensor], arguments: tuple[Any, ...], named: dict[str, Any], ambient: tuple[Any, ...]
    ) -> Any:
        """Run the forward half of the first pair.

        Args:
            tensors: the flat arguments of a call with the captured signature.
            arguments: the call's arguments, which the next ones are compared with.
            named: those given by keyword.
            ambient: the modes around the call.

        Returns:
            The captured function's result over the static outputs: valid until the next replay of this pair, which
            the caller does not start as long as :meth:`GraphPair.is_held` says that the result is still in use.
        """
        chain, first = self.chain, self.first
        pair = chain.pairs[first]
        stop = chain.limit(first)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        exposed = pair.exposed
        self._is_open = True
        chain.lane.enter(self.span)
        flat: tuple[Tensor, ...] = Replay.apply(self, stop, tensors, *wanted, *exposed, chain.anchor)  # type: ignore[no-untyped-call]
        self._note(first, pair)
        handles: list[list[Tensor]] = []
        position = 0
        for each in chain.pairs[first:stop]:
            handles.append(list(flat[position : position + len(each.outputs)]))
            position += len(each.outputs)
        result = pair.result_of(handles[0])
        if stop > first + 1:
            Pending(self, handles, arguments, named, ambient).arm()
        return result

    def advance(self) -> None:
        """Run the forward half of the next pair."""
        index = self.latest + 1
        pair = self.chain.pairs[index]
        pair.launch_forward()
        self._note(index, pair)

    def _note(self, index: int, pair: GraphPair) -> None:
        self.latest = index
        self._versions.append(pair.versions())
        self.span.forward_position, self.span.backward_position = pair.forward_position, pair.backward_position
        pair.num_in_flight += 1
        pair.num_replays += 1
        pair.stats.num_replays += 1

    def forward(self, stop: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Load the arguments, run the first forward half, and give a tensor for every result up to ``stop``."""
        pairs = self.chain.pairs[self.first : stop]
        pairs[0].load_inputs(tensors)
        pairs[0].launch_forward()
        return tuple(output.detach() for pair in pairs for output in pair.outputs)

    def not_differentiable(self, stop: int) -> list[int]:
        """Positions, among the results of :meth:`forward`, of those without a gradient."""
        flags = [wanted for pair in self.chain.pairs[self.first : stop] for wanted in pair.differentiable]
        return [position for position, wanted in enumerate(flags) if not wanted]

    def check_backward(self, node: Any) -> None:
        """Refuse a backward that the recordings cannot give.

        Raises:
            LifecycleError: it has run before, or only gradients of chosen tensors are wanted.
        """
        pairs = self._done()
        where = pairs[-1].region.name
        if self._has_run:
            raise LifecycleError(
                "the backward of this call has run already, and the memory of its forward is used again",
                where=where,
                fix="add up the losses and call backward once, or leave this module out of the captured ones",
            )
        if any(pair.accumulates for pair in pairs) and not torch_private.will_accumulate(node):
            raise LifecycleError(
                "gradients of chosen tensors were asked for (autograd.grad, or backward with inputs=...); the captured "
                "backward would also add to the gradients of its parameters",
                where=where,
                fix="call backward() and read .grad of the tensors, or leave this module out of the captured ones",
            )

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward halves of what has run forward, last first.

        Args:
            gradients: of all results, in the order of :meth:`forward`.

        Returns:
            Gradients of the first pair's inputs that want one, then of the parameters that autograd accumulates for.

        Raises:
            LifecycleError: a graph of several layers was used in part, or a result was changed in place.
            StaleAddressError: a gradient has moved.
        """
        if self._before_backward is not None:
            self._before_backward()
        pairs = self._done()
        given: list[list[Tensor | None]] = []
        position = 0
        for index, pair in enumerate(pairs):
            self._check(index, pair)
            given.append(list(gradients[position : position + len(pair.outputs)]))
            position += len(pair.outputs)
        graphs = _by_graph(pairs)
        slices = [given[pairs.index(graph[0]) : pairs.index(graph[-1]) + 1] for graph in graphs]
        for graph, found in zip(graphs, slices, strict=True):
            if _is_partial(graph, found) and not all(pair.is_pure for pair in graph):
                raise LifecycleError(
                    "a result inside a graph of several layers was used by itself, and they cannot be computed again",
                    where=graph[-1].region.name,
                    fix="launch each layer by itself: --cuda-graph-merge-layers 1 (merge_layers=1)",
                )
        self.chain.settle(pairs)
        self._has_run = True
        is_chained = False
        incoming: list[Tensor | None] = []
        for index in reversed(range(len(graphs))):
            graph, found = graphs[index], slices[index]
            if _is_partial(graph, found):
                incoming = _recomputed(graph, found, is_chained=is_chained)
                if index:
                    _hand_over(incoming, graph[0], slices[index - 1][-1])
                is_chained = False
                continue
            graph[-1].load_output_gradients(found[-1], is_chained=is_chained)
            for pair in reversed(graph):
                pair.launch_backward()
            is_chained = True
        first = pairs[0]
        results = [g for g, tensor in zip(first.grad_inputs, first.inputs, strict=True) if tensor.requires_grad]
        if not is_chained:
            results = [g for g, tensor in zip(incoming, first.inputs, strict=True) if tensor.requires_grad]
        # Whoever receives a gradient may keep it, and the static one is overwritten by the next backward half.
        results = [None if g is None else g.clone() for g in (*results, *first.exposed_gradients)]
        self.close()
        for pair in pairs:
            pair.poison_dead()
        return results

    def _check(self, index: int, pair: GraphPair) -> None:
        if pair.has_new_hook():
            raise LifecycleError(
                "a parameter got a hook on its gradient between the forward and the backward; the captured backward "
                "does not run it",
                where=pair.region.name,
                fix="register hooks before the forward",
            )
        if pair.spoilt(self._versions[index], is_read_by_next=index + 1 < len(self._versions)):
            raise LifecycleError(
                "a result was changed in place, and the backward needs it as it was",
                where=pair.region.name,
                fix="use an operation that makes a new tensor, such as x + y instead of x.add_(y)",
            )

    def _done(self) -> tuple[GraphPair, ...]:
        return self.chain.pairs[self.first : self.latest + 1]

    def close(self) -> None:
        """Give the slots back. May be called twice."""
        if self._is_open:
            self._is_open = False
            for pair in self._done()[: len(self._versions)]:
                pair.num_in_flight -= 1
            self.chain.lane.leave(self.span)
            self._on_close()

    def __del__(self) -> None:
        self.close()


class Pending:
    """What the next call of a run has to look like, and the results for it and those after it.

    It lives where that call is expected. It goes when the call comes, or when the tensor that the call would be given
    is gone.
    """

    def __init__(
        self,
        run: ChainRun,
        handles: list[list[Tensor]],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        ambient: tuple[Any, ...],
    ) -> None:
        self._run: ChainRun | None = run
        self._handles = handles
        self._next = 0
        self._places = run.chain.handover
        carried = {place for place, _ in self._places}
        self._arguments = [(k, value) for k, value in enumerate(arguments) if k not in carried]
        self._named = [(k, value) for k, value in named.items() if k not in carried]
        self._sizes = len(arguments), len(named)
        others = [value for _, value in (*self._arguments, *self._named) if isinstance(value, Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in others]
        self.ambient = ambient
        """The modes around the calls of the run."""
        self.pair = run.chain.pairs[run.first]
        """The pair that is called next."""
        self.training: tuple[bool, ...] = ()
        """Training flags at the capture of the next call."""
        self._expected: list[tuple[Place, weakref.ref[Tensor], int]] = []
        self._receiver: Receiver | None = None

    def arm(self) -> None:
        """Wait for the next call."""
        assert self._run is not None
        results = self._handles[self._next]
        self._expected = [
            (place, weakref.ref(results[output], self._gone), results[output]._version)
            for place, output in self._places
        ]
        self._handles[self._next] = []
        self._next += 1
        index = self._run.latest + 1
        self.pair = self._run.chain.pairs[index]
        self.training = self.pair.signature.training
        self._receiver = self._run.chain.receivers[index]
        self._receiver.pending = self

    def matches(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """True if a call with these arguments is the next one of the run."""
        run = self._run
        if run is None or run.chain.lane.latest is not run.span or (len(arguments), len(named)) != self._sizes:
            return False
        for place, expected, version in self._expected:
            result = expected()
            given: object = arguments[place] if isinstance(place, int) else named.get(place)
            if result is None or result is not given or result._version != version:
                return False
            if result._backward_hooks or result.retains_grad:
                return False  # Somebody wants to see the gradient that passes here.
        return (
            all(arguments[place] is value for place, value in self._arguments)
            and all(named.get(place, self) is value for place, value in self._named)
            and all(tensor._version == version for tensor, version in self._versions)
        )

    def advance(self) -> Any:
        """Run the next pair and give its result."""
        run = self._run
        assert run is not None
        run.advance()
        pair = run.chain.pairs[run.latest]
        results = self._handles[self._next]
        result = pair.result_of(results)
        if self._next + 1 < len(self._handles):
            self.arm()
        else:
            self.drop()
        return result

    def drop(self) -> None:
        """Expect nothing any more and let go of the results that were not asked for."""
        if self._receiver is not None and self._receiver.pending is self:
            self._receiver.pending = None
        self._run = None
        self._handles, self._expected, self._versions = [], [], []
        self._arguments, self._named = [], []

    def _gone(self, _reference: Any) -> None:
        self.drop()


def _by_graph(pairs: Sequence[GraphPair]) -> list[list[GraphPair]]:
    """Those that are launched together, together."""
    found: list[list[GraphPair]] = []
    for pair in pairs:
        if pair.forward is not None:
            found.append([])
        found[-1].append(pair)
    return found


def _is_partial(graph: Sequence[GraphPair], given: Sequence[Sequence[Tensor | None]]) -> bool:
    """True if not all of a graph of several pairs has been called, or a result inside of it has another use."""
    inside = [gradient for gradients in given[: len(graph) - 1] for gradient in gradients]
    return len(graph) > 0 and (graph[-1].backward is None or any(gradient is not None for gradient in inside))


def _recomputed(
    graph: Sequence[GraphPair], given: Sequence[Sequence[Tensor | None]], *, is_chained: bool
) -> list[Tensor | None]:
    """Run some pairs of a graph again, eagerly, with their backward; returns gradients of the first one's inputs."""
    if is_chained:
        graph[-1].load_output_gradients(given[-1], is_chained=True)
        given = [*given[:-1], graph[-1].grad_outputs]
    first = graph[0]
    roots: list[Tensor] = []
    gradients: list[Tensor] = []
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in first.inputs]
        outputs: list[Tensor] = []
        for pair, found in zip(graph, given, strict=True):
            arguments = list(inputs) if pair is first else list(pair.inputs)
            for position, (_, output) in pair.chained.items() if pair is not first else ():
                arguments[position] = outputs[output]
            outputs = pair.recompute(arguments)
            used = [(o, g) for o, g in zip(outputs, found, strict=True) if g is not None and o.requires_grad]
            roots += [output for output, _ in used]
            gradients += [gradient for _, gradient in used]
        torch.autograd.backward(roots, gradients)
    return [tensor.grad for tensor in inputs]


def _hand_over(incoming: Sequence[Tensor | None], pair: GraphPair, given: list[Tensor | None]) -> None:
    """Add gradients of a pair's inputs to those of the results of the pair before."""
    for position, (_, output) in pair.chained.items():
        gradient, before = incoming[position], given[output]
        if gradient is not None:
            given[output] = gradient if before is None else before + gradient


class Replay(torch.autograd.Function):
    """Stands for a run: forward of its first pair now, backward halves of all when their turn comes.

    Inputs: the run, up to which pair it may go, the flat arguments; those of them that want a gradient, the parameters
    whose gradients autograd accumulates, and the chain's anchor.
    """

    @staticmethod
    def forward(ctx: Any, run: ChainRun, stop: int, tensors: Sequence[Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward half on these arguments."""
        ctx.set_materialize_grads(False)
        ctx.run = run
        outputs = run.forward(stop, tensors)
        ctx.mark_non_differentiable(*(outputs[position] for position in run.not_differentiable(stop)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay the backward halves, once, if they can give what is asked for."""
        ctx.run.check_backward(ctx.next_functions[-1][0])
        return (None, None, None, *ctx.run.backward(gradients), None)
