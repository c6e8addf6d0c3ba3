"""Mamba-2 layers. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig(Section):
    """Sizes of the state-space layers. The inner width is ``heads * head_dim``, twice the hidden size by default.

    Raises:
        ConfigError: values out of range or that contradict each other; all problems at once.
    """

    mamba_state_dim: int = 128
    """Numbers of state for each channel."""
    mamba_head_dim: int = 64
    """Channels of one head, which share a decay."""
    mamba_num_groups: int = 8
    """Groups of heads that share their input and output projections of the state."""
    mamba_num_heads: int | None = None
    """Heads. None: so many that the inner width is twice the hidden size."""

    def num_heads(self, hidden_size: int) -> int:
        """Heads of a layer in a model of this width."""
        return 2 * hidden_size // self.mamba_head_dim if self.mamba_num_heads is None else self.mamba_num_heads
