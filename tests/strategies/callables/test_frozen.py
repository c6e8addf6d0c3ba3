"""Callables whose results need no gradient run eagerly, and nothing waits for their backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tests.strategies.callables.jobs import Block, Job, compared
from torch import nn

import graphstep
from graphstep.errors import CaptureError


def test_a_frozen_callable_runs_eagerly_with_a_warning(device: torch.device) -> None:
    """It has no turns: neither the order nor `backward_dw` waits for it."""

    def script(job: Job) -> None:
        first, second = job.built(Block).requires_grad_(False), job.built(Block)
        order = [1, 1, -1, -1.5, -1, -1.5]
        samples = [(job.sample(),), (job.sample(),)] * 2
        with (
            pytest.warns(UserWarning, match=r"callables\[0\] \(Block\) will run eagerly")
            if job.graphs
            else nullcontext()
        ):
            calls = job.graphed((first, second), samples, _order=order)
        for _ in range(3):
            losses = [calls[n + 1](calls[n](job.draw()).detach()).square().sum() for n in (0, 2)]
            for number, loss in enumerate(losses):
                loss.backward()
                for call in reversed(calls[2 * number : 2 * number + 2]):
                    if job.graphs:
                        call.backward_dw()
            job.note(losses=losses)

    job = compared(device, script, replays=6)
    assert job.reasons() == {"no-gradient": 6}


def test_nothing_but_frozen_callables_is_an_error(device: torch.device) -> None:
    frozen = nn.Linear(4, 4, device=device).requires_grad_(False)
    with pytest.raises(CaptureError, match=r"no result of callables\[0\] \(Linear\) needs a gradient"):
        graphstep.make_graphed_callables(frozen, (torch.randn(2, 4, device=device),))
    assert "forward" not in frozen.__dict__
