from __future__ import annotations

import math
import struct
from array import array
from typing import Any

import pytest
import torch

from graphstep.errors import RequestError
from graphstep.inference.requests import (
    SAMPLING_FORMAT,
    DrawNeeds,
    Request,
    SamplingParams,
    draw_key,
    later_seed,
    token_array,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", 1e300),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop_tokens", ("a",)),
        ("stop_tokens", None),
        ("stop_tokens", 3),
        ("stop_tokens", "3"),
    ],
)
def test_settings_out_of_range(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == [name]
    assert repr(value) in str(caught.value)


def test_all_problems_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_new_tokens=0, temperature=-1, top_k=-1, top_p=2, seed=2**64, logprobs=99)
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize(
    ("settings", "is_greedy", "is_filtered"),
    [
        ({}, False, False),
        ({"temperature": 0}, True, False),
        ({"temperature": 0, "top_k": 4}, True, False),
        ({"top_k": 4}, False, True),
        ({"top_p": 0.9}, False, True),
    ],
)
def test_what_drawing_takes(settings: dict[str, Any], is_greedy: bool, is_filtered: bool) -> None:
    chosen = SamplingParams(**settings)
    assert (chosen.is_greedy, chosen.is_filtered) == (is_greedy, is_filtered)


def test_needs_of_several_requests() -> None:
    greedy, plain = SamplingParams(temperature=0), SamplingParams(logprobs=0)
    filtered, top = SamplingParams(top_k=3), SamplingParams(temperature=0, logprobs=5)
    assert DrawNeeds.of_flags([]) == DrawNeeds()
    assert DrawNeeds.of_flags([greedy.draw_flags]) == DrawNeeds()
    assert DrawNeeds.of_flags([plain.draw_flags, greedy.draw_flags]) == DrawNeeds(True, False, True, 0)
    assert DrawNeeds.of_flags([filtered.draw_flags]) == DrawNeeds(True, True, False, 0)
    assert DrawNeeds.of_flags([filtered.draw_flags, top.draw_flags]) == DrawNeeds(True, True, True, 5)


def test_packed_settings() -> None:
    packed = SamplingParams(temperature=0.5, top_p=0.25, top_k=2**40, seed=-7).packed(3)
    assert struct.unpack(SAMPLING_FORMAT, packed) == (draw_key(-7), 0.5, 0.25, 2**31 - 1, 0)
    assert struct.unpack(SAMPLING_FORMAT, SamplingParams().packed(3)) == (draw_key(3), 1.0, 1.0, 0, 0)


def test_a_temperature_that_devices_take_for_0_is_0() -> None:
    """Dividing by what is no number of 32 bits would give logits that are not finite."""
    for temperature in (5e-324, 1e-320, 1e-40):
        assert struct.unpack(SAMPLING_FORMAT, SamplingParams(temperature=temperature).packed(3))[1] == 0
    assert struct.unpack(SAMPLING_FORMAT, SamplingParams(temperature=1e6).packed(3))[1] == 1e6


@pytest.mark.parametrize(
    "prompt", [[1, 2], (1, 2), range(1, 3), array("q", [1, 2]), torch.tensor([1, 2]), torch.tensor([1, 2]).numpy()]
)
def test_prompts_of_any_kind(prompt: Any) -> None:
    assert token_array(prompt) == array("i", [1, 2])


@pytest.mark.parametrize("prompt", ["ab", b"ab", [1.5], ["a"], None, 3, [[1]], [2**31], [2**70], torch.ones(2, 2)])
def test_prompts_that_are_no_tokens(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        token_array(prompt)
    assert caught.value.problems[0].code == "request-tokens"


def test_seeds_in_a_row() -> None:
    assert [later_seed(2**63 - 2, number) for number in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert later_seed(-(2**63), 0) == -(2**63)


def test_draw_keys_differ_and_are_signed() -> None:
    keys = [draw_key(seed) for seed in (*range(-500, 500), 2**63 - 1, -(2**63))]
    assert len({key % 2**32 for key in keys}) == len({key >> 32 for key in keys}) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert 400 < sum(key < 0 for key in keys) < 600


def test_output_is_what_follows_the_prompt() -> None:
    request = Request(0, array("i", [5, 6, 7]), 2, SamplingParams(), 10, b"")
    assert request.output_tokens == [7]
    assert not request.is_finished
