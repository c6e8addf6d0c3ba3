"""Results that a loop keeps beyond its step, or until it has the next: never overwritten, and replayed all the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.strategies.attach.attached import Loop, twins
from tests.strategies.models import Decoder
from torch import Tensor, nn

THREE = partial(Decoder, 3, 0.1)


def keep_from(loop: Loop, layer: int, kept: list[Tensor], at_most: int) -> None:
    """Keep what a layer returns; the loop notes what the oldest ones are by then."""

    def keep(_module: nn.Module, _inputs: object, result: Tensor) -> None:
        kept.append(result.detach())
        del kept[:-at_most]

    loop.model.layers[layer].register_forward_hook(keep)


@pytest.mark.parametrize("at_most", [1, 3, 100])
@pytest.mark.parametrize("layer", range(3))
def test_what_a_hook_keeps_is_never_overwritten(device: torch.device, layer: int, at_most: int) -> None:
    def script(loop: Loop) -> None:
        kept: list[Tensor] = []
        keep_from(loop, layer, kept, at_most)
        for length in (6, 6, 9, 6, 9, 9, 6, 6, 9):
            loop.step(length=length)
            loop.kept.extend(kept)
            loop.kept.append(torch.cat([each.flatten() for each in kept]))
            if at_most < 100:
                del loop.kept[-len(kept) - 1 : -1]  # Only what they were: they may go now.

    twins(device, script, build=THREE, config={"capture_after": 1})


@pytest.mark.parametrize("layer", range(3))
def test_a_result_that_lives_until_the_next_one_gets_a_second_slot(device: torch.device, layer: int) -> None:
    def script(loop: Loop) -> None:
        keep_from(loop, layer, [], 1)
        for _ in range(8):
            loop.step()

    loop = twins(device, script, build=THREE, config={"capture_after": 1})
    assert [row.num_slots for row in loop.report.rows][: layer + 1] == [2] * (layer + 1)
    # One step is observed for each slot.
    assert loop.num_replays + loop.num_eager == 3 * 8
    assert loop.num_eager <= 3 * 2, loop.reasons()


def test_results_kept_for_ever_do_not_make_slots_for_ever(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        keep_from(loop, 1, loop.kept, 1000)
        for _ in range(8):
            loop.step()

    loop = twins(device, script, build=THREE, config={"capture_after": 1})
    assert all(row.num_slots <= 2 for row in loop.report.rows)


def test_what_is_kept_of_an_evicted_signature(device: torch.device) -> None:
    """Its memory may be that of a graph that was captured before and goes on."""

    def script(loop: Loop) -> None:
        kept: list[Tensor] = []
        keep_from(loop, 2, kept, 1)
        loop.step(length=6)
        loop.step(length=6)
        kept.clear()
        for length in (9, 9, 9):
            loop.step(length=length)
        loop.kept.extend(kept)
        for length in (4, 4, 4, 4, 6, 6, 6):
            kept.clear()
            loop.step(length=length)

    twins(device, script, build=THREE, config={"capture_after": 1, "max_signatures": 2})
