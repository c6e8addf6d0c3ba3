from __future__ import annotations

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphstep.errors import ConfigError, LifecycleError
from graphstep.inference.blocks import RESERVED_BLOCK, BlockPool, extend_keys


def keys_of(*tokens: int, size: int = 2) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, array("i", tokens), size)
    return keys


def test_keys_stand_for_all_tokens_up_to_the_end_of_the_block() -> None:
    assert len(keys_of(1, 2, 3, 4, 5)) == 2
    assert keys_of(1, 2, 3, 4)[0] == keys_of(1, 2, 9, 9)[0]
    assert keys_of(1, 2, 3, 4)[1] != keys_of(9, 2, 3, 4)[1]
    assert len({*keys_of(1, 1, 1, 1, 1, 1)}) == 3
    keys = keys_of(1, 2)
    extend_keys(keys, array("i", [1, 2, 3, 4]), 2)
    assert keys == keys_of(1, 2, 3, 4)


def test_all_or_nothing() -> None:
    pool = BlockPool(4, 2)
    assert pool.allocate(4) is None
    taken = pool.allocate(3)
    assert taken is not None
    assert sorted(taken) == [1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(taken)
    assert pool.num_available == pool.capacity == 3


def test_a_recorded_prefix_is_shared_and_outlives_its_holder() -> None:
    pool = BlockPool(8, 2)
    keys = keys_of(1, 2, 3, 4, 5, 6)
    first = pool.allocate(3) or []
    for key, block in zip(keys, first, strict=True):
        pool.record(key, block)
    assert pool.find(keys_of(1, 2, 3, 4, 9, 9)) == first[:2]
    pool.share(first[:2])
    pool.release(first)
    assert (pool.num_available, pool.num_idle) == (5, 1)
    assert pool.find(keys) == first
    pool.release(first[:2])
    assert (pool.num_available, pool.num_idle) == (7, 3)
    pool.share(pool.find(keys))
    assert (pool.num_available, pool.num_idle) == (4, 0)


def test_free_blocks_are_taken_before_idle_ones_and_those_from_the_end() -> None:
    pool = BlockPool(5, 2)
    keys = keys_of(1, 2, 3, 4)
    blocks = pool.allocate(2) or []
    for key, block in zip(keys, blocks, strict=True):
        pool.record(key, block)
    pool.release(blocks)
    assert set(pool.allocate(2) or []).isdisjoint(blocks)
    assert pool.find(keys) == blocks
    assert pool.allocate(1) == blocks[1:]
    assert pool.find(keys) == blocks[:1]
    assert pool.allocate(1) == blocks[:1]
    assert pool.find(keys) == []


def test_the_first_of_two_equal_blocks_is_the_one_to_find() -> None:
    pool = BlockPool(5, 2)
    first, second = pool.allocate(2) or []
    pool.record(b"a", first)
    pool.record(b"a", second)
    pool.release([second])
    assert pool.num_idle == 0
    assert pool.find([b"a"]) == [first]


def test_no_prefix_caching() -> None:
    pool = BlockPool(3, 2, prefix_caching=False)
    blocks = pool.allocate(1) or []
    pool.record(b"a", blocks[0])
    assert pool.find([b"a"]) == []


def test_forgetting() -> None:
    pool = BlockPool(4, 2)
    held, idle = pool.allocate(2) or []
    pool.record(b"a", held)
    pool.record(b"b", idle)
    pool.release([idle])
    pool.forget()
    assert pool.find([b"a"]) == pool.find([b"b"]) == []
    assert (pool.num_available, pool.num_idle, pool.epoch) == (2, 0, 1)
    pool.release([held])
    assert pool.num_available == 3


def test_misuse_is_refused() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(LifecycleError, match="held by nobody"):
        pool.release(blocks)
    with pytest.raises(LifecycleError, match="held by nobody"):
        pool.release([RESERVED_BLOCK])
    with pytest.raises(LifecycleError, match="can be shared"):
        pool.share(blocks)
    with pytest.raises(ConfigError) as caught:
        BlockPool(1, 0)
    assert len(caught.value.problems) == 2


class Pools(RuleBasedStateMachine):
    """A pool beside a plain count of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, 2)
        self.sequences: list[tuple[list[bytes], list[int]]] = []
        self.contents: dict[int, bytes] = {}

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def begin(self, tokens: list[int]) -> None:
        keys = keys_of(*tokens)
        found = self.pool.find(keys)
        assert [self.contents[block] for block in found] == keys[: len(found)]
        available = self.pool.num_available
        self.pool.share(found)
        needed = self.pool.blocks_for(len(tokens)) - len(found)
        fresh = self.pool.allocate(needed)
        if fresh is None:
            assert needed > self.pool.num_available
            self.pool.release(found)
            assert self.pool.num_available == available
            return
        assert RESERVED_BLOCK not in fresh
        held = {block for _, blocks in self.sequences for block in blocks}
        assert held.isdisjoint(fresh)
        blocks = found + fresh
        for key, block in zip(keys, blocks, strict=False):
            self.contents[block] = key
            self.pool.record(key, block)
        for block in blocks[len(keys) :]:
            self.contents.pop(block, None)
        self.sequences.append((keys, blocks))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.release(self.sequences.pop(index)[1])

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    @invariant()
    def every_block_is_held_or_available(self) -> None:
        held = {block for _, blocks in self.sequences for block in blocks}
        assert self.pool.num_available == self.pool.capacity - len(held)

    @invariant()
    def what_is_held_keeps_its_contents(self) -> None:
        for keys, blocks in self.sequences:
            assert [self.contents[block] for block in blocks[: len(keys)]] == keys


TestPools = Pools.TestCase
