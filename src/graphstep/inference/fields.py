"""The fields of the buffer that describes a step: their types, their padding and their places.

In front of the fields lies what the device writes itself: a word that is always 0, then the tokens that the last step
has drawn, one a request. ``token_sources`` says for each token at which word of the memory it lies: there, or in
``token_ids``, which the host writes.

Padding tokens are token 0 at position 0; they write to the reserved block and belong to the first request. Padding
requests have no tokens and no context, blocks and states that belong to nobody, and take the most likely token.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from graphstep.inference.blocks import RESERVED_BLOCK
from graphstep.inference.shapes import BatchShape

_ALIGNMENT_BYTES: Final = 128
_WORD_BYTES: Final = 4


class Field(NamedTuple):
    """One field: so many numbers a token, a request, or in all."""

    per: Literal["step", "request", "token"]
    dtype: torch.dtype
    fill: float
    """What padding contains."""
    more: int = 0
    """Numbers beyond one for each token or request."""


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "counts": Field("step", torch.int32, 0, more=4),
        # Its padding repeats the number of tokens: what it would be after requests without tokens.
        "query_starts": Field("request", torch.int32, 0, more=1),
        "starts": Field("request", torch.int32, 0),
        "context_lengths": Field("request", torch.int32, 0),
        "last_tokens": Field("request", torch.int64, 0),
        "state_slots": Field("request", torch.int64, 0),
        "keys": Field("request", torch.int64, 0),
        "temperatures": Field("request", torch.float32, 0),
        "top_ps": Field("request", torch.float32, 1),
        "top_ks": Field("request", torch.int32, 0),
        "token_ids": Field("token", torch.int32, 0),
        "token_sources": Field("token", torch.int32, 0),
        "positions": Field("token", torch.int32, 0),
        "token_requests": Field("token", torch.int32, 0),
        "slots": Field("token", torch.int64, RESERVED_BLOCK),
        # Last, so that a copy can end after the rows that are used: it is by far the largest.
        "block_tables": Field("request", torch.int32, RESERVED_BLOCK),
    }
)
"""The fields in the order of the buffer. ``block_tables`` has a row for each request, all others have a number."""


class BufferLayout:
    """Where the fields lie in a buffer of bytes.

    Args:
        max_tokens: most tokens of a bucket.
        max_requests: most requests of a bucket.
        table_width: blocks of the longest sequence.
    """

    def __init__(self, max_tokens: int, max_requests: int, table_width: int) -> None:
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.table_width = table_width
        self._largest = BatchShape(max_tokens, max_requests, 0)
        self._offsets: dict[str, int] = {}
        end = _aligned((1 + max_requests) * _WORD_BYTES)
        self.device_bytes = end
        """What the device writes itself, at the start: not copied."""
        for name in FIELDS:
            self._offsets[name] = _aligned(end)
            end = self._offsets[name] + self._num_bytes(name, self._largest)
        self.num_bytes = end

    @property
    def first_token_word(self) -> int:
        """Place of the first of ``token_ids``, in words of 32 bits."""
        return self._offsets["token_ids"] // _WORD_BYTES

    def drawn(self, buffer: Tensor) -> Tensor:
        """Return the tokens that the last step has drawn, [max_requests]."""
        return buffer.view(torch.int32)[1 : 1 + self.max_requests]

    def used_bytes(self, bucket: BatchShape) -> int:
        """Return how much of the buffer, from its start, contains everything about a bucket."""
        return self._offsets["block_tables"] + self._num_bytes("block_tables", bucket)

    def num_rows(self, name: str, bucket: BatchShape) -> int:
        """Return the length of a field for a bucket."""
        field = FIELDS[name]
        return {"step": 0, "request": bucket.requests, "token": bucket.tokens}[field.per] + field.more

    def section(self, buffer: Tensor, name: str) -> Tensor:
        """Return a field of a buffer of bytes, as long as it can be."""
        offset = self._offsets[name]
        section = buffer[offset : offset + self._num_bytes(name, self._largest)].view(FIELDS[name].dtype)
        return section.view(-1, self.table_width) if name == "block_tables" else section

    def _num_bytes(self, name: str, bucket: BatchShape) -> int:
        width = self.table_width if name == "block_tables" else 1
        return self.num_rows(name, bucket) * width * FIELDS[name].dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
