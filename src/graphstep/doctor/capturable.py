"""Lets optimizers that are built with ``capturable=True`` step on the CPU, where torch refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphstep.doctor.notes import Notes


@contextmanager
def capturable_on_cpu(*, notes: Notes) -> Iterator[None]:
    """In the body, such an optimizer steps as one without the flag does; what that reads on the host is not noted."""
    flagged: list[dict[str, Any]] = []

    def before(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        notes.is_stepping = True
        for group in optimizer.param_groups:
            is_on_cpu = any(parameter.device.type == "cpu" for parameter in group["params"])
            if group.get("capturable") and not group.get("fused") and is_on_cpu:
                group["capturable"] = False
                flagged.append(group)
                notes.is_quiet = True

    def after(_optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        put_back()

    def put_back() -> None:
        notes.is_stepping = False
        if flagged:
            notes.is_quiet = False
        for group in flagged:
            group["capturable"] = True
        flagged.clear()

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        put_back()
