"""A model that is a hash, and a cache that knows what lies in it: to check a scheduler without tensors."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from graphstep.inference.blocks import RESERVED_BLOCK, BlockPool
from graphstep.inference.matching import GraphMatcher
from graphstep.inference.requests import Output, Request, SamplingParams
from graphstep.inference.scheduler import Scheduler
from graphstep.inference.shapes import BatchLimits
from graphstep.inference.step import Step

VOCABULARY = 50


def next_token(tokens: array[int]) -> int:
    """What the model says after these tokens."""
    return hash(tuple(tokens)) % VOCABULARY


def reference(prompt: list[int], num_tokens: int, stop: tuple[int, ...] = ()) -> list[int]:
    """The tokens that a request gets when it is alone in the world."""
    tokens = array("i", prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :].tolist()


@dataclass
class World:
    """A scheduler that is run step by step, and everything that can be checked about each.

    Args:
        looks_ahead: schedule and compute the next step before the tokens of the one before it are committed.
    """

    limits: BatchLimits
    num_blocks: int = 64
    block_size: int = 4
    chunked_prefill: bool = True
    prefix_caching: bool = True
    matcher: GraphMatcher | None = None
    looks_ahead: bool = False
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size, prefix_caching=self.prefix_caching)
        self.scheduler = Scheduler(
            self.limits,
            self.pool,
            chunked_prefill=self.chunked_prefill,
            matcher=self.matcher,
            vocabulary=VOCABULARY,
            most_in_flight=2 if self.looks_ahead else 1,
        )
        self.launched: deque[tuple[Step, list[int]]] = deque()
        self.cache: dict[int, tuple[int, ...]] = {}
        self.requests: list[Request] = []

    def add(self, prompt: list[int], num_tokens: int, stop: tuple[int, ...] = ()) -> Request:
        request = self.scheduler.add(prompt, SamplingParams(max_new_tokens=num_tokens, stop_tokens=stop))
        self.requests.append(request)
        return request

    def compute(self, step: Step) -> list[int]:
        """Write the cache as a forward would, and read all of the context of every request."""
        self.check(step)
        offset = 0
        drawn = []
        sequences = [self.sequence(step, index) for index in range(len(step.requests))]
        for sequence, start, length, table in zip(sequences, step.starts, step.lengths, step.block_tables, strict=True):
            tokens = step.token_ids[offset : offset + length]
            offset += length
            assert tokens == sequence[start : start + length] or length == 1
            for position in range(start, start + length):
                slot = table[position // self.block_size] * self.block_size + position % self.block_size
                self.cache[slot] = tuple(sequence[: position + 1])
        for sequence, start, length, draws, table in zip(
            sequences, step.starts, step.lengths, step.draws, step.block_tables, strict=True
        ):
            for position in range(start + length):
                slot = table[position // self.block_size] * self.block_size + position % self.block_size
                assert self.cache[slot] == tuple(sequence[: position + 1])
            assert draws == (start + length == len(sequence))
            drawn.append(next_token(sequence))
        return drawn

    def sequence(self, step: Step, index: int) -> array[int]:
        """All tokens of a request as the device knows them."""
        tokens = step.requests[index].tokens
        if index >= len(step.feeds) or step.feeds[index] < 0:
            return tokens
        before, drawn = self.launched[-1]
        row = step.feeds[index]
        assert before.requests[row] is step.requests[index]
        assert before.draws[row]
        return tokens + array("i", [drawn[row]])

    def launch(self) -> bool:
        """Compute the next step, if there is one now."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        self.steps.append(step)
        self.launched.append((step, self.compute(step)))
        return True

    def read(self) -> list[Output]:
        """Commit the earliest step in flight."""
        outputs = self.scheduler.commit(*self.launched.popleft())
        self.check_blocks()
        return outputs

    def abandon(self) -> None:
        """Take back the latest step in flight."""
        self.scheduler.abandon(self.launched.pop()[0])
        self.check_blocks()

    def discard(self) -> None:
        """Take back all steps in flight."""
        while self.launched:
            self.abandon()

    def step(self) -> list[Output]:
        if not self.launched and not self.launch():
            return []
        if self.looks_ahead and len(self.launched) == 1:
            self.launch()
        return self.read()

    def run(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        else:
            raise AssertionError("the requests never end")
        while self.launched:
            assert not self.read()

    def check(self, step: Step) -> None:
        shape = step.shape
        assert 0 < shape.tokens <= self.limits.max_tokens
        assert 0 < shape.requests <= self.limits.max_requests
        assert len({request.number for request in step.requests}) == len(step.requests)
        decode, prefill = step.requests[: shape.decode], step.requests[shape.decode :]
        assert not any(request.is_prefilling for request in decode)
        assert [request.is_prefilling for request in prefill] == [not draws for draws in step.draws[shape.decode :]]
        assert all(step.draws[: shape.decode])
        assert len(step.feeds) in (0, shape.decode)
        assert list(step.lengths[: shape.decode]) == [1] * shape.decode
        for part in (decode, prefill):
            assert [request.number for request in part] == sorted(request.number for request in part)
        slots = list(step.state_slots)
        assert len(set(slots)) == len(slots)
        assert all(1 <= slot <= self.limits.max_requests for slot in slots)
        for name in ("starts", "lengths", "block_tables", "sampling", "draws"):
            assert len(getattr(step, name)) == shape.requests
        assert sum(step.lengths) == shape.tokens

    def check_blocks(self) -> None:
        held = {block for request in self.requests for block in request.block_table}
        assert RESERVED_BLOCK not in held
        assert self.pool.num_available == self.pool.capacity - len(held)
        for request in self.requests:
            assert request.state_slot == 0 or request.state.value == "running"
            assert not request.block_table or request.state.value == "running"
