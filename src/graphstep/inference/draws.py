"""Tokens from the logits of a step: drawn on the device for the next step to read, and copied to the host meanwhile."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from graphstep.inference.metadata import StepTensors
from graphstep.inference.requests import MAX_TOP_LOGPROBS, DrawNeeds
from graphstep.inference.sampling import HostDraws, sample, unpack

GREEDY: Final = DrawNeeds()
CAPTURED_NEEDS: Final = (DrawNeeds(is_random=True), DrawNeeds(is_random=True, is_filtered=True))
"""What graphs are made for beside taking the most likely token. Log-probabilities are rarely wanted, and computed
without one."""
_MOST_COLUMNS: Final = 2 + 2 * MAX_TOP_LOGPROBS


class Draws:
    """Draws a token for each row and leaves it where the next step finds it; inside a graph or not.

    Args:
        device: of the logits. On a GPU where Triton is installed, the most likely tokens are taken by its kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._take_most_likely: Callable[[Tensor, Tensor], Tensor] | None = None
        if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            module = importlib.import_module("graphstep.inference.triton_greedy")
            self._take_most_likely = module.take_most_likely

    def draw(self, logits_RV: Tensor, tensors: StepTensors, needs: DrawNeeds) -> Tensor:
        """Draw.

        Args:
            logits_RV: without columns that pad the vocabulary.
            tensors: of the step.
            needs: what some row wants.

        Returns:
            What `sampling.unpack` reads.
        """
        if needs == GREEDY and self._take_most_likely is not None and logits_RV.dtype != torch.float64:
            return self._take_most_likely(logits_RV, tensors.drawn)
        packed = sample(logits_RV, tensors.draw_settings, needs).packed()
        # Where logits are not finite there is no token; whatever the next step computes for the row is thrown away.
        torch.clamp(packed[:, 0], min=0, out=tensors.drawn)
        return packed


@dataclass(slots=True)
class PendingDraws:
    """What a step has drawn, on its way to the host."""

    num_rows: int
    needs: DrawNeeds | None
    """``None``: nothing was drawn."""
    packed: Tensor | None
    """Memory of the host that is written by the copy."""
    passed: torch.cuda.Event | None
    """Of the end of the step; ``None``: it has ended."""
    stream: torch.cuda.Stream | None
    """Where the step runs."""

    def keep_order(self) -> None:
        """Let what is launched next run after this step, on whatever stream."""
        if self.passed is not None and self.stream is not None:
            stream = torch.cuda.current_stream(self.stream.device)
            if stream != self.stream:
                stream.wait_event(self.passed)

    def wait(self) -> None:
        """Return when the device has come so far."""
        if self.passed is not None:
            self.passed.synchronize()

    def read(self) -> HostDraws:
        """Wait where something was drawn, and read it. To be called before the host buffer is used again."""
        if self.packed is None or self.needs is None:
            return HostDraws([0] * self.num_rows, None, None)
        self.wait()
        return unpack(self.packed.numpy(), self.needs)


class DrawReader:
    """Copies what steps have drawn to the host without waiting.

    Args:
        max_requests: most rows.
        device: of the logits. Host memory is pinned beside a GPU.
        num_buffers: results that may be on their way at once; each has to be read before so many more are started.
    """

    def __init__(self, max_requests: int, device: torch.device, *, num_buffers: int = 2) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        size = max_requests * _MOST_COLUMNS
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(num_buffers)]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(num_buffers)]
        self._next = 0

    def start(self, packed: Tensor | None, num_rows: int, needs: DrawNeeds | None) -> PendingDraws:
        """Start the copy of the first rows on the current stream, behind the drawing.

        Args:
            packed: what was drawn.
            num_rows: without padding.
            needs: what it was drawn for; ``None``: there is nothing to copy.
        """
        index = self._next
        self._next = (index + 1) % len(self._hosts)
        host = None
        if packed is not None and needs is not None:
            num_columns = packed.shape[1]
            host = self._hosts[index][: num_rows * num_columns].view(num_rows, num_columns)
            host.copy_(packed[:num_rows], non_blocking=True)
        event, stream = self._events[index], None
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            event.record(stream)
        return PendingDraws(num_rows, needs, host, event, stream)
