"""Segments: the steps of a layer, each a candidate for its own CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Segment:
    """One step of a layer's forward: tensors in, tensors out, no Python state changed."""

    kind: str
    """Value of the ``CudaGraphModule`` that captures it, such as ``attn``; empty for one never captured by name."""
    name: str
    """Attribute path below the layer, such as ``attention``."""
    fn: Callable[..., Tensor | tuple[Tensor, ...]]
    """``fn(*carried, *context)`` returns what the next segment receives as ``carried``."""
    modules: tuple[nn.Module, ...]
    """The modules that own every parameter and buffer that ``fn`` reads."""
    part_of: str = ""
    """``kind`` of the wider part that it belongs to, whose name captures it as well, such as ``moe``."""

    def is_captured_by(self, names: Collection[str]) -> bool:
        """True if one of these names of ``CudaGraphModule`` means it; none named means everything."""
        return not names or self.kind in names or self.part_of in names


class SegmentedModule(nn.Module):
    """A module whose forward *is* the list of its segments, run one after another.

    What runs eagerly and what a strategy captures are therefore the same functions. A captured segment may be merged
    with its captured neighbours; an eager one cuts.
    """

    def segments(self) -> tuple[Segment, ...]:
        """List the segments in the order of execution.

        The list is built anew on each call, so that it follows submodules that were replaced.
        """
        raise NotImplementedError(f"{type(self).__name__} has to list its segments")

    def forward(self, hidden: Tensor, *context: Tensor) -> Tensor:
        """Run all segments.

        Args:
            hidden: what the first segment receives, usually [B, S, H].
            context: tensors that every segment receives unchanged after the carried ones, such as rotary tables.

        Returns:
            What the last segment returns: one tensor.

        Raises:
            TypeError: the last segment returned several tensors.
        """
        carried: tuple[Tensor, ...] = (hidden,)
        for segment in self.segments():
            result = segment.fn(*carried, *context)
            carried = result if isinstance(result, tuple) else (result,)
        if len(carried) != 1:
            raise TypeError(f"the last segment of {type(self).__name__} must return one tensor, got {len(carried)}")
        return carried[0]
