"""Batches from the host: copied to the device on a stream of their own, while the last step still runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostInputs:
    """Brings host tensors into static inputs on a GPU without waiting for it.

    Each batch goes to one of two staging places on the device by a stream of its own, beside the graph that is running;
    only the short copy from there waits for that graph. Host memory that is not pinned is copied to memory that is:
    without that the driver would hold the host up until the device has come that far.

    Args:
        targets: the static inputs, on one GPU.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._targets = list(targets)
        self._device = self._targets[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._places = [[torch.empty_like(target) for target in targets] for _ in range(2)]
        # Their memory may be what work that is still to run has given back: it is written after that.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._arrived = torch.cuda.Event()
        self._is_free = [torch.cuda.Event() for _ in self._places]
        self._turn = 0

    def load(self, sources: Sequence[Tensor]) -> None:
        """Start the copies of one batch. Pinned memory must stay unchanged until the device has read it."""
        self._turn = 1 - self._turn
        place, is_free = self._places[self._turn], self._is_free[self._turn]
        # The cache that gives out pinned memory keeps it until the copy is done.
        pinned = [source if source.is_pinned() else source.pin_memory() for source in sources]
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(is_free)
            for stage, source in zip(place, pinned, strict=True):
                stage.copy_(source, non_blocking=True)
            self._arrived.record(self._stream)
        current.wait_event(self._arrived)
        torch._foreach_copy_(self._targets, place)
        is_free.record(current)
