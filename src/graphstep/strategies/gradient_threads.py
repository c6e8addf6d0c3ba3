"""Whether gradients come from backward passes of other threads, whose operations nobody sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from graphstep.capture.gradient_branch import leaves_hooked
from graphstep.engine import torch_private


@contextmanager
def gradient_threads_watched(leaves: Iterable[Tensor]) -> Iterator[Callable[[], bool]]:
    """In the body a function runs whose operations are watched by a dispatch mode.

    Autograd works for a backward pass in threads of its own, with the modes of the thread that has called it. Where
    there are none, somebody else has.

    Args:
        leaves: that want gradients.

    Yields:
        What tells whether one has been given a gradient that nobody saw.
    """
    unseen: list[bool] = []

    def come(_: Tensor, __: Any) -> None:
        if not torch_private.is_dispatch_watched():
            unseen.append(True)

    with leaves_hooked(leaves, come):
        yield lambda: bool(unseen)
