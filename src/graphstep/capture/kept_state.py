"""What a region writes into buffers, kept from before a run that may turn out not to be wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.errors import LifecycleError

if TYPE_CHECKING:
    from graphstep.capture.graph_pair import GraphPair

_version_of: Final = attrgetter("_version")
_MAX_BYTES: Final = 1 << 16
"""Of one region: copies at each launch should cost less than the launch that they save."""


class KeptState:
    """Counters and other small buffers that a region writes, as they were before its latest run.

    A region that is launched with the one before it has run when it is called. If that call does not come, its run is
    undone from here, and if its gradients are asked for in another way than captured, it runs again from here.

    Args:
        buffers: each has a storage of its own.
    """

    def __init__(self, region: str, buffers: list[Tensor]) -> None:
        self._region = region
        self._buffers = buffers
        self._contents = [torch_private.all_bytes(buffer) for buffer in buffers]
        self._kept = [torch.empty_like(content) for content in self._contents]
        self._versions: list[int] = []

    @classmethod
    def of(cls, pair: GraphPair) -> KeptState | None:
        """For a pair that changes nothing but small buffers of its modules, after its warmup; else ``None``."""
        observation = pair.observation
        buffers = {
            torch_private.storage_key(buffer): buffer
            for module in pair.region.modules
            for buffer in module._buffers.values()
            if buffer is not None and torch_private.has_plain_memory(buffer)
        }
        written = [buffers.get(torch_private.storage_key(content)) for content in observation.written]
        known = [buffer for buffer in written if buffer is not None and _has_all(buffer)]
        is_small = sum(buffer.nbytes for buffer in known) <= _MAX_BYTES
        if observation.is_random or len(known) < len(written) or not is_small:
            return None
        return cls(pair.region.name, known)

    def keep(self) -> None:
        """Copy: captured in front of the region."""
        torch_private.copy_all(self._kept, self._contents)

    def note(self) -> None:
        """The launch is done."""
        self._versions = list(map(_version_of, self._buffers))

    def owns(self, tensor: Tensor) -> bool:
        """True for one of the buffers."""
        return any(tensor is buffer for buffer in self._buffers)

    def undo(self) -> None:
        """Put back what was there before the launch.

        Raises:
            LifecycleError: somebody has written there since.
        """
        if list(map(_version_of, self._buffers)) != self._versions:
            raise LifecycleError(
                "a buffer that this region changes was written between the launch of the graph that holds its call and "
                "that call, which then came in another way than captured",
                where=self._region,
                fix="write into it before the layer in front of this one is called, or after the backward",
            )
        torch_private.copy_all(self._contents, self._kept)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """For the body, a run for its gradients alone, the buffers are as before; then as they are now."""
        now = [content.clone() for content in self._contents]
        torch_private.copy_all(self._contents, self._kept)
        try:
            yield
        finally:
            torch_private.copy_all(self._contents, now)


def _has_all(buffer: Tensor) -> bool:
    return buffer.nbytes == buffer.untyped_storage().nbytes()
