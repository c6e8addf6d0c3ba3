"""The contract between the capture core and a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from graphstep.engine.branch import Branch

T = TypeVar("T")


@runtime_checkable
class Recording(Protocol):
    """One captured sequence of operations on fixed storages."""

    @property
    def result(self) -> Any:
        """What the captured function returned, with tensors at fixed addresses. Every replay overwrites them."""

    @property
    def num_operations(self) -> int | None:
        """Operations (tape) or graph nodes (CUDA) of one replay; ``None`` where the device does not tell."""

    @property
    def nbytes(self) -> int:
        """Memory that this recording added to its engine's pool, in bytes."""

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""

    def replay(self) -> None:
        """Run the recorded operations again. Runs no Python of the captured function and does not wait for the device.

        Raises:
            LifecycleError: the recording is closed, or another capture is under way in this thread.
        """

    def launcher(self) -> Callable[[], object]:
        """What replays at the least cost, without looking whether it may: for a caller that is not in a capture."""

    def release_result(self) -> None:
        """Forget what the captured function returned. The memory stays valid for replays."""

    def close(self) -> None:
        """Free the recording. May be called twice."""


@runtime_checkable
class Engine(Protocol):
    """Captures functions on one device. Belongs to one session and owns the memory of its recordings, lane by lane."""

    @property
    def name(self) -> str:
        """``cuda`` or ``tape``."""

    @property
    def device(self) -> torch.device:
        """Where captured tensors live."""

    @property
    def is_capturing(self) -> bool:
        """True while :meth:`capture` runs, in the thread that runs it."""

    @property
    def pool_bytes(self) -> int:
        """Bytes held for recordings that are not closed."""

    @property
    def lane_bytes(self) -> Mapping[Hashable, int]:
        """The same by lane. Slow: for reports."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes that libraries have set aside for captures; they are not part of the pool."""

    def capture(
        self,
        function: Callable[[], Any],
        *,
        generators: Sequence[torch.Generator] = (),
        lane: Hashable = 0,
        collect_first: bool = True,
    ) -> Recording:
        """Run ``function`` once under capture and return the recording.

        Tensors, gradients and generators that existed before are afterwards as they were, also when it fails; results
        are defined only after the first replay. Default generators are always known; other generators that
        ``function`` draws from are given in ``generators``.

        Recordings of one lane share memory: what one of them frees the next may use. They are replayed in the order of
        their capture (some may be left out), or results are read before another of the lane is replayed. Recordings of
        different lanes never share memory and may be replayed in any order.

        Garbage is collected before, unless ``collect_first`` says that it has been: the destructor of an old graph
        must not run inside a capture.

        Raises:
            CaptureError: an operation cannot be captured. Names the operation, the user's line and the way out.
            LifecycleError: the engine is closed, or a capture is under way: in this engine, or in this thread.

        Other errors of ``function`` pass through.
        """

    def branch(self) -> Branch | None:
        """Before a capture: where the captured function can do work beside its other work; ``None`` if nowhere."""

    def capture_stream(self) -> AbstractContextManager[None]:
        """Run the body on the stream that captures use, ordered after and before the caller's stream."""

    def run_on_pool(self, function: Callable[[], T], *, lane: Hashable, copied: Callable[[T], T]) -> T:
        """Run ``function`` eagerly on the memory of a lane's pool, which nothing uses between replays.

        What an eager run allocates would stand beside the pool otherwise. Backward passes allocate in a thread of their
        own, so this is for functions that have none. What the function leaves there apart from its result, a cache that
        it has filled for example, would be overwritten by replays: if there is something, all recordings of the lane
        are closed, and later ones get another pool. Looks through all segments of the allocator: slow.

        Args:
            function: takes nothing.
            lane: of recordings. Where it has no memory yet, or the engine none to lend, the function runs as always.
            copied: makes copies of what the function has returned, outside of the pool; returns them.
        """

    def borrowed_view(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory that does not keep it alive, for memory that the pool may hand out again."""

    def synchronize(self) -> None:
        """Wait until the device is idle. Never called on the replay path."""

    def close(self) -> None:
        """Close all recordings, then release the pool. May be called twice.

        Raises:
            LifecycleError: a capture is under way.
        """
