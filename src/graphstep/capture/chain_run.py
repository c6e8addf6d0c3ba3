"""Replays of graph pairs that follow each other: forward halves call by call, backward halves together.

Autograd sees one node for all of them. Its outputs are the results of every pair, made when the first pair is called
and handed out as the other calls come; a call that is not the expected one ends the run, and what was handed out stays
right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.capture.backward_refusals import (
    refuse_frozen,
    refuse_if_partial,
    refuse_if_spoilt,
    refuse_new_hooks,
    refuse_second_derivatives,
)
from graphstep.capture.chain import Chain
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.kept_state import KeptState
from graphstep.capture.lanes import Span
from graphstep.capture.merged_backward import by_graph, handed_over, is_partial, recomputed, refuse_other_state
from graphstep.capture.pending import Pending
from graphstep.capture.read_ahead import ReadAhead
from graphstep.engine import compiled_part, torch_private
from graphstep.errors import LifecycleError

_is_inference: Final = Tensor.is_inference
_wants_gradient: Final = attrgetter("requires_grad")


class ChainRun:
    """One pass through a chain, or through a part of it, until its backward has run or its results are dropped.

    Args:
        chain: what to run.
        first: index of the first pair.
        on_close: called once when the run is over.
        before_backward: called before the backward halves run, with the last pair that has run forward; refuses them by
            an error.
    """

    def __init__(
        self,
        chain: Chain,
        first: int,
        on_close: Callable[[], None],
        before_backward: Callable[[GraphPair], None] | None = None,
    ) -> None:
        self.chain = chain
        self._before_backward = before_backward
        self.first = first
        self.latest = first
        """Index of the last pair whose forward has run."""
        self.span = Span()
        self._reads = [(source.lane, Span.of_results(source.forward_position)) for source in _sources(chain, first)]
        """Results of other runs that are the arguments of this one, as long as it is in flight."""
        self._on_close = on_close
        self._versions: list[list[int]] = []
        """Of the results handed out, to see whether somebody wrote into them."""
        self._read: list[tuple[Tensor, int, bool]] = []
        """Results of other runs that the first pair reads, with their versions, and whether its backward half does."""
        self._launched: dict[int, tuple[ReadAhead, list[int]]] = {}
        """By index of the first pair in a graph of several: what they read, and the versions at the launch."""
        self._latest_launched = first
        self._ahead: list[KeptState] = []
        """What has been written by pairs that were launched and are still to be called, in order."""
        self.num_landmarks = 0
        self.copied: frozenset[int] = frozenset()
        """Pairs whose callers get copies of the results."""
        self._is_open = False
        self._has_run = False

    def start(
        self,
        tensors: Sequence[Tensor],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        ambient: tuple[Any, ...],
        *,
        loaded: Sequence[Tensor] | None = None,
    ) -> Any:
        """Run the forward half of the first pair.

        Args:
            tensors: the flat arguments of a call with the captured signature.
            arguments: the call's arguments, which the next ones are compared with.
            named: those given by keyword.
            ambient: the modes around the call.
            loaded: where the values of the arguments are read, if they are elsewhere as well.

        Returns:
            The captured function's result over the static outputs: valid until the next replay that may overwrite it,
            which the caller does not start as long as :meth:`Lane.holds_results` says that it is still in use.
        """
        chain, first = self.chain, self.first
        pair = chain.pairs[first]
        pair.session.settle_ahead()
        stop = len(chain.pairs)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        # Of each pair one parameter: so that a backward pass towards parameters alone comes by here, and is refused.
        reached = chain.landmarks(first)
        self.num_landmarks = len(reached)
        self._is_open = True
        for lane, span in self._reads:
            lane.enter(span)
        chain.lane.enter(self.span)
        leaves, given = (*wanted, *pair.exposed), loaded or tensors
        flat: tuple[Tensor, ...]
        if chain.relay is not None:
            flat = chain.relay.relay.replay(self, stop, given, leaves, reached, self.not_differentiable(stop))
        else:
            flat = _apply(self, stop, given, *leaves, *reached, chain.anchor)
        self._note(first, pair)
        self._read = [(pair.inputs[n], pair.inputs[n]._version, n in pair.saved_inputs) for n in pair.chained]
        handles: list[list[Tensor]] = []
        position = 0
        for each in chain.pairs[first:stop]:
            handles.append(list(flat[position : position + len(each.outputs)]))
            position += len(each.outputs)
        result = pair.form.of(handles[0])
        # Nobody can tell whether tensors of inference mode are as before: then each pair is called by itself.
        if stop > first + 1 and not any(map(_is_inference, tensors)):
            self._wait(handles, arguments, named, ambient)
        return result

    def _wait(
        self,
        handles: list[list[Tensor]],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        ambient: tuple[Any, ...],
    ) -> None:
        """Expect the call of the next pair."""
        native = self.chain.relay
        if native is None or self.copied or native.ambient != ambient:
            Pending(self, handles, arguments, named, ambient).arm()
        else:
            native.relay.begin(self, self.span, self._versions, handles, arguments, named, ambient, self.first)

    def advance(self) -> None:
        """Run the forward half of the next pair."""
        index = self.latest + 1
        pair = self.chain.pairs[index]
        if pair.forward is None and pair.kept is not None:
            del self._ahead[0]
        pair.launch_forward()
        if pair.forward is not None:
            self._note_launch(index)
        self._note(index, pair)

    def _note(self, index: int, pair: GraphPair) -> None:
        self.latest = index
        self._versions.append(pair.versions())
        self.span.forward_position, self.span.backward_position = pair.forward_position, pair.backward_position
        pair.num_in_flight += 1
        pair.num_replays += 1
        pair.stats.num_replays += 1

    def _note_launch(self, index: int) -> None:
        read = self.chain.read_ahead(index)
        if read is None:
            return
        self._launched[index] = read, read.versions()
        self._latest_launched = index
        if read.kept:
            self._ahead = list(read.kept)
            for kept in self._ahead:
                kept.note()
            self.chain.pairs[index].session.ahead = weakref.ref(self)

    def undo_ahead(self) -> None:
        """What was launched and will not be called has not run: put back what it has written.

        Raises:
            LifecycleError: somebody has written there since.
        """
        ahead, self._ahead = self._ahead, []
        for kept in reversed(ahead):
            kept.undo()

    def read_ahead(self, index: int) -> tuple[ReadAhead, int, list[int]] | None:
        """For the next pair: if it was launched with one before it, what it reads, its place there and the versions."""
        found = self._launched.get(self._latest_launched) if self.chain.pairs[index].forward is None else None
        return None if found is None else (found[0], index - self._latest_launched, found[1])

    def _is_as_in_forward(self, start: int, index: int) -> bool:
        """True unless what a pair reads was written since the launch of the graph that begins with ``start``."""
        found = self._launched.get(start)
        return found is None or found[0].is_as_in_forward(index - start, found[1])

    def forward(self, stop: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Load the arguments, run the first forward half, and give a tensor for every result up to ``stop``."""
        pairs = self.chain.pairs[self.first : stop]
        pairs[0].load_inputs(tensors)
        pairs[0].launch_forward()
        self._note_launch(self.first)
        self.copied = frozenset(index for index, pair in enumerate(pairs, self.first) if pair.copies_results)
        if not self.copied and self.chain.relay is not None:
            return self.chain.relay.relay.results(self.first)
        made = [
            torch.empty_like(output) if index in self.copied else output.detach()
            for index, pair in enumerate(pairs, self.first)
            for output in pair.outputs
        ]
        self.fill(self.first, made)
        return tuple(made)

    def fill(self, index: int, results: Sequence[Tensor]) -> None:
        """A pair has run forward: copy its results to where its callers get them, if they get copies."""
        if index in self.copied:
            with torch.no_grad():
                for result, output in zip(results, self.chain.pairs[index].outputs, strict=False):
                    result.detach().copy_(output)

    def not_differentiable(self, stop: int) -> list[int]:
        """Positions, among the results of :meth:`forward`, of those without a gradient."""
        return self.chain.not_differentiable(self.first, stop)

    def replayed_backward(self, gradients: Sequence[Tensor | None], accumulates_all: bool) -> list[Tensor | None]:
        """Refuse a backward that the recordings cannot give; else see :meth:`backward`.

        Args:
            gradients: of all results, in the order of :meth:`forward`.
            accumulates_all: the backward pass reaches all leaves. Not so in ``autograd.grad``, for example.

        Raises:
            LifecycleError: it has run before, second derivatives are wanted, or only gradients of chosen tensors are.
        """
        pairs = self._done()
        where = pairs[-1].region.name
        if pairs[-1].session.is_closed:
            raise LifecycleError(
                "the graphs were closed between the forward and the backward of this call",
                where=where,
                fix="run the backward of every forward before close() or the end of the `with` block",
            )
        refuse_second_derivatives(where)
        if self._has_run:
            raise LifecycleError(
                "the backward of this call has run already, and the memory of its forward is used again",
                where=where,
                fix="add up the losses and call backward once, or leave this module out of the captured ones",
            )
        if not accumulates_all and any(pair.accumulates for pair in pairs):
            raise LifecycleError(
                "gradients of chosen tensors were asked for (autograd.grad, or backward with inputs=...); the captured "
                "backward would also add to the gradients of its parameters",
                where=where,
                fix="call backward() and read .grad of the tensors, or leave this module out of the captured ones",
            )
        return self.backward(gradients)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward halves of what has run forward, last first.

        Args:
            gradients: of all results, in the order of :meth:`forward`.

        Returns:
            Gradients of the first pair's inputs that want one, then of the parameters that autograd accumulates for.

        Raises:
            LifecycleError: a graph of several layers was used in part, a result was changed in place or has a gradient
                that had none at the capture, or a parameter got a hook.
            PlanError: it is not its turn.
            StaleAddressError: a gradient has moved.
        """
        done = self._done()
        done[0].session.settle_ahead()
        if self._before_backward is not None:
            self._before_backward(done[-1])
        given = self._checked(done, gradients)
        # What came after the last result with a gradient has none, and takes no part.
        num_reached = len(given)
        while num_reached and all(gradient is None for gradient in given[num_reached - 1]):
            num_reached -= 1
        pairs = done[:num_reached]
        graphs = by_graph(pairs)
        for start, stop in graphs:
            if stop - start == 1 and stop < num_reached and pairs[start].takes_all_gradients:
                continue  # One pair alone, whose gradients the next one leaves in place.
            refuse_if_partial(pairs[start:stop], given[start:stop], is_last=stop == len(pairs))
        again = _computed_again(pairs, graphs, given)
        self._refuse_other_state(again, graphs)
        replayed = [pair for start, stop in graphs if start not in again for pair in pairs[start:stop]]
        # The recording writes into all of its gradients. Eager code leaves None where the loss does not reach, and
        # optimizers skip those.
        unreached = [
            parameter
            for pair, found, following in zip(pairs, given, [*pairs[1:], None], strict=False)
            for parameter in pair.not_reached_from(found, following)
        ]
        empty = [parameter for parameter in unreached if parameter.grad is None]
        guests = self.chain.settle(replayed) if replayed else {}
        self._has_run = True
        first = done[0]
        incoming: Sequence[Tensor | None] = [None] * len(first.inputs)
        exposed: Sequence[Tensor | None] = [None] * len(first.exposed)
        is_chained = False
        for start, stop in reversed(graphs):
            graph, found = pairs[start:stop], given[start:stop]
            if start in again:
                incoming, exposed = recomputed(graph, found, is_chained=is_chained)
                if start:
                    given[start - 1] = handed_over(incoming, graph[0], given[start - 1])
                is_chained = False
                continue
            graph[-1].load_output_gradients(found[-1], is_chained=is_chained)
            for index in range(stop - 1, start - 1, -1):
                pairs[index].launch_backward(guests)
            incoming, exposed, is_chained = graph[0].grad_inputs, graph[0].exposed_gradients, True
        for parameter in empty:
            parameter.grad = None
        left_out = set(map(id, unreached))
        exposed = [None if id(p) in left_out else g for p, g in zip(first.exposed, exposed, strict=True)]
        wanted = [g for g, tensor in zip(incoming, first.inputs, strict=True) if tensor.requires_grad]
        # Whoever receives a gradient may keep it, and the static one is overwritten by the next backward half.
        results = [None if g is None else g.clone() for g in (*wanted, *exposed)]
        self.close()
        if first.poisons:
            for pair in done:
                pair.poison_dead()
        return results

    def _launch_all(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Launch all backward halves where surely nothing has changed but the place of gradients.

        Only the compiled part calls this.
        """
        native = self.chain.relay
        if native is None:
            raise LifecycleError("there is nothing to launch", where=self.chain.pairs[0].region.name)
        guests = self.chain.settle(self.chain.pairs)
        self._has_run = True
        first, last = self.chain.pairs[0], self.chain.pairs[-1]
        last.load_output_gradients(gradients[len(gradients) - len(last.outputs) :], is_chained=False)
        native.relay.launch_backward()
        for pair in self.chain.pairs if guests else ():
            pair.homes.hand_out(guests)
        wanted = [g for g, tensor in zip(first.grad_inputs, first.inputs, strict=True) if tensor.requires_grad]
        # Whoever receives a gradient may keep it, and the static one is overwritten by the next backward half.
        results = [None if g is None else g.clone() for g in (*wanted, *first.exposed_gradients)]
        self.close()
        return results

    def _checked(self, pairs: Sequence[GraphPair], gradients: Sequence[Tensor | None]) -> list[Sequence[Tensor | None]]:
        """The gradients of each pair's results, if nothing has happened that the recordings do not know."""
        given: list[Sequence[Tensor | None]] = []
        position = 0
        for pair, versions in zip(pairs, self._versions, strict=True):
            given.append(gradients[position : position + len(pair.outputs)])
            position += len(pair.outputs)
            if pair.versions() != versions:
                handed = [output for _, output in self.chain.handover] if pair is not pairs[-1] else ()
                refuse_if_spoilt(pair, versions, handed)
        if any(is_saved and tensor._version != version for tensor, version, is_saved in self._read):
            raise LifecycleError(
                "an argument was changed in place, and the backward needs it as it was",
                where=pairs[0].region.name,
                fix="use an operation that makes a new tensor, such as x + y instead of x.add_(y)",
            )
        refuse_frozen(pairs)
        refuse_new_hooks(pairs, self.chain.has_hooks(pairs))
        return given

    def _refuse_other_state(self, again: Collection[int], graphs: Sequence[tuple[int, int]]) -> None:
        """What is computed again must read what it has read in the forward."""
        for start, stop in graphs:
            for index in range(self.first + start, self.first + stop) if start in again else ():
                is_first = index == self.first
                has_other = is_first and any(tensor._version != version for tensor, version, _ in self._read)
                is_same = not has_other and self._is_as_in_forward(self.first + start, index)
                refuse_other_state(self.chain.pairs[index], has_other=not is_same)

    def _done(self) -> tuple[GraphPair, ...]:
        return self.chain.pairs[self.first : self.latest + 1]

    def close(self) -> None:
        """Give the slots back. May be called twice."""
        if self._is_open:
            self._is_open = False
            for pair in self._done()[: len(self._versions)]:
                pair.num_in_flight -= 1
            self.chain.lane.leave(self.span)
            for lane, span in self._reads:
                lane.leave(span)
            self._on_close()

    def __del__(self) -> None:
        self.close()


