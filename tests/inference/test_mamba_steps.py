"""Mamba layers over mixed steps against their forward over whole sequences."""

from __future__ import annotations

import pytest
import torch
from tests.inference.generation import LLAMA, MAMBA
from tests.inference.test_attention import filled, step_of
from tests.models.tiny import seeded

from graphstep.errors import CaptureError
from graphstep.inference.mamba_steps import mix_step
from graphstep.inference.shapes import BatchShape
from graphstep.inference.step import Step
from graphstep.models import WeightInitializer, initialize_weights
from graphstep.models.mamba import Mamba2


def build_mixer() -> Mamba2:
    mixer = Mamba2(LLAMA, MAMBA, chunk_size=4)
    initialize_weights(mixer, WeightInitializer(std=0.4, num_layers=1, generator=seeded()))
    return mixer


@torch.no_grad()
def test_parts_of_sequences_give_what_the_whole_gives() -> None:
    """Prompts in chunks and decode steps side by side, in slots that held something else before."""
    mixer, cpu = build_mixer(), torch.device("cpu")
    x_BSH = torch.randn(3, 20, 32, generator=seeded(2))
    wanted = mixer(x_BSH)
    states = mixer.new_states(4)
    for state in states:
        state.fill_(torch.nan)
    slots = [3, 1, 2]
    # For each step: the tokens of each sequence before it, and in it. Decode comes first.
    for parts in ([(0, 5), (0, 2)], [(5, 1), (2, 7), (0, 1)], [(6, 1), (9, 1), (1, 17)], [(7, 1), (10, 1), (18, 1)]):
        step = step_of(*parts)
        for index in range(len(parts)):
            step.state_slots[index] = slots[index]
        _as_scheduled(step, parts)
        rows = torch.cat([x_BSH[i, start : start + length] for i, (start, length) in enumerate(parts)])
        tokens = filled(step, BatchShape(len(rows) + 3, step.shape.prefill, step.shape.decode), cpu)
        padded = torch.cat([rows, torch.full((3, 32), torch.nan)])
        y = mix_step(mixer, padded, states, tokens, step)
        expected = torch.cat([wanted[i, start : start + length] for i, (start, length) in enumerate(parts)])
        torch.testing.assert_close(y[: len(rows)], expected, atol=1e-5, rtol=1e-5)
        assert not y[len(rows) :].any()


def _as_scheduled(step: Step, parts: list[tuple[int, int]]) -> None:
    """A prompt of one token is no decode request."""
    step.num_prefill = sum(start == 0 or length > 1 for start, length in parts)


@torch.no_grad()
def test_a_captured_step_of_padding_changes_no_real_state() -> None:
    mixer, cpu = build_mixer(), torch.device("cpu")
    states = mixer.new_states(4)
    for state in states:
        state.normal_()
    before = [state.clone() for state in states]
    step = step_of((3, 1), (4, 1))
    step.state_slots[0], step.state_slots[1] = 2, 3
    tensors = filled(step, BatchShape(4, 0, 4), cpu)
    mix_step(mixer, torch.randn(4, 32), states, tensors, None)
    for state, old in zip(states, before, strict=True):
        assert torch.equal(state[1], old[1])
        assert not torch.equal(state[2], old[2])


def test_prompts_are_not_captured() -> None:
    step = step_of((0, 5))
    tensors = filled(step, None, torch.device("cpu"))
    mixer = build_mixer()
    with pytest.raises(CaptureError, match="differ in length"):
        mix_step(mixer, torch.zeros(5, 32), mixer.new_states(2), tensors, None)
