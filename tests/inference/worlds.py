"""A model that is a hash, and a cache that knows what lies in it: to check a scheduler without tensors."""

from __future__ import annotations

from array import array
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
    """A scheduler that is run step by step, and everything that can be checked about each."""

    limits: BatchLimits
    num_blocks: int = 64
    block_size: int = 4
    chunked_prefill: bool = True
    prefix_caching: bool = True
    matcher: GraphMatcher | None = None
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size, prefix_caching=self.prefix_caching)
        self.scheduler = Scheduler(
            self.limits, self.pool, chunked_prefill=self.chunked_prefill, matcher=self.matcher, vocabulary=VOCABULARY
        )
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
        for request, start, length, table in zip(
            step.requests, step.starts, step.lengths, step.block_tables, strict=True
        ):
            tokens = step.token_ids[offset : offset + length]
            offset += length
            assert tokens == request.tokens[start : start + length]
            for position in range(start, start + length):
                slot = table[position // self.block_size] * self.block_size + position % self.block_size
                self.cache[slot] = tuple(request.tokens[: position + 1])
        drawn = []
        for request, start, length, table in zip(
            step.requests, step.starts, step.lengths, step.block_tables, strict=True
        ):
            for position in range(start + length):
                slot = table[position // self.block_size] * self.block_size + position % self.block_size
                assert self.cache[slot] == tuple(request.tokens[: position + 1])
            drawn.append(next_token(request.tokens))
        return drawn

    def step(self) -> list[Output]:
        step = self.scheduler.schedule()
        if step is None:
            return []
        self.steps.append(step)
        outputs = self.scheduler.commit(step, self.compute(step))
        self.check_blocks()
        return outputs

    def run(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the requests never end")

    def check(self, step: Step) -> None:
        shape = step.shape
        assert 0 < shape.tokens <= self.limits.max_tokens
        assert 0 < shape.requests <= self.limits.max_requests
        assert len({request.number for request in step.requests}) == len(step.requests)
        decode, prefill = step.requests[: shape.decode], step.requests[shape.decode :]
        assert not any(request.is_prefilling for request in decode)
        assert all(request.is_prefilling for request in prefill)
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