def _computed_again(
    pairs: Sequence[GraphPair], graphs: Sequence[tuple[int, int]], given: Sequence[Sequence[Tensor | None]]
) -> set[int]:
    """First pairs of the graphs whose backward half is not what is asked for, and which can be run again."""
    again: set[int] = set()
    is_chained = False
    for start, stop in reversed(graphs):
        graph, found = pairs[start:stop], [list(each) for each in given[start:stop]]
        if stop < len(pairs) and not is_chained:
            # What is computed again hands its gradients over as any caller would.
            for _, output in pairs[stop].chained.values():
                if pairs[stop - 1].differentiable[output]:
                    found[-1][output] = pairs[stop - 1].outputs[output]
        is_chained = not (is_partial(graph, found, is_chained=is_chained) and all(pair.runs_again for pair in graph))
        if not is_chained:
            again.add(start)
    return again


def _sources(chain: Chain, first: int) -> Iterable[GraphPair]:
    pair = chain.pairs[first]
    return pair.sources() if pair.chained else ()


class Replay(torch.autograd.Function):
    """Stands for a run: forward of its first pair now, backward halves of all when their turn comes.

    Inputs: the run, up to which pair it may go, the flat arguments; those of them that want a gradient, the parameters
    whose gradients autograd accumulates, one parameter of each pair, and the chain's anchor.
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
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay the backward halves, once, if they can give what is asked for."""
        run: ChainRun = ctx.run
        accumulates_all = torch_private.will_accumulate(ctx.next_functions[-1][0])
        found = run.replayed_backward(gradients, accumulates_all)
        return (None, None, None, *found, *([None] * run.num_landmarks), None)


_apply: Final = compiled_part.apply_of(Replay)
