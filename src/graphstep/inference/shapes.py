"""The shape of a step: how many tokens it computes, for how many requests of each kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from graphstep.errors import ConfigError, Problem

BATCH_INVARIANT_MULTIPLE = 64
"""Token counts are multiples of this where results may not depend on the other requests of a batch: the kernels of a
product are then chosen, and its rows computed, in the same way for every step."""


@dataclass(frozen=True, order=True, slots=True)
class BatchShape:
    """What decides which graph can serve a step. Ordered by tokens, then prefill, then decode requests."""

    tokens: int
    """Tokens of all requests together, padding included where this is a bucket."""
    prefill: int
    """Requests whose prompt, or a part of it, is computed."""
    decode: int
    """Requests that go on from their last token."""

    @property
    def requests(self) -> int:
        """Requests of both kinds."""
        return self.prefill + self.decode

    @property
    def is_decode_only(self) -> bool:
        """Is no prompt computed in this step?"""
        return self.prefill == 0

    def fits(self, bucket: BatchShape, *, strict: bool = False) -> bool:
        """Can a graph for ``bucket`` compute this step?

        A step of decode requests needs a bucket of decode requests only. Every other step needs enough tokens and
        enough places for prefill, and its decode requests may take further places for prefill unless ``strict``.
        """
        if self.tokens > bucket.tokens:
            return False
        if self.is_decode_only:
            return bucket.is_decode_only and self.decode <= bucket.decode
        if self.prefill > bucket.prefill:
            return False
        return self.decode <= bucket.decode if strict else self.requests <= bucket.requests

    def __str__(self) -> str:
        return f"{self.tokens} tokens ({self.prefill} prefill, {self.decode} decode)"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """The largest step there can be.

    Raises:
        ConfigError: limits that contradict each other; all problems at once.
    """

    max_requests: int
    """Most requests in a step."""
    max_tokens: int
    """Most tokens in a step."""
    max_sequence_length: int
    """Most tokens of a request, prompt and generated ones together."""
    tokens_per_decode: int = 1
    """Tokens of a decode request in a step: one, and those guessed ahead."""
    token_multiple: int = 1
    """Token counts of buckets are multiples of this: the ranks that share the tokens of a step."""
    batch_invariant: bool = False
    """Token counts are rounded up to a multiple of 64."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    @property
    def decode_bound(self) -> int:
        """Tokens of a step in which every place is taken by a decode request."""
        return self.max_requests * self.tokens_per_decode

    @property
    def padding_multiple(self) -> int:
        """What token counts are rounded to."""
        return math.lcm(self.token_multiple, BATCH_INVARIANT_MULTIPLE if self.batch_invariant else 1)

    def padded_tokens(self, tokens: int) -> int:
        """Round a number of tokens up to what a step computes."""
        return -(-tokens // self.padding_multiple) * self.padding_multiple

    def eager_shape(self, shape: BatchShape) -> BatchShape:
        """Return the shape in which a step is computed that no graph serves."""
        return BatchShape(self.padded_tokens(shape.tokens), shape.prefill, shape.decode)

    def allows(self, shape: BatchShape) -> bool:
        """Can a step of these limits fill this shape, but for tokens that only round it up?"""
        decode_tokens = shape.decode * self.tokens_per_decode
        longest = shape.prefill * self.max_sequence_length + decode_tokens
        return (
            min(shape.prefill, shape.decode) >= 0
            and 0 < shape.requests <= self.max_requests
            and max(1, shape.prefill + decode_tokens) <= shape.tokens <= self.padded_tokens(longest)
        )

    def _problems(self) -> Iterator[Problem]:
        for name in ("max_requests", "max_tokens", "max_sequence_length", "tokens_per_decode", "token_multiple"):
            if getattr(self, name) < 1:
                yield Problem(
                    code="batch-limit",
                    what=f"{name} must be at least 1, got {getattr(self, name)}",
                    where=f"BatchLimits.{name}",
                    fix="use a positive number",
                )
        if self.token_multiple < 1:
            return
        for name, tokens in (("max_requests", self.decode_bound), ("max_tokens", self.max_tokens)):
            if tokens % self.token_multiple:
                # Rounded down instead, the largest batches would be left without a graph, and nobody would notice.
                yield Problem(
                    code="batch-limit-multiple",
                    what=f"{name} {getattr(self, name)} allows {tokens} tokens in a step, which is no multiple of "
                    f"{self.token_multiple}, the ranks that share them",
                    where=f"BatchLimits.{name}",
                    fix=f"choose {name} so that its tokens are a multiple of {self.token_multiple}",
                )
        if self.max_tokens < self.decode_bound:
            yield Problem(
                code="batch-limit-decode",
                what=f"a step of {self.max_requests} requests decodes {self.decode_bound} tokens, and max_tokens is "
                f"{self.max_tokens}",
                where="BatchLimits.max_tokens",
                fix=f"use max_tokens {self.decode_bound} or more, or fewer requests",
            )
