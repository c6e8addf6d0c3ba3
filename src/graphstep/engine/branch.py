"""A second stream of a capture, whose work becomes a branch of the graph beside the first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from graphstep.engine.cuda_driver import capturing_node_count

T = TypeVar("T")

_MOST_PENDING = 8
"""Pieces of work on the branch whose memory is kept; at the next one the oldest has to be done."""


class Branch(Protocol):
    """Where a captured function can do work beside its other work."""

    @property
    def is_here(self) -> bool:
        """True where work is issued that the branch can run beside."""

    @property
    def may_multiply(self) -> bool:
        """True in a thread whose library of matrix products has a workspace for the branch."""

    def run(self, work: Callable[[], T], keep: Sequence[object]) -> T:
        """Do work beside what comes next, but after all that came before.

        Args:
            work: issues it. It must not allocate what outlives it.
            keep: what has to stay alive, unchanged and unread meanwhile, as the work reads and writes it.
        """

    @property
    def num_pending(self) -> int:
        """Pieces of work, the latest ones, that what comes next does not wait for."""

    def join(self) -> None:
        """What comes next waits for all of the branch: here, and where the branch forks from."""

    def num_nodes(self) -> int | None:
        """Nodes that the captured graph has so far; ``None`` where nobody tells."""

    @property
    def width(self) -> int:
        """Pieces of work that :meth:`spread` does side by side."""

    def spread(self, works: Sequence[Callable[[], object]]) -> None:
        """Do pieces of work that do not depend on each other side by side; what comes next waits for all of them."""


class StreamBranch:
    """A branch on a CUDA stream.

    Args:
        stream: of the branch.
        beside: the stream that it forks from and joins.
        others: more streams, to spread work on.
    """

    def __init__(
        self, stream: torch.cuda.Stream, beside: torch.cuda.Stream, others: Sequence[torch.cuda.Stream] = ()
    ) -> None:
        self._stream, self._beside, self._others = stream, beside, others
        self._thread = threading.get_ident()
        self._pending: deque[tuple[torch.cuda.Event, Sequence[object]]] = deque()

    @property
    def is_here(self) -> bool:
        """True if the current stream is the one beside it."""
        return torch.cuda.current_stream(self._beside.device) == self._beside

    @property
    def may_multiply(self) -> bool:
        """True in the thread of a backward pass, if that is not the one in which this was made."""
        return threading.get_ident() != self._thread

    @property
    def num_pending(self) -> int:
        """See :class:`Branch`."""
        return len(self._pending)

    def run(self, work: Callable[[], T], keep: Sequence[Any]) -> T:
        """See :class:`Branch`."""
        if len(self._pending) >= _MOST_PENDING:
            self._beside.wait_event(self._pending.popleft()[0])
        self._stream.wait_stream(self._beside)
        with torch.cuda.stream(self._stream):
            result = work()
            done = self._stream.record_event()
        # Kept until it is done: the allocator knows of the first stream only.
        self._pending.append((done, keep))
        return result

    def join(self) -> None:
        """See :class:`Branch`."""
        if not self._pending:
            return
        done, _ = self._pending[-1]
        for stream in {self._beside, torch.cuda.current_stream(self._beside.device)}:
            stream.wait_event(done)
        self._pending.clear()

    def num_nodes(self) -> int | None:
        """See :class:`Branch`."""
        return capturing_node_count(self._beside)

    @property
    def width(self) -> int:
        """See :class:`Branch`."""
        return 2 + len(self._others)

    def spread(self, works: Sequence[Callable[[], object]]) -> None:
        """See :class:`Branch`."""
        streams = (self._beside, self._stream, *self._others)
        used = streams[1 : len(works)]
        for stream in used:
            stream.wait_stream(self._beside)
        for number, work in enumerate(works):
            with torch.cuda.stream(streams[number % len(streams)]):
                work()
        for stream in used:
            self._beside.wait_stream(stream)
