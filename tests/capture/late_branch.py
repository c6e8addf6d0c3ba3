"""A branch that does its work as late as it may: what would race on a GPU is wrong here, on any device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class LateBranch:
    """Work waits until somebody waits for it. What reads its results before sees memory without content."""

    is_here = True
    may_multiply = True
    width = 4

    def __init__(self, *, most_pending: int = 8) -> None:
        self._waiting: deque[Callable[[], Any]] = deque()
        self._most_pending = most_pending
        self.num_done = 0
        self.num_spread = 0
        self.num_unseen = 0
        """Kernels that no operation of torch has launched."""

    @property
    def num_pending(self) -> int:
        return len(self._waiting)

    def run(self, work: Callable[[], Any], keep: Sequence[object]) -> Any:
        if len(self._waiting) >= self._most_pending:
            self._do()
        self._waiting.append(work)

    def join(self) -> None:
        while self._waiting:
            self._do()

    def num_nodes(self) -> int:
        return self.num_unseen

    def spread(self, works: Sequence[Callable[[], object]]) -> None:
        assert not self._waiting, "what is spread does not wait for the branch"
        for work in reversed(works):
            work()
        self.num_spread += 1

    def _do(self) -> None:
        work = self._waiting.popleft()
        out = getattr(work, "keywords", {}).get("out")
        # What is late here was issued before: nobody has written its result since.
        kept = torch.autograd._unsafe_preserve_version_counter(out) if out is not None else nullcontext()
        with _disable_current_modes(), torch.no_grad(), kept:
            work()
        self.num_done += 1


@contextmanager
def fresh_memory_is_poison() -> Iterator[None]:
    """Memory without content is NaN in the body."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[assignment]
