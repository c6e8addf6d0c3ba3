"""Memory of keys, values and states: how much, where, and what survives an offload."""

from __future__ import annotations

import pytest
import torch
from tests.inference.generation import build_model

from graphstep.errors import ConfigError, LifecycleError
from graphstep.inference.cache import CacheShape, InferenceCache


def test_sizes_follow_from_the_layers() -> None:
    llama, hybrid = CacheShape.of(build_model("llama")), CacheShape.of(build_model("hybrid"))
    assert llama.block_bytes(4) == 2 * 2 * 4 * 2 * 8 * 4  # layers, keys and values, tokens, groups, channels, bytes
    assert llama.slot_bytes() == 0
    assert hybrid.block_bytes(4) * 2 == llama.block_bytes(4), "one of its four layers attends"
    assert hybrid.slot_bytes() > 0


def test_blocks_fill_the_budget_beside_the_states() -> None:
    shape = CacheShape.of(build_model("hybrid"))
    budget = 10 * shape.block_bytes(4) + 5 * shape.slot_bytes()
    assert shape.num_blocks(budget, 4, max_requests=4) == 10
    with pytest.raises(ConfigError, match="hold no block"):
        shape.num_blocks(budget, 4, max_requests=50)


def test_allocated_bytes_are_those_of_the_sizes() -> None:
    shape = CacheShape.of(build_model("hybrid"))
    cache = InferenceCache(shape, 10, 4, 3, "cpu")
    assert cache.nbytes == 10 * shape.block_bytes(4) + 4 * shape.slot_bytes()
    assert cache.pages.shape == (1, 2, 10, 4, 2, 8)


def test_an_offload_keeps_the_blocks_in_use_and_all_states() -> None:
    cache = InferenceCache(CacheShape.of(build_model("hybrid")), 6, 4, 2, "cpu")
    cache.pages.normal_()
    for pair in cache.states:
        for state in pair:
            state.normal_()
    pages, states = cache.pages.clone(), [state.clone() for pair in cache.states for state in pair]
    cache.offload([2, 5])
    assert not cache.is_allocated
    assert cache.nbytes == 0
    with pytest.raises(LifecycleError, match="no memory"):
        _ = cache.pages
    cache.allocate()
    assert torch.equal(cache.pages[:, :, [2, 5]], pages[:, :, [2, 5]])
    assert not cache.pages[:, :, [0, 1, 3, 4]].any()
    assert all(torch.equal(a, b) for a, b in zip(states, [s for pair in cache.states for s in pair], strict=True))
