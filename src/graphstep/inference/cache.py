"""Memory that outlives a step: keys and values in blocks, and the recurrent states of Mamba layers in slots.

Shapes: A layers with attention, M Mamba layers, G query groups, D channels of a head, K width of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphstep.errors import ConfigError, LifecycleError, Problem
from graphstep.inference.blocks import RESERVED_BLOCK, blocks_kept_free
from graphstep.models import GPTModel
from graphstep.models.attention import Attention
from graphstep.models.mamba import Mamba2


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """What a model keeps for each token and each sequence."""

    num_attention_layers: int
    num_groups: int
    channels: int
    dtype: torch.dtype
    mixers: tuple[Mamba2, ...]

    @classmethod
    def of(cls, model: GPTModel) -> CacheShape:
        """Read it from a model's layers."""
        attentions = [module for module in model.layers.modules() if isinstance(module, Attention)]
        config = model.config
        dtype = attentions[0].qkv.weight.dtype if attentions else model.embedding.weight.dtype
        return cls(
            num_attention_layers=len(attentions),
            num_groups=config.num_query_groups,
            channels=config.kv_channels,
            dtype=dtype,
            mixers=tuple(module for module in model.layers.modules() if isinstance(module, Mamba2)),
        )

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block, all layers together."""
        numbers = self.num_attention_layers * 2 * block_size * self.num_groups * self.channels
        return numbers * self.dtype.itemsize

    def slot_bytes(self) -> int:
        """Bytes of the states of one sequence, all layers together."""
        return sum(state.nbytes for mixer in self.mixers for state in mixer.new_states(1))

    def num_blocks(self, budget_bytes: int, block_size: int, max_requests: int) -> int:
        """Return the blocks that fit a budget beside the states, the reserved one included.

        Raises:
            ConfigError: there is no room for a block that requests could use.
        """
        each = self.block_bytes(block_size)
        states = self.slot_bytes() * (max_requests + 1)
        number = _blocks_beside(states, each, budget_bytes)
        if number < 2:
            raise ConfigError(
                Problem(
                    code="inference-cache-memory",
                    what=f"{budget_bytes / 1e9:.3f} GB hold no block of {block_size} tokens ({each / 1e9:.3f} GB, one "
                    f"more is reserved) beside {states / 1e9:.3f} GB of recurrent states",
                    where="--inference-dynamic-batching-buffer-size-gb",
                    fix="give the cache more memory, or use smaller blocks or fewer requests",
                )
            )
        return number

    def num_requests(self, budget_bytes: int, block_size: int, blocks_each: int, most: int) -> int:
        """Return the requests that fit a budget with all their blocks and states, side by side; 1 to ``most``."""
        each, slot = self.block_bytes(block_size), self.slot_bytes()

        def fit(number: int) -> bool:
            return requests_of(_blocks_beside(slot * (number + 1), each, budget_bytes), blocks_each) >= number

        return next((number for number in range(most, 1, -1) if fit(number)), 1)


def requests_of(num_blocks: int, blocks_each: int) -> int:
    """Return how many requests of so many blocks the scheduler lets run side by side; the reserved block is counted."""
    capacity = num_blocks - 1
    return max(1, (capacity - blocks_kept_free(capacity)) // blocks_each)


def _blocks_beside(states_bytes: int, block_bytes: int, budget_bytes: int) -> int:
    # Without attention a block costs nothing, and limits nothing.
    return (budget_bytes - states_bytes) // block_bytes if block_bytes else 2**20


class InferenceCache:
    """Owns the memory. Its addresses stay from one `allocate` to the next.

    Block 0 and slot 0 are reserved: what padding writes goes there, and nothing of it reaches a real row.

    Args:
        shape: of the model.
        num_blocks: the reserved one included.
        block_size: tokens of a block.
        num_slots: sequences that keep states, without the reserved one.
        device: where it lies.
    """

    def __init__(
        self, shape: CacheShape, num_blocks: int, block_size: int, num_slots: int, device: torch.device | str
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_slots = num_slots
        self._device = torch.device(device)
        self._pages: Tensor | None = None
        self._states: tuple[tuple[Tensor, Tensor], ...] = ()
        self._kept: tuple[list[int], Tensor, tuple[tuple[Tensor, Tensor], ...]] | None = None
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        """Is there memory?"""
        return self._pages is not None

    @property
    def pages(self) -> Tensor:
        """[A, 2, blocks, block_size, G, D]: keys, then values, of each layer.

        Raises:
            LifecycleError: the memory was released.
        """
        if self._pages is None:
            raise LifecycleError("the cache has no memory", where="InferenceCache", fix="resume() the engine first")
        return self._pages

    @property
    def states(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each Mamba layer [slots + 1, K - 1, convolved] and [slots + 1, heads, channels, state]."""
        return self._states

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        pages = 0 if self._pages is None else self._pages.nbytes
        return pages + sum(conv.nbytes + ssm.nbytes for conv, ssm in self._states)

    def allocate(self) -> None:
        """Take the memory, filled with zeros, or with what `offload` has kept."""
        shape = self.shape
        size = (shape.num_attention_layers, 2, self.num_blocks, self.block_size, shape.num_groups, shape.channels)
        pages = torch.zeros(size, dtype=shape.dtype, device=self._device)
        states = tuple(mixer.new_states(self._num_slots + 1) for mixer in shape.mixers)
        if self._kept is not None:
            blocks, kept_pages, kept_states = self._kept
            if blocks:
                index = torch.tensor(blocks, device=self._device)
                pages.index_copy_(2, index, kept_pages.to(self._device))
            for (conv, ssm), (kept_conv, kept_ssm) in zip(states, kept_states, strict=True):
                conv.copy_(kept_conv)
                ssm.copy_(kept_ssm)
        self._pages, self._states, self._kept = pages, states, None

    def offload(self, blocks: Sequence[int]) -> None:
        """Copy these blocks and all states to the host, then let go of the memory. Waits for the copies."""
        wanted = [block for block in blocks if block != RESERVED_BLOCK]
        index = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        kept_pages = self.pages.index_select(2, index).cpu()
        # The states are copied even where they lie on the host already: the memory goes.
        kept_states = tuple((conv.to("cpu", copy=True), ssm.to("cpu", copy=True)) for conv, ssm in self._states)
        self.release()
        self._kept = (wanted, kept_pages, kept_states)

    def release(self) -> None:
        """Let go of the memory and of what is in it."""
        self._pages, self._states, self._kept = None, (), None
