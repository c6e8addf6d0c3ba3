"""The sequences of one request: from the engine's tokens to pieces of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from graphstep.inference.requests import FinishReason, Output, SamplingParams
from graphstep.inference.text import TextTokens
from graphstep.server.errors import ApiError
from graphstep.server.metrics import Metrics
from graphstep.server.stops import StoppedText
from graphstep.server.worker import EngineWorker, Job


@dataclass(slots=True)
class TokenDetail:
    """A token and its log-probabilities."""

    token: int
    offset: int
    """Characters of the text before it."""
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Piece:
    """What has become certain of a sequence since its last piece."""

    index: int
    text: str
    details: list[TokenDetail] = field(default_factory=list)
    """Of its new tokens, where log-probabilities were asked for."""
    finish_reason: str | None = None
    """``stop`` or ``length``, with the last piece."""


@dataclass(slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts, those that were found in the cache."""
    completion_tokens: int = 0


@dataclass(slots=True)
class _Sequence:
    job: Job
    text: StoppedText
    last_time: float
    num_tokens: int = 0
    is_finished: bool = False


class Generation:
    """Runs the sequences of a request and yields their pieces.

    Args:
        worker: of the engine.
        tokenizer: of the model.
        metrics: what is counted.
        prompts: tokens and settings of each sequence.
        num_copies: sequences of one prompt, next to each other.
        stop: texts that end a sequence.
    """

    def __init__(
        self,
        worker: EngineWorker,
        tokenizer: TextTokens,
        metrics: Metrics,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        num_copies: int = 1,
        stop: Sequence[str] = (),
    ) -> None:
        self.usage = Usage(prompt_tokens=sum(len(prompt) for prompt, _ in prompts[::num_copies]))
        self._worker = worker
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._prompts = prompts
        self._num_copies = num_copies
        self._stop = stop
        self._events: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._sequences: list[_Sequence] = []
        self._failure: ApiError | None = None

    async def start(self) -> None:
        """Hand the sequences to the engine, all or none. `close` has to follow.

        Raises:
            ApiError: there is no room, or no engine.
            RequestError: one could never be served.
        """
        now = time.monotonic()
        jobs = await self._worker.submit(self._prompts, self._events)
        self._sequences = [_Sequence(job, StoppedText(self._tokenizer.stream(), self._stop), now) for job in jobs]

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield what has come, at most a piece a sequence; each sequence ends with a finish reason.

        Raises:
            ApiError: the engine failed or stops.
        """
        num_open = len(self._sequences)
        while num_open:
            pieces: dict[int, Piece] = {}
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            for index, output in events:
                sequence = self._sequences[index]
                if sequence.is_finished:
                    continue  # what came after a stop text
                piece = pieces.setdefault(index, Piece(index, ""))
                self._add(sequence, output, piece)
                num_open -= sequence.is_finished
            if self._failure is not None:
                raise self._failure
            certain = [p for p in pieces.values() if p.text or p.details or p.finish_reason is not None]
            if certain:
                yield certain

    def close(self) -> None:
        """Cancel what is not finished. May be called twice."""
        left = [sequence for sequence in self._sequences if not sequence.is_finished]
        self._worker.cancel(sequence.job for sequence in left)
        for sequence in left:
            sequence.is_finished = True
            self._metrics.count_end(FinishReason.CANCELLED.value)

    def _add(self, sequence: _Sequence, output: Output, piece: Piece) -> None:
        if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._finish(sequence, output.finish_reason)
            what = sequence.job.failure or "the model's logits were not finite"
            is_stopping = output.finish_reason is FinishReason.CANCELLED
            self._failure = (
                ApiError(503, "the server is stopping") if is_stopping else ApiError(500, f"generation failed: {what}")
            )
            return
        if output.token is not None:
            self._count(sequence)
            is_end = output.finish_reason is FinishReason.STOP
            if not is_end:  # a token that ends a sequence is no part of its text
                offset = sequence.text.length
                piece.text += sequence.text.add(output.token)
                if output.logprob is not None:
                    piece.details.append(TokenDetail(output.token, offset, output.logprob, output.top_logprobs))
        if output.finish_reason is not None and not sequence.text.is_stopped:
            piece.text += sequence.text.finish()
        if sequence.text.is_stopped:
            self._worker.cancel([sequence.job], FinishReason.STOP)
            self._finish(sequence, FinishReason.STOP)
            piece.finish_reason = "stop"
        elif output.finish_reason is not None:
            self._finish(sequence, output.finish_reason)
            piece.finish_reason = output.finish_reason.value

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        sequence.is_finished = True
        self._metrics.count_end(reason.value)
        request = sequence.job.request
        if request is not None and sequence.job.index % self._num_copies == 0:
            self.usage.cached_tokens += request.num_cached_tokens

    def _count(self, sequence: _Sequence) -> None:
        now = time.monotonic()
        seconds = now - sequence.last_time
        sequence.last_time = now
        if sequence.num_tokens == 0:
            self._metrics.count_first_token(seconds)
        else:
            self._metrics.count_token(seconds)
        sequence.num_tokens += 1
        self.usage.completion_tokens += 1
