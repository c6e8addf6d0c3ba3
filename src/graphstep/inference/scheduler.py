"""Decides what each step computes: requests join, go on, wait, give way and leave."""

from __future__ import annotations

import logging
from array import array
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from graphstep.errors import ConfigError, LifecycleError, Problem
from graphstep.inference.blocks import BlockPool, blocks_kept_free, extend_keys
from graphstep.inference.matching import GraphMatcher
from graphstep.inference.request_problems import checked_prompt
from graphstep.inference.requests import NOT_FINITE, FinishReason, Output, Request, RequestState, SamplingParams
from graphstep.inference.shapes import BatchLimits, BatchShape
from graphstep.inference.step import Step

_MOST_PASSED = 16
"""Waiting requests that are looked at in a step although a graph for them is missing."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SchedulerCounts:
    """What has happened since the start."""

    steps: int = 0
    finished: int = 0
    preemptions: int = 0
    deferrals: int = 0
    """Times that a request was kept out of a step because no graph would have served it."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache."""


class Scheduler:
    """Continuous batching: decode first, then prompts, in order of arrival, within the budgets of tokens and blocks.

    Steps are scheduled, then committed in the same order; in between they are in flight, and `add` and `end` may be
    called. With ``most_in_flight`` 2 a step is scheduled while the tokens of the one before it are still being drawn:
    it counts on them, and what it computed for a request that ended with them is left out when it is committed. Blocks
    that a request gives back while it is in flight may be handed out at once, because whoever gets them writes in a
    later step, and steps run in order. Not safe for several threads.

    Args:
        limits: requests, tokens and positions there can be in a step.
        blocks: the pool; nobody else takes from it.
        chunked_prefill: split prompts that do not fit a step. What preempted requests compute again is split in any
            case where it has grown to more tokens than a step.
        seed: decides the tokens of requests that name no seed, together with their order of arrival.
        matcher: admit only what a graph can serve (all prefills as graphs); ``None``: admit whatever fits.
        vocabulary: number of tokens there are; ``None``: not checked.
        most_in_flight: steps that may be scheduled and not committed, 1 or 2.

    Raises:
        ConfigError: decode requests of several tokens, which this scheduler does not know.
    """

    def __init__(
        self,
        limits: BatchLimits,
        blocks: BlockPool,
        *,
        chunked_prefill: bool = False,
        seed: int = 0,
        matcher: GraphMatcher | None = None,
        vocabulary: int | None = None,
        most_in_flight: int = 1,
    ) -> None:
        if limits.tokens_per_decode != 1:
            raise ConfigError(
                Problem(
                    code="scheduler-speculative",
                    what=f"decode requests of {limits.tokens_per_decode} tokens cannot be scheduled yet",
                    where="--num-speculative-tokens",
                    fix="leave it out",
                )
            )
        self.limits = limits
        self.blocks = blocks
        self.counts = SchedulerCounts()
        self._chunked_prefill = chunked_prefill
        self._seed = seed
        self._matcher = matcher if matcher is not None and matcher.has_mixed else None
        self._vocabulary = vocabulary
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free_slots = list(range(limits.max_requests, 0, -1))
        self._most_in_flight = most_in_flight
        self._in_flight: deque[Step] = deque()
        self._num_added = 0
        self._patience = max(100, limits.max_sequence_length)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Is there a request that is not finished?"""
        return bool(self._running or self._waiting)

    def add(self, prompt: Sequence[int], sampling: SamplingParams) -> Request:
        """Let a request wait for its turn.

        Raises:
            RequestError: it could never be served, or its prompt is no tokens; all problems at once.
        """
        tokens = checked_prompt(
            prompt,
            sampling,
            self.limits,
            self.blocks,
            vocabulary=self._vocabulary,
            chunked_prefill=self._chunked_prefill,
        )
        number = self._num_added
        seed = (self._seed * 0x9E3779B97F4A7C15 + number) % 2**63
        length = min(len(tokens) + sampling.max_new_tokens, self.limits.max_sequence_length)
        packed = sampling.packed(seed)
        request = Request(number, tokens, len(tokens), sampling, length, packed, sampling.draw_flags)
        self._num_added += 1
        self._waiting.append(request)
        return request

    def end(self, request: Request, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request early: its client has left, or its text contains what it was to stop at. Its blocks are free.

        What steps in flight draw for it is thrown away.
        """
        if request.state is RequestState.FINISHED:
            return
        try:
            (self._waiting if request.state is RequestState.WAITING else self._running).remove(request)
        except ValueError as error:
            what = f"request {request.number} belongs to another engine"
            raise LifecycleError(what, where="Scheduler.end", fix="cancel it there") from error
        self._finish(request, reason)

    def unfinished(self) -> list[Request]:
        """The requests that run or wait."""
        return [*self._running, *self._waiting]

    def schedule(self) -> Step | None:
        """Choose the work of the next step, and take the blocks it needs.

        Returns:
            The step, to be handed to `commit` once its tokens are there, or to `abandon`; ``None``: nothing to do, or
            nothing before the step in flight is committed, because a request of it would have to give way.

        Raises:
            LifecycleError: as many steps as may be are in flight.
        """
        if len(self._in_flight) >= self._most_in_flight:
            raise LifecycleError(
                f"step {self._in_flight[0].number} has neither been committed nor abandoned",
                where="Scheduler.schedule",
                fix="call commit() with the tokens of that step first",
            )
        step = Step(self.counts.steps)
        if not self._decode(step):
            self._take_back(step)
            return None
        self._go_on_with_prompts(step)
        self._admit(step)
        if not step.requests:
            return None
        self.counts.steps += 1
        self._in_flight.append(step)
        return step

    def abandon(self, step: Step) -> None:
        """Take back the latest step, which was not computed or will not be used; the next one repeats it.

        Requests that gave way for it have done so.

        Raises:
            LifecycleError: it is not in flight, or not the latest.
        """
        if not self._in_flight or step is not self._in_flight[-1]:
            raise _not_in_flight(step, "Scheduler.abandon")
        self._in_flight.pop()
        self._take_back(step)

    def commit(
        self,
        step: Step,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None = None,
        top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None,
    ) -> list[Output]:
        """Note that the earliest step in flight was computed.

        Args:
            step: what `schedule` returned.
            tokens: one a request in order; ignored for requests that draw none in this step.
            logprobs: of those tokens, where some request wants them.
            top_logprobs: the most likely tokens, best first, at least as many as any request wants.

        Returns:
            What each request got. Requests that have ended hold no blocks any more.

        Raises:
            LifecycleError: it is not in flight, or not the earliest.
        """
        if not self._in_flight or step is not self._in_flight[0]:
            raise _not_in_flight(step, "Scheduler.commit")
        self._in_flight.popleft()
        outputs = []
        ended = []
        size = self.blocks.block_size
        rows = zip(step.requests, step.starts, step.lengths, step.draws, strict=True)
        for index, (request, start, length, draws) in enumerate(rows):
            if request.state is RequestState.FINISHED:  # while the step was in flight
                continue
            if (start + length) // size > request.num_recorded:
                self._record(request, start + length)
            if not draws:
                continue
            request.num_drawing -= 1
            token = tokens[index]
            if token == NOT_FINITE:
                ended.append((request, FinishReason.ERROR))
                outputs.append(Output(request, None, finish_reason=FinishReason.ERROR))
                continue
            request.tokens.append(token)
            reason = _why_ended(request, token)
            if reason is not None:
                ended.append((request, reason))
            wanted = request.sampling.logprobs
            if wanted is None:
                outputs.append(Output(request, token, None, (), reason))
            else:
                logprob = None if logprobs is None else logprobs[index]
                top = () if top_logprobs is None else tuple(top_logprobs[index][:wanted])
                outputs.append(Output(request, token, logprob, top, reason))
        if ended:
            gone = {request.number for request, _ in ended}
            self._running = [request for request in self._running if request.number not in gone]
            for request, reason in ended:
                self._finish(request, reason)
        return outputs

    def forget_cache(self) -> None:
        """Forget what released blocks contain, and record nothing that running requests have computed so far."""
        self.blocks.forget()

    def recompute_all(self) -> None:
        """Send all running requests back to wait, without their blocks, and forget the cache: the weights are new.

        Raises:
            LifecycleError: a step is in flight.
        """
        if self._in_flight:
            raise LifecycleError(
                f"step {self._in_flight[0].number} is being computed",
                where="Scheduler.recompute_all",
                fix="commit() or abandon() it first",
            )
        while self._running:
            self._preempt(self._running[-1])
        self.blocks.forget()

    def _decode(self, step: Step) -> bool:
        """One token for each request that is past its prompt; the latest ones give way if blocks run out.

        Returns:
            False: one would have to give way that is in flight. The step has to be taken back.
        """
        running, size = self._running, self.blocks.block_size
        # As _append() does it, in the one loop whose time counts in every step.
        requests, token_ids, starts = step.requests.append, step.token_ids.append, step.starts.append
        tables, slots, sampling = step.block_tables.append, step.state_slots.append, step.sampling.append
        feeds = step.feeds.append
        index = row = num_fed = 0
        is_done = True
        while index < len(running):
            request = running[index]
            index += 1
            if request.is_prefilling:
                continue
            start, table, num_drawing = request.num_computed, request.block_table, request.num_drawing
            if num_drawing and start + 1 >= request.max_length:
                continue  # it ends with the token that is being drawn
            if start == len(table) * size and not self._grow(request, step):
                is_done = not self._in_flight
                break
            requests(request)
            if num_drawing:
                token_ids(0)
                feeds(request.row)
                num_fed += 1
            else:
                token_ids(request.tokens[start])
                feeds(-1)
            starts(start)
            tables(table)
            slots(request.state_slot)
            sampling(request.packed_sampling)
            request.num_computed = start + 1
            request.num_drawing = num_drawing + 1
            request.row = row
            row += 1
        step.lengths.extend(array("i", [1]) * row)
        step.draws.extend([True] * row)
        if not num_fed:
            del step.feeds[:]
        return is_done

    def _grow(self, request: Request, step: Step) -> bool:
        """Give a request one more block; False: it had to give way itself, or nobody may before a commit."""
        while (blocks := self.blocks.allocate(1)) is None:
            if self._in_flight:
                return False
            # Those before it in this step came earlier, so that the last one is not in the step yet.
            victim = self._running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        request.block_table.extend(blocks)
        return True

    def _append(self, step: Step, request: Request, length: int) -> None:
        """Let a step compute the next tokens of a prompt."""
        step.append(request, length)
        request.num_computed += length
        request.row = len(step.requests) - 1
        if step.draws[-1]:
            request.is_prefilling = False
            request.num_drawing += 1

    def _take_back(self, step: Step) -> None:
        """Put the requests of a step back to where they were before it."""
        num_decode = len(step.requests) - step.num_prefill
        for index, (request, length, draws) in enumerate(zip(step.requests, step.lengths, step.draws, strict=True)):
            if request.state is RequestState.FINISHED:
                continue
            request.num_computed -= length
            request.num_drawing -= draws
            request.is_prefilling = index >= num_decode
        for row, request in enumerate(self._in_flight[-1].requests if self._in_flight else ()):
            request.row = row

    def _go_on_with_prompts(self, step: Step) -> None:
        for request in self._running:
            if request.is_prefilling:
                budget = self.limits.max_tokens - len(step.token_ids)
                length = min(len(request.tokens) - request.num_computed, budget)
                if length > 0:
                    self._append(step, request, length)

    def _admit(self, step: Step) -> None:
        """Let waiting requests in, by arrival, as long as places, tokens and blocks last."""
        passed: list[Request] = []
        while self._waiting and self._free_slots and len(step.token_ids) < self.limits.max_tokens:
            request = self._waiting[0]
            found = self._find_prefix(request)
            length = self._chunk(request, len(found) * self.blocks.block_size, step)
            if length == 0:
                self._defer(request)
                passed.append(self._waiting.popleft())
                # A request that has been passed often enough holds up all others until its turn has come.
                if request.num_deferrals >= self._patience or len(passed) == _MOST_PASSED:
                    break
                continue
            if length < 0 or not self._take_blocks(request, found):
                break
            self._waiting.popleft()
            self._start(request)
            self._append(step, request, length)
        self._waiting.extendleft(reversed(passed))

    def _find_prefix(self, request: Request) -> list[int]:
        """Blocks in the cache that hold the beginning of a request. One token is always left to compute."""
        if not self.blocks.prefix_caching:
            return []
        size = self.blocks.block_size
        extend_keys(request.block_keys, request.tokens, size)
        return self.blocks.find(request.block_keys[: (len(request.tokens) - 1) // size])

    def _chunk(self, request: Request, num_found: int, step: Step) -> int:
        """Tokens of a waiting request that this step computes; 0: no graph would serve it; -1: they do not fit."""
        limits = self.limits
        pending = len(request.tokens) - num_found
        length = min(pending, limits.max_tokens - len(step.token_ids))
        may_split = self._chunked_prefill or pending > limits.max_tokens
        if length < pending and not may_split:
            return -1
        if self._matcher is None:
            return length
        shape = step.shape
        tokens, prefill, decode = shape.tokens, shape.prefill + 1, shape.decode
        if self._matcher.match(BatchShape(tokens + length, prefill, decode)).bucket is not None:
            return length
        longest = min(length, self._matcher.most_tokens(prefill, decode) - tokens)
        if longest > 0 and may_split:
            return longest
        # With nothing else to compute, running without a graph is better than not running.
        return 0 if step.requests or self._running else length

    def _take_blocks(self, request: Request, found: list[int]) -> bool:
        """Give a request the blocks of all its tokens, or none."""
        self.blocks.share(found)
        fresh_needed = self.blocks.blocks_for(len(request.tokens)) - len(found)
        reserve = blocks_kept_free(self.blocks.capacity) if self._running else 0
        fresh = self.blocks.allocate(fresh_needed) if self.blocks.num_available >= fresh_needed + reserve else None
        if fresh is None:
            self.blocks.release(found)
            return False
        request.block_table = array("i", found + fresh)
        request.num_computed = len(found) * self.blocks.block_size
        request.num_recorded = len(found)
        return True

    def _start(self, request: Request) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed
            self.counts.prompt_tokens += request.num_prompt_tokens
            self.counts.cached_tokens += request.num_computed
        request.state = RequestState.RUNNING
        request.state_slot = self._free_slots.pop()
        request.epoch = self.blocks.epoch
        insort(self._running, request, key=lambda other: other.number)

    def _defer(self, request: Request) -> None:
        request.num_deferrals += 1
        self.counts.deferrals += 1
        if self.counts.deferrals % self._patience == 0:
            _log.warning(
                "%d times a request had to wait because no graph fits it: the buckets are too few for this traffic",
                self.counts.deferrals,
            )

    def _preempt(self, request: Request) -> None:
        """Take the blocks of a request; it waits before all that came later."""
        self._running.remove(request)
        self._let_go(request)
        request.state = RequestState.WAITING
        request.is_prefilling = True
        request.num_computed = request.num_recorded = 0
        request.num_preemptions += 1
        self.counts.preemptions += 1
        index = next((i for i, other in enumerate(self._waiting) if other.number > request.number), len(self._waiting))
        self._waiting.insert(index, request)

    def _record(self, request: Request, num_computed: int) -> None:
        """Make blocks findable that are full of tokens of committed steps."""
        if not self.blocks.prefix_caching or request.epoch != self.blocks.epoch:
            return
        size = self.blocks.block_size
        extend_keys(request.block_keys, request.tokens, size)
        for index in range(request.num_recorded, num_computed // size):
            self.blocks.record(request.block_keys[index], request.block_table[index])
        request.num_recorded = num_computed // size

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.state is RequestState.RUNNING:
            self._let_go(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self.counts.finished += 1

    def _let_go(self, request: Request) -> None:
        self.blocks.release(request.block_table)
        request.block_table = array("i")
        self._free_slots.append(request.state_slot)
        request.state_slot = 0


def _why_ended(request: Request, token: int) -> FinishReason | None:
    if token in request.sampling.stop_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.tokens) >= request.max_length else None


def _not_in_flight(step: Step, where: str) -> LifecycleError:
    return LifecycleError(
        f"step {step.number} is not the one in flight",
        where=where,
        fix="commit each step once, in the order of scheduling, or abandon the latest",
    )
