"""Finds the bucket of a step, or says why it has none."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from graphstep.inference.ladder import Ladder
from graphstep.inference.shapes import BatchLimits, BatchShape


class NoBucket(enum.Enum):
    """Why a step runs without a graph."""

    NO_GRAPHS = "there are no graphs"
    DECODE_ONLY = "only decode steps have graphs"
    TOO_MANY_TOKENS = "more tokens than the largest graph"
    TOO_MANY_REQUESTS = "more requests than the graphs of that many tokens"
    NOT_CAPTURED = "its graph could not be captured"


@dataclass(frozen=True, slots=True)
class Match:
    """The bucket of a step, or the reason why there is none."""

    bucket: BatchShape | None
    reason: NoBucket | None = None


class GraphMatcher:
    """Looks up the smallest bucket that can compute a step.

    Args:
        ladder: the buckets that graphs are made for.
        strict: decode requests may not take places meant for prefill.
    """

    def __init__(self, ladder: Ladder, *, strict: bool = False) -> None:
        self._strict = strict
        ascending = sorted(ladder.buckets)
        self._mixed = [bucket for bucket in ascending if not bucket.is_decode_only]
        self._mixed_tokens = [bucket.tokens for bucket in self._mixed]
        decode = [bucket for bucket in ascending if bucket.is_decode_only]
        self._decode_tokens = [bucket.tokens for bucket in decode]
        self._decode = [Match(bucket) for bucket in decode]
        self._by_decode: dict[tuple[int, int], Match] = {}
        for bucket in reversed(decode):
            # Steps of one token a request, the usual ones, are looked up without a search.
            for requests in range(1, bucket.decode + 1):
                self._by_decode[requests, requests] = Match(bucket)

    @property
    def has_mixed(self) -> bool:
        """Do steps with prefill have graphs?"""
        return bool(self._mixed)

    def match(self, shape: BatchShape) -> Match:
        """Return the smallest bucket that can compute a step, by tokens, then prefill, then decode requests."""
        if shape.is_decode_only:
            known = self._by_decode.get((shape.tokens, shape.decode))
            return known or self._match_decode(shape)
        for bucket in self._mixed[bisect_left(self._mixed_tokens, shape.tokens) :]:
            if shape.fits(bucket, strict=self._strict):
                return Match(bucket)
        return Match(None, self._reason(shape))

    def most_tokens(self, prefill: int, decode: int) -> int:
        """Return the most tokens of a bucket that has places for so many requests, some of them prefill; 0: none."""
        for bucket in reversed(self._mixed):
            if BatchShape(0, prefill, decode).fits(bucket, strict=self._strict):
                return bucket.tokens
        return 0

    def coverage(self, limits: BatchLimits) -> Iterator[str]:
        """Say in words which steps have graphs, and which decode steps have none."""
        missing = [n for n in range(1, limits.max_requests + 1) if not self._has_decode(n, limits)]
        if not self._decode and not self._mixed:
            yield "no step has a graph"
            return
        if missing:
            yield f"decode steps without a graph: {_ranges(missing)} requests"
        else:
            yield f"decode steps of 1 to {limits.max_requests} requests have graphs"
        if self._mixed:
            largest = self._mixed[-1].tokens
            yield f"steps with prefill have graphs up to {largest} tokens" + (
                f" of {limits.max_tokens}" if largest < limits.max_tokens else ""
            )
        else:
            yield "steps with prefill have no graphs"

    def _match_decode(self, shape: BatchShape) -> Match:
        for match in self._decode[bisect_left(self._decode_tokens, shape.tokens) :]:
            if match.bucket is not None and shape.fits(match.bucket):
                return match
        return Match(None, self._reason(shape))

    def _has_decode(self, requests: int, limits: BatchLimits) -> bool:
        return self.match(BatchShape(requests * limits.tokens_per_decode, 0, requests)).bucket is not None

    def _reason(self, shape: BatchShape) -> NoBucket:
        if not self._decode and not self._mixed:
            return NoBucket.NO_GRAPHS
        tokens = self._decode_tokens if shape.is_decode_only else self._mixed_tokens
        if not tokens:
            return NoBucket.DECODE_ONLY if not shape.is_decode_only else NoBucket.NO_GRAPHS
        return NoBucket.TOO_MANY_TOKENS if shape.tokens > tokens[-1] else NoBucket.TOO_MANY_REQUESTS


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
