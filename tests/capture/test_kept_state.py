"""Buffers that are put back when a region that ran ahead of its call turns out not to be called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphstep.capture.kept_state import KeptState
from graphstep.capture.region import Region
from graphstep.engine import torch_private
from graphstep.errors import LifecycleError


def pair_of(*written: Tensor, is_random: bool = False, **buffers: Tensor) -> Any:
    """What a pair knows after its warmup."""
    module = nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    region = Region("layers.1", "layer", lambda: None, (module,))
    contents = [torch_private.all_bytes(tensor) for tensor in written]
    return SimpleNamespace(region=region, observation=SimpleNamespace(written=contents, is_random=is_random))


def test_what_was_written_is_put_back() -> None:
    counts, total = torch.arange(4.0), torch.ones((), dtype=torch.int64)
    kept = KeptState.of(pair_of(counts, total, counts=counts, total=total))
    assert kept is not None
    kept.keep()
    counts.add_(1)
    total.add_(1)
    kept.note()
    versions = counts._version, total._version
    kept.undo()
    assert torch.equal(counts, torch.arange(4.0))
    assert int(total) == 1
    assert (counts._version, total._version) == versions  # Nobody has to look at them again.


def test_a_run_for_its_gradients_begins_with_the_old_values_and_leaves_the_new_ones() -> None:
    counts = torch.zeros(3)
    kept = KeptState.of(pair_of(counts, counts=counts))
    assert kept is not None
    kept.keep()
    counts.add_(2)
    with kept.put_back():
        assert torch.equal(counts, torch.zeros(3))
        counts.add_(2)
    assert torch.equal(counts, torch.full((3,), 2.0))


def test_what_somebody_has_written_since_is_not_overwritten() -> None:
    counts = torch.zeros(3)
    kept = KeptState.of(pair_of(counts, counts=counts))
    assert kept is not None
    kept.keep()
    counts.add_(1)
    kept.note()
    counts.zero_()
    with pytest.raises(LifecycleError) as caught:
        kept.undo()
    assert caught.value.where == "layers.1"
    assert torch.equal(counts, torch.zeros(3))


def _others() -> dict[str, Any]:
    whole, small, large = torch.zeros(8), torch.zeros(2), torch.zeros(1 << 20)
    return {
        "no buffer of the region": pair_of(small),
        "a part of a larger storage": pair_of(whole, part=whole[:4]),
        "too large to copy each time": pair_of(large, large=large),
        "random numbers": pair_of(small, is_random=True, small=small),
    }


@pytest.mark.parametrize("name", _others())
def test_what_cannot_be_put_back(name: str) -> None:
    assert KeptState.of(_others()[name]) is None
