"""What kernels have to know about a step, at fixed addresses: one host buffer, one copy, one device buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from graphstep.errors import InputMismatchError
from graphstep.inference.fields import FIELDS, BufferLayout
from graphstep.inference.host_buffer import HostBuffer
from graphstep.inference.sampling import DrawSettings
from graphstep.inference.shapes import BatchLimits, BatchShape
from graphstep.inference.step import Step

_MOST_VIEWS = 1024
"""Shapes whose views are kept. Those of graphs are few, those of eager steps without number."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Views of the device memory for one bucket: T tokens, R requests. Rows: decode first, then prefill, then padding.

    The addresses are the same for every bucket and every step; `StepMetadata.fill` changes the contents. Types and
    padding are those of `fields.FIELDS`.
    """

    bucket: BatchShape
    counts: Tensor
    """[4]: tokens, requests, decode requests and prefill requests of the step, without padding."""
    query_starts: Tensor
    """[R + 1]: row of each request's first token, then the number of tokens; padding repeats that number."""
    starts: Tensor
    """[R]: position of a request's first token in this step. Where it is 0, the recurrent state in the request's slot
    is another's and counts as zero."""
    context_lengths: Tensor
    """[R]: keys that the last token of a request sees, its own included; also the position of the token to be drawn."""
    last_tokens: Tensor
    """[R]: row of each request's last token, whose logits are needed."""
    state_slots: Tensor
    """[R]: row of the recurrent states, from 1; 0 for padding."""
    keys: Tensor
    """[R], as are the next three: see `sampling.DrawSettings`."""
    temperatures: Tensor
    top_ps: Tensor
    top_ks: Tensor
    token_ids: Tensor
    """[T]: as far as the host knows them."""
    token_sources: Tensor
    """[T]: where each token lies, as an index into ``words``."""
    positions: Tensor
    """[T]: place of each token in its sequence."""
    token_requests: Tensor
    """[T]: row of the request it belongs to."""
    slots: Tensor
    """[T]: where its key and value go: block * block_size + place in the block."""
    block_tables: Tensor
    """[R, blocks of the longest sequence]: the reserved block where a request has none."""
    words: Tensor
    """All of the memory as numbers of 32 bits."""
    drawn: Tensor
    """[R]: the tokens that the last step has drawn. Whoever draws writes them, for the next step to read."""

    @property
    def draw_settings(self) -> DrawSettings:
        """What `sample` takes."""
        return DrawSettings(self.keys, self.temperatures, self.top_ps, self.top_ks, self.context_lengths)


class StepMetadata:
    """Owns the buffers, and fills them.

    Args:
        limits: the largest step.
        block_size: tokens of a block.
        device: where kernels read. Host buffers are pinned beside a GPU.
        num_host_buffers: the next step is written while the copies of so many less one may be under way.
    """

    def __init__(
        self, limits: BatchLimits, block_size: int, device: torch.device | str, *, num_host_buffers: int = 2
    ) -> None:
        self._layout = BufferLayout(
            limits.padded_tokens(limits.max_tokens),
            limits.max_requests,
            math.ceil(limits.max_sequence_length / block_size),
        )
        self._device = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        self._fields = {name: self._layout.section(self._device, name) for name in FIELDS}
        self._drawn = self._layout.drawn(self._device)
        for name, field in FIELDS.items():  # padding only, until the first step
            self._fields[name].fill_(field.fill)
        is_pinned = self._device.device.type == "cuda"
        self._hosts = [HostBuffer(self._layout, block_size, is_pinned=is_pinned) for _ in range(num_host_buffers)]
        self._next = 0
        self._tensors: dict[BatchShape, StepTensors] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._layout.num_bytes

    def tensors(self, bucket: BatchShape) -> StepTensors:
        """Return the views that a forward of this shape reads.

        Raises:
            InputMismatchError: larger than the limits.
        """
        known = self._tensors.get(bucket)
        if known is not None:
            return known
        most = self._layout
        if bucket.tokens > most.max_tokens or bucket.requests > most.max_requests:
            raise InputMismatchError(
                f"{bucket} is larger than {most.max_tokens} tokens and {most.max_requests} requests",
                where="StepMetadata",
                fix="build it with the limits that the buckets were chosen for",
            )
        views = {name: field[: most.num_rows(name, bucket)] for name, field in self._fields.items()}
        words = self._device.view(torch.int32)
        tensors = StepTensors(bucket, **views, words=words, drawn=self._drawn[: bucket.requests])
        if len(self._tensors) < _MOST_VIEWS:
            self._tensors[bucket] = tensors
        return tensors

    def fill(self, step: Step, bucket: BatchShape | None = None) -> StepTensors:
        """Write a step, padded to a bucket, and start the copy to the device on the current stream.

        Args:
            step: as it was scheduled; later changes of its requests have no effect.
            bucket: the shape that is computed; ``None``: the step's own, without padding.

        Returns:
            The views of the bucket. Their contents last until the next call.

        Raises:
            InputMismatchError: the step does not fit the bucket, or the bucket not the limits. Nothing was written.
        """
        shape = step.shape
        tensors = self.tensors(shape if bucket is None else bucket)
        if shape.tokens > tensors.bucket.tokens or shape.requests > tensors.bucket.requests:
            raise InputMismatchError(
                f"a step of {shape} does not fit a bucket of {bucket}",
                where="StepMetadata.fill",
                fix="take the bucket from GraphMatcher.match(step.shape)",
            )
        host = self._hosts[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        host.write(step, shape, tensors.bucket)
        host.copy_to(self._device, self._layout.used_bytes(tensors.bucket))
        return tensors
