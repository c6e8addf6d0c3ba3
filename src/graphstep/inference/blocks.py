"""Blocks of the key-value cache: who holds them, and which ones keep prefixes that others can share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from graphstep.errors import ConfigError, LifecycleError, Problem

RESERVED_BLOCK = 0
"""Belongs to no request. What padding writes goes here, and nobody reads it."""


def extend_keys(keys: list[bytes], tokens: array[int], block_size: int) -> None:
    """Append the keys of the full blocks of ``tokens`` that ``keys`` has none for.

    A key stands for the tokens of its block and of all before it. It is a cryptographic hash: two prefixes of equal
    keys would make one request read the cache of another.
    """
    width = block_size * tokens.itemsize
    view = memoryview(tokens).cast("B")
    for index in range(len(keys), len(tokens) // block_size):
        above = keys[index - 1] if index else b""
        keys.append(hashlib.blake2b(view[index * width : (index + 1) * width], digest_size=16, key=above).digest())


def blocks_kept_free(capacity: int) -> int:
    """Return how many blocks stay free when a request joins others: those that run would soon take back what it got."""
    return max(1, capacity // 100)


class BlockPool:
    """Hands out blocks, counts who holds each, and remembers blocks whose contents can serve others.

    A block is free (no contents of use), idle (held by nobody, findable by its key) or held (by one request or
    several). Idle blocks are taken when there are no free ones, the one that was released longest ago first.

    Args:
        num_blocks: blocks of the cache, the reserved one included.
        block_size: tokens of a block.
        prefix_caching: keep what released blocks contain.

    Raises:
        ConfigError: fewer than two blocks, or blocks of no tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        problems = [
            Problem(
                code="block-pool",
                what=f"{name} must be at least {least}, got {value}",
                where=f"BlockPool({name})",
                fix="give the key-value cache more memory, or use smaller blocks",
            )
            for name, value, least in (("num_blocks", num_blocks, 2), ("block_size", block_size, 1))
            if value < least
        ]
        if problems:
            raise ConfigError(problems)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.epoch = 0
        """How often all contents have been forgotten: what was computed in an earlier epoch must not be recorded."""
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, RESERVED_BLOCK, -1))
        self._idle: dict[int, None] = {}
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """Blocks that requests can hold."""
        return len(self._holders) - 1

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and whose contents can be found."""
        return len(self._idle)

    def in_use(self) -> list[int]:
        """Blocks with contents that somebody may still read."""
        return [block for block, holders in enumerate(self._holders) if holders or block in self._idle]

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that so many tokens lie in."""
        return -(-num_tokens // self.block_size)

    def allocate(self, number: int) -> list[int] | None:
        """Take blocks for a new holder, or none at all if there are too few."""
        if number > self.num_available:
            return None
        taken = []
        for _ in range(number):
            if self._free:
                block = self._free.pop()
            else:
                block = next(iter(self._idle))
                del self._idle[block]
                del self._block_of[self._key_of.pop(block)]
            self._holders[block] = 1
            taken.append(block)
        return taken

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix of these keys. They are not held yet: see `share`."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Become one more holder of blocks that `find` returned."""
        for block in blocks:
            if self._holders[block] == 0:
                if block not in self._idle:
                    raise LifecycleError(
                        f"block {block} holds nothing that can be shared",
                        where="BlockPool.share",
                        fix="share what find() returns before anything else is taken from the pool",
                    )
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of the blocks of a sequence, given in its order."""
        # The last goes first: without those before it, nobody can find it.
        for block in reversed(blocks):
            holders = self._holders[block]
            if holders == 0 or block == RESERVED_BLOCK:
                raise LifecycleError(
                    f"block {block} is held by nobody",
                    where="BlockPool.release",
                    fix="release the blocks of a request once",
                )
            self._holders[block] = holders - 1
            if holders == 1:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def record(self, key: bytes, block: int) -> None:
        """Make the contents of a held block findable, unless another block has them already."""
        if self.prefix_caching and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self) -> None:
        """Forget all contents, as after a change of weights. Blocks that are held stay so."""
        self.epoch += 1
        self._free.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()
