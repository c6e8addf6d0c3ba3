"""The host's side of a step's description: numbers written by numpy, then one copy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphstep.errors import InputMismatchError
from graphstep.inference.fields import FIELDS, BufferLayout
from graphstep.inference.shapes import BatchShape
from graphstep.inference.step import Step

_SAMPLING_FIELDS: Final = ("keys", "temperatures", "top_ps", "top_ks")
_SAMPLING: Final = np.dtype(
    [("keys", "<i8"), ("temperatures", "<f4"), ("top_ps", "<f4"), ("top_ks", "<i4"), ("unused", "<i4")]
)
"""`requests.SAMPLING_FORMAT`, with the names of the fields."""


class HostBuffer:
    """One buffer that a step is written to, and what is known about its last use.

    Args:
        layout: of the buffer.
        block_size: tokens of a block.
        is_pinned: the copy goes to a GPU, and goes on while the host does other things.
    """

    def __init__(self, layout: BufferLayout, block_size: int, *, is_pinned: bool) -> None:
        self._block_size = block_size
        self._width = layout.table_width
        self._bytes = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._fields: dict[str, NDArray[Any]] = {name: layout.section(self._bytes, name).numpy() for name in FIELDS}
        # The same memory again: a slice of it takes a request's table in one go, several times faster than numpy.
        self._table_memory = self._fields["block_tables"].reshape(-1).data
        self._paddings = {
            per: [(self._fields[name], field.fill) for name, field in FIELDS.items() if field.per == per]
            for per in ("token", "request")
        }
        self._row_numbers = np.arange(max(layout.max_tokens, layout.max_requests) + 1, dtype=np.int32)
        self._own_sources = self._row_numbers + np.int32(layout.first_token_word)
        self._copied_from = layout.device_bytes
        self._used_rows = self._used_width = 0
        self._copied = torch.cuda.Event() if is_pinned else None

    def write(self, step: Step, shape: BatchShape, bucket: BatchShape) -> None:
        """Write all of a step, and the padding up to its bucket.

        Raises:
            InputMismatchError: a block table is longer than the longest sequence has blocks.
        """
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()  # only where steps are written faster than they are copied
        num_tokens, num_requests = shape.tokens, shape.requests
        fields = self._fields
        self._write_tables(step)
        fields["counts"][:] = (num_tokens, num_requests, shape.decode, shape.prefill)
        fields["token_ids"][:num_tokens] = np.frombuffer(step.token_ids, np.int32)
        fields["token_sources"][:num_tokens] = self._own_sources[:num_tokens]
        if step.feeds:
            feeds = np.frombuffer(step.feeds, np.int32)
            # Word 0 of the memory is not a row.
            np.copyto(fields["token_sources"][: len(feeds)], feeds + 1, where=feeds >= 0)
        self._write_requests(step, num_requests)
        self._write_places(step, shape)
        if num_tokens < bucket.tokens:
            for array, fill in self._paddings["token"]:
                array[num_tokens : bucket.tokens] = fill
        if num_requests < bucket.requests:
            for array, fill in self._paddings["request"]:
                array[num_requests : bucket.requests] = fill
        fields["query_starts"][num_requests : bucket.requests + 1] = num_tokens

    def copy_to(self, device: Tensor, num_bytes: int) -> None:
        """Start the copy of the first bytes to the device's buffer, on the current stream, but for what it writes."""
        begin = self._copied_from
        device[begin:num_bytes].copy_(self._bytes[begin:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(device.device))

    def _write_requests(self, step: Step, num_requests: int) -> None:
        fields = self._fields
        starts, lengths = np.frombuffer(step.starts, np.int32), np.frombuffer(step.lengths, np.int32)
        query_starts = fields["query_starts"]
        query_starts[0] = 0
        np.cumsum(lengths, out=query_starts[1 : num_requests + 1])
        fields["starts"][:num_requests] = starts
        np.add(starts, lengths, out=fields["context_lengths"][:num_requests])
        np.subtract(query_starts[1 : num_requests + 1], 1, out=fields["last_tokens"][:num_requests])
        fields["state_slots"][:num_requests] = np.frombuffer(step.state_slots, np.int32)
        sampling = np.frombuffer(b"".join(step.sampling), _SAMPLING)
        for name in _SAMPLING_FIELDS:
            fields[name][:num_requests] = sampling[name]

    def _write_tables(self, step: Step) -> None:
        tables, width = step.block_tables, self._width
        longest = max(map(len, tables), default=0)
        if longest > width:
            raise InputMismatchError(
                f"a block table of {longest} blocks is longer than the {width} of the longest sequence",
                where="StepMetadata.fill",
                fix="give StepMetadata the limits of the scheduler and the block size of its pool",
            )
        # Only real rows are ever written; what they had before is erased, so that all else is the reserved block.
        self._fields["block_tables"][: self._used_rows, : self._used_width] = FIELDS["block_tables"].fill
        self._used_rows, self._used_width = len(tables), longest
        memory, begin = self._table_memory, 0
        for table in tables:
            memory[begin : begin + len(table)] = table
            begin += width

    def _write_places(self, step: Step, shape: BatchShape) -> None:
        """Positions, and where keys and values go."""
        fields, num_tokens, rows = self._fields, shape.tokens, self._row_numbers
        positions, requests = fields["positions"][:num_tokens], fields["token_requests"][:num_tokens]
        starts = np.frombuffer(step.starts, np.int32)
        if num_tokens == shape.requests:  # one token each
            positions[:] = starts
            requests[:] = rows[:num_tokens]
        else:
            lengths = np.frombuffer(step.lengths, np.int32)
            requests[:] = np.repeat(rows[: shape.requests], lengths)
            shifts = starts - fields["query_starts"][: shape.requests]
            np.add(rows[:num_tokens], shifts[requests], out=positions)
        columns, places = np.divmod(positions, self._block_size)
        slots = fields["slots"][:num_tokens]
        np.multiply(fields["block_tables"][requests, columns], self._block_size, out=slots, dtype=np.int64)
        slots += places
