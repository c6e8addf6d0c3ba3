"""Scales from histories, against plain Python numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphstep.errors import ConfigError
from graphstep.models.delayed_scaling import DelayedScaling, begin_step, note_amax, quantise

YES, NO = torch.tensor(True), torch.tensor(False)


def state(history: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(history).unsqueeze(1), torch.tensor([5.0]), torch.tensor([448.0])


@pytest.mark.parametrize(
    ("algorithm", "history", "scale"),
    [
        ("max", [2.0, 8.0, 4.0], 56.0),
        ("most_recent", [2.0, 8.0, 4.0], 224.0),
        ("max", [0.0, 0.0, 0.0], 5.0),
        ("most_recent", [0.0, 8.0, 4.0], 5.0),
        ("max", [2.0, math.inf, 4.0], 5.0),
        ("max", [2.0, math.nan, 4.0], 5.0),
        ("most_recent", [2.0, math.nan, 4.0], 224.0),
        ("max", [1e-45], torch.finfo(torch.float32).max),
    ],
)
def test_the_scale_follows_from_the_history(algorithm: Any, history: list[float], scale: float) -> None:
    entries, scales, target = state(history)
    begin_step(entries, scales, target, YES, algorithm)
    assert scales.item() == scale
    assert entries[0].item() == 0.0
    torch.testing.assert_close(entries[1:, 0], torch.tensor(history[:-1]), equal_nan=True, rtol=0, atol=0)


def test_within_a_step_nothing_changes() -> None:
    entries, scales, target = state([2.0, 8.0])
    begin_step(entries, scales, target, NO, "max")
    assert (scales.item(), entries.flatten().tolist()) == (5.0, [2.0, 8.0])


def test_the_running_entry_keeps_the_largest_value() -> None:
    history = torch.tensor([[1.0, 2.0], [9.0, 9.0]])
    for values in ([-3.0, 1.0], [2.0, 0.5], [-3.0, 1.0]):
        note_amax(history, 1, torch.tensor(values))
    assert history.tolist() == [[1.0, 3.0], [9.0, 9.0]]


def test_values_beyond_the_range_become_the_largest_ones() -> None:
    values = torch.tensor([1.0, 300.0, -1e30, math.inf])
    for dtype, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        found = quantise(values, torch.tensor(1000.0), dtype).float().tolist()
        assert found[1:] == [largest, -largest, largest]
        assert found[0] == torch.tensor(1000.0).clamp(max=largest).to(dtype).item()
        assert quantise(torch.tensor([math.nan]), torch.tensor(1.0), dtype).float().isnan().all()


def test_targets_and_formats() -> None:
    hybrid, e4m3 = DelayedScaling(margin=2), DelayedScaling(fp8_format="e4m3")
    assert hybrid.backward_dtype is torch.float8_e5m2
    assert hybrid.target(hybrid.backward_dtype) == 57344.0 / 4
    assert e4m3.backward_dtype is torch.float8_e4m3fn
    assert e4m3.target(e4m3.forward_dtype) == 448.0


def test_all_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        DelayedScaling(fp8_format="e3m4", margin=-1, amax_history_len=0, amax_compute_algo="mean")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 4


def test_a_recipe_with_the_same_attributes_is_taken() -> None:
    given = SimpleNamespace(
        fp8_format=SimpleNamespace(name="E4M3"), margin=1.0, amax_history_len=4, amax_compute_algo="most_recent"
    )
    assert DelayedScaling.of(given) == DelayedScaling(
        fp8_format="e4m3", margin=1, amax_history_len=4, amax_compute_algo="most_recent"
    )
    given.amax_compute_algo = max
    with pytest.raises(ConfigError, match="amax_compute_algo"):
        DelayedScaling.of(given)
    with pytest.raises(ConfigError, match="it has no fp8_format, margin"):
        DelayedScaling.of(SimpleNamespace())
