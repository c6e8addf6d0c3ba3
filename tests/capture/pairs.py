"""Captured pairs of functions, and chains of them, outside of any strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.capture.ambient import ambient_key
from graphstep.capture.chain import Chain, Handover
from graphstep.capture.chain_run import ChainRun
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.lanes import Lane
from graphstep.capture.pair_capture import capture_backwards, capture_forwards
from graphstep.capture.pending import Pending
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.tree import flatten


def new_pair(
    session: GraphSession,
    function: Callable[..., Any],
    *examples: Any,
    named: Mapping[str, Any] | None = None,
    modules: Sequence[nn.Module] = (),
    inputs: Sequence[Tensor] | None = None,
    warmups: int = 1,
    name: str = "region",
    **options: Any,
) -> GraphPair:
    """A pair that is warm; ``inputs`` are static tensors to use instead of own ones."""
    given = examples, dict(named or {})
    signature = Signature.of(given, device_type=session.device.type, modules=modules)
    region = Region(name, "layer", function, tuple(modules))
    static = inputs or [t.detach().clone().requires_grad_(t.requires_grad) for t in flatten(given)[0]]
    pair = GraphPair(region, signature, static, frozenset(), session, session.stats(name, "layer"), **options)
    pair.warm_up(warmups)
    return pair


def forward_pair(session: GraphSession, function: Callable[..., Any], *examples: Any, **options: Any) -> GraphPair:
    """A pair whose forward half is captured. Options are those of :func:`new_pair`."""
    pair = new_pair(session, function, *examples, **options)
    capture_forwards([pair])
    return pair


def backward_half(pair: GraphPair) -> GraphPair:
    """Capture the backward half with gradients of its own."""
    capture_backwards([pair], own_gradients(pair))
    pair.is_held()
    return pair


def own_gradients(pair: GraphPair) -> list[Tensor | None]:
    return [
        torch.empty_like(output, requires_grad=False).detach() if wanted else None
        for output, wanted in zip(pair.outputs, pair.differentiable, strict=True)
    ]


def captured(session: GraphSession, function: Callable[..., Any], *examples: Any, **options: Any) -> GraphPair:
    return backward_half(forward_pair(session, function, *examples, **options))


class Caller:
    """Calls one region of a chain: goes on with the run that expects it, starts one, or runs eagerly."""

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.chain: Chain | None = None
        self.index = 0
        self.may_start = False
        self.num_expected = self.num_started = self.num_eager = 0
        self.num_closed = 0

    def expect(self, pending: Pending) -> None:
        """Wait for this call."""
        self.pending = pending

    def expect_nothing(self) -> None:
        """Wait no longer."""
        if self.pending is not None:
            self.pending.drop()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        assert self.chain is not None
        pending, self.pending = self.pending, None
        if pending is not None:
            if pending.matches(arguments, named):
                self.num_expected += 1
                return pending.advance()
            pending.drop()
        pair = self.chain.pairs[self.index]
        if not self.may_start:
            self.num_eager += 1
            return pair.region.function(*arguments, **named)
        self.num_started += 1
        tensors = flatten((arguments, named))[0]
        run = ChainRun(self.chain, self.index, self._closed)
        return run.start(tensors, arguments, named, ambient_key(pair.session.device.type))

    def _closed(self) -> None:
        self.num_closed += 1


def chain_of(*pairs: GraphPair, handover: Handover = ((0, 0),), lane: Lane | None = None) -> Chain:
    """Pairs whose first result is the next one's first argument. Only the first caller starts runs."""
    callers = tuple(Caller() for _ in pairs)
    anchor = torch.empty(0, device=pairs[0].session.device, requires_grad=True)
    chain = Chain(pairs, callers, 0, lane or Lane(), handover if len(pairs) > 1 else (), anchor)
    for pair in pairs:
        pair.lane = chain.lane
        chain.lane.add(pair)
    for index, caller in enumerate(callers):
        caller.chain, caller.index, caller.may_start = chain, index, index == 0
    return chain


def linked(
    session: GraphSession,
    functions: Sequence[Callable[..., Any]],
    *examples: Any,
    named: Mapping[str, Any] | None = None,
    modules: Sequence[Sequence[nn.Module]] = (),
    handover: Handover = ((0, 0),),
    merge: int = 1,
    **options: Any,
) -> Chain:
    """A chain in which each function takes the results of the one before, captured as a strategy does it.

    Args:
        session: owner of the recordings.
        functions: each takes the same arguments, but for those that are handed over.
        examples: of the first call.
        named: of the first call, by keyword.
        modules: inside each function.
        handover: which arguments are which results of the call before.
        merge: so many pairs become one graph.
        **options: of the pairs.
    """
    shared = dict(named or {})
    places = [*range(len(examples)), *shared]
    flat = dict(zip(places, [*examples, *shared.values()], strict=True))
    positions = {place: n for n, place in enumerate(p for p in places if isinstance(flat[p], Tensor))}
    pairs: list[GraphPair] = []
    segments: list[list[GraphPair]] = []
    for index, function in enumerate(functions):
        chained: dict[int, tuple[GraphPair, int]] = {}
        inputs: list[Tensor] | None = None
        if pairs:
            chained = {positions[place]: (pairs[-1], output) for place, output in handover}
            inputs = [torch.empty(0) if n in chained else t for n, t in enumerate(pairs[-1].inputs)]
        pair = new_pair(
            session,
            function,
            *(flat[place] for place in range(len(examples))),
            named={place: flat[place] for place in shared},
            modules=modules[index] if modules else (),
            inputs=inputs,
            name=f"layers.{index}",
            chained=chained,
            **options,
        )
        if index % merge == 0:
            segments.append([])
        segments[-1].append(pair)
        pairs.append(pair)
        if index % merge == merge - 1 or index == len(functions) - 1:
            capture_forwards(segments[-1])
        for place, _ in handover:  # The next one is given inner results: they want a gradient where they can.
            flat[place] = flat[place].detach().clone().requires_grad_(flat[place].is_floating_point())
    _capture_all_backwards(segments)
    for position, pair in enumerate(pairs):
        pair.forward_position, pair.backward_position = position, 2 * len(pairs) - 1 - position
        pair.is_held()
    return chain_of(*pairs, handover=handover)


def _capture_all_backwards(segments: Sequence[Sequence[GraphPair]]) -> None:
    follower: GraphPair | None = None
    for segment in reversed(segments):
        last = segment[-1]
        gradients = own_gradients(last)
        for position, (_, output) in (follower.chained if follower is not None else {}).items():
            if last.differentiable[output]:
                assert follower is not None
                gradients[output] = follower.grad_inputs[position]
        capture_backwards(segment, gradients)
        if follower is not None:
            follower.let_go_grad_inputs()
            last.let_go_grad_outputs()
        follower = segment[0]
    assert follower is not None
    follower.let_go_grad_inputs()


def callers_of(chain: Chain) -> list[Caller]:
    return [receiver for receiver in chain.receivers if isinstance(receiver, Caller)]


def call(pair: GraphPair, *tensors: Tensor) -> Any:
    """Replay a pair by itself."""
    return callers_of(chain_of(pair))[0](*tensors)
