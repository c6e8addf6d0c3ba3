"""One step of the engine: which tokens of which requests are computed, and where their keys and values go."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from graphstep.inference.blocks import RESERVED_BLOCK
from graphstep.inference.requests import DrawNeeds, Request, SamplingParams
from graphstep.inference.shapes import BatchShape


def _numbers() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class Step:
    """The work of one forward, decode requests first, then prefill, each by arrival.

    Its lists and arrays have one entry a request, but for ``token_ids``, which has one a token, and ``feeds``. They
    describe the step as it was scheduled; ``block_tables`` are those of the requests and grow with the next one.
    """

    number: int
    """Counts the steps of a scheduler."""
    requests: list[Request] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=_numbers)
    """Tokens to compute, request after request; 0 for those that ``feeds`` are about."""
    feeds: array[int] = field(default_factory=_numbers)
    """For each decode request the row of the step before this one whose token it computes, drawn on the device and not
    known here; -1: the token is in ``token_ids``. Empty if all are."""
    starts: array[int] = field(default_factory=_numbers)
    """Position of the first of them: tokens whose keys and values are in the cache already."""
    lengths: array[int] = field(default_factory=_numbers)
    """Tokens to compute of each request."""
    block_tables: list[array[int]] = field(default_factory=list)
    state_slots: array[int] = field(default_factory=_numbers)
    sampling: list[bytes] = field(default_factory=list)
    """Settings as ``requests.SAMPLING_FORMAT``."""
    draws: list[bool] = field(default_factory=list)
    """Is a token drawn after the last one? Not where only a part of a prompt is computed."""
    num_prefill: int = 0
    preempted: list[Request] = field(default_factory=list)
    """Requests that gave up their blocks for this step; they wait, and are computed again later."""

    @property
    def shape(self) -> BatchShape:
        """Tokens, prefill and decode requests, without padding."""
        return BatchShape(len(self.token_ids), self.num_prefill, len(self.requests) - self.num_prefill)

    @property
    def needs(self) -> DrawNeeds:
        """What drawing the tokens of this step takes."""
        flags = [request.draw_flags for request, draws in zip(self.requests, self.draws, strict=True) if draws]
        return DrawNeeds.of_flags(flags)

    def append(self, request: Request, length: int) -> None:
        """Compute the next ``length`` tokens of a request."""
        start = request.num_computed
        self.requests.append(request)
        self.token_ids.extend(request.tokens[start : start + length])
        self.starts.append(start)
        self.lengths.append(length)
        self.block_tables.append(request.block_table)
        self.state_slots.append(request.state_slot)
        self.sampling.append(request.packed_sampling)
        self.draws.append(start + length == len(request.tokens))
        self.num_prefill += request.is_prefilling


def dummy_step(shape: BatchShape, max_sequence_length: int) -> Step:
    """Return a step that fills a bucket and harms nobody: for warmup and capture.

    All of its keys and values go to the reserved block and its states to the reserved slot. Prefill requests share the
    tokens that decode leaves; those that round up the count stay padding.
    """
    step = Step(-1)
    left = shape.tokens - shape.decode
    for index in range(shape.requests):
        is_prefill = index >= shape.decode
        length = min(max(1, left // (shape.requests - index)), max_sequence_length) if is_prefill else 1
        left -= length if is_prefill else 0
        request = Request(index, array("i", bytes(4 * length)), length, _GREEDY, length + 1, _GREEDY.packed(0))
        request.is_prefilling = is_prefill
        request.block_table.append(RESERVED_BLOCK)
        step.append(request, length)
    return step


_GREEDY = SamplingParams(temperature=0)
