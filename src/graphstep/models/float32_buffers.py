"""Buffers that stay in float32 when the model they belong to is converted to another type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class Float32Buffers(nn.Module):
    """Base of modules whose buffers are counters, or small numbers that change by smaller ones.

    ``module.to(torch.bfloat16)`` and ``module.half()`` convert the parameters only; devices change for both.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            converted = self._buffers[name]
            if buffer is not None and converted is not None and converted.dtype is not buffer.dtype:
                self._buffers[name] = buffer.to(converted.device)
        return self
