"""Optimizers inside a captured step: a learning rate that is a number of the host would never change again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphstep.errors import CaptureError


@contextmanager
def optimizers_refused() -> Iterator[None]:
    """Refuse the step of any optimizer whose learning rate is not a tensor, while the body runs, in this thread.

    torch has this hook for the whole process only: what other threads do meanwhile is let through.
    """
    inside = threading.get_ident()

    def refuse(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        if threading.get_ident() == inside:
            _refuse(optimizer)

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _refuse(optimizer: Optimizer) -> None:
    if all(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups):
        return
    raise CaptureError(
        f"{type(optimizer).__name__} steps inside the captured function; its learning rate would stay what it is now",
        where="full_iteration, the forward-backward function",
        fix="step after forward_backward: the optimizer stays outside of the graph",
    )
