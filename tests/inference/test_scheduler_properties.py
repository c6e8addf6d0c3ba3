"""Whatever comes and goes: no request is lost or waits for ever, no block leaks, tokens are those of each alone."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.inference.worlds import World, reference

from graphstep.config import InferenceConfig
from graphstep.inference.ladder import build_ladder
from graphstep.inference.matching import GraphMatcher
from graphstep.inference.requests import FinishReason, Output, Request
from graphstep.inference.shapes import BatchLimits

LENGTH = 40
BLOCK = 4

prompts = st.one_of(
    st.lists(st.integers(0, 49), min_size=1, max_size=24),
    st.builds(lambda shared, own: [7] * shared + [8] * own, st.integers(1, 20), st.integers(0, 4)),
)
requests = st.tuples(prompts, st.integers(1, 15), st.sets(st.integers(0, 49), max_size=3))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    max_requests = draw(st.integers(1, 6))
    limits = BatchLimits(
        max_requests=max_requests,
        max_tokens=max(max_requests, draw(st.integers(1, 48))),
        max_sequence_length=LENGTH,
    )
    matcher = None
    if draw(st.booleans()):
        options = InferenceConfig(
            inference_cuda_graph_all_prefills=draw(st.booleans()),
            inference_cuda_graph_max_tokens=draw(st.integers(1, 48)),
            inference_dynamic_batching_cuda_graph_sizing_distribution=draw(st.sampled_from(["exponential", "linear"])),
        )
        matcher = GraphMatcher(build_ladder(options, limits, draw(st.integers(1, 5))), strict=draw(st.booleans()))
    return World(
        limits,
        # Never fewer than one request needs, often fewer than all of them do.
        num_blocks=1 + LENGTH // BLOCK + draw(st.integers(0, 20)),
        block_size=BLOCK,
        chunked_prefill=limits.max_tokens < 24 or draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        matcher=matcher,
        looks_ahead=draw(st.booleans()),
    )


class Ledger:
    """What every request was promised, and what it got."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.wanted: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}
        self.ends: dict[int, list[FinishReason]] = {}
        self.cancelled: set[int] = set()

    def add(self, prompt: list[int], num_tokens: int, stop: set[int]) -> None:
        number = self.world.add(prompt, num_tokens, tuple(stop)).number
        self.wanted[number] = reference(prompt, num_tokens, tuple(stop))
        self.got[number], self.ends[number] = [], []

    def end(self, request: Request) -> None:
        self.cancelled.add(request.number)
        self.world.scheduler.end(request)

    def note(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.token is not None:
                self.got[output.request.number].append(output.token)
            if output.finish_reason is not None:
                self.ends[output.request.number].append(output.finish_reason)

    def check(self) -> None:
        for request in self.world.requests:
            number = request.number
            assert request.is_finished
            assert self.got[number] == request.output_tokens
            if request.finish_reason is FinishReason.CANCELLED:
                assert number in self.cancelled
                assert request.output_tokens == self.wanted[number][: len(request.output_tokens)]
                assert self.ends[number] == []
            else:
                assert request.output_tokens == self.wanted[number]
                assert self.ends[number] == [request.finish_reason]


def interfere(world: World, ledger: Ledger, data: st.DataObject) -> None:
    """Something that happens between two steps."""
    alive = [request for request in world.requests if not request.is_finished]
    what = data.draw(st.sampled_from(["nothing", "nothing", "nothing", "end", "abandon", "recompute"]))
    if what == "end" and alive:
        ledger.end(data.draw(st.sampled_from(alive)))
    elif what == "recompute":
        world.discard()
        world.scheduler.recompute_all()
    elif what == "abandon":
        if len(world.launched) < 1 + world.looks_ahead:
            world.launch()
        world.discard()
    world.check_blocks()


@settings(deadline=None, max_examples=150)
@given(worlds(), st.data())
def test_requests_that_come_and_go(world: World, data: st.DataObject) -> None:
    ledger = Ledger(world)
    for _ in range(data.draw(st.integers(1, 12))):
        for prompt, num_tokens, stop in data.draw(st.lists(requests, max_size=3)):
            ledger.add(prompt, num_tokens, stop)
        interfere(world, ledger, data)
        if not world.launched and not world.launch():
            assert not world.scheduler.has_work
            continue
        for _ in range(3):
            if data.draw(st.integers(0, 5)) == 0:
                ledger.end(data.draw(st.sampled_from(world.launched[-1][0].requests)))
            if len(world.launched) == 2 and data.draw(st.booleans()):
                world.abandon()
            if world.looks_ahead and len(world.launched) == 1 and data.draw(st.booleans()):
                world.launch()
        ledger.note(world.read())
    for _ in range(50 * (1 + sum(len(request.tokens) + 15 for request in world.requests))):
        if world.scheduler.has_work:
            ledger.note(world.step())
    assert not world.scheduler.has_work
    while world.launched:
        assert not world.read()
    assert world.pool.num_available == world.pool.capacity
    ledger.check()


@settings(deadline=None, max_examples=50)
@given(worlds(), st.lists(requests, min_size=1, max_size=12))
def test_first_tokens_come_in_order_of_arrival(world: World, wanted: list[tuple[list[int], int, set[int]]]) -> None:
    """Without graphs in the way, nobody is overtaken at the door."""
    assume(world.matcher is None)
    for prompt, num_tokens, _ in wanted:
        world.add(prompt, num_tokens)
    firsts: list[int] = []
    while world.scheduler.has_work:
        for output in world.step():
            if output.request.number not in firsts:
                firsts.append(output.request.number)
    assert firsts == sorted(firsts)
    assert len(firsts) == len(wanted)
