"""Callables whose results need no gradient run eagerly, and nothing waits for their backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tests.strategies.callables.jobs import Block, Job, compared
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, ConfigError


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


class Target(nn.Module):
    """Has weights, and computes without their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x)
        return result


@pytest.mark.parametrize("first", [0, 1])
def test_results_without_gradient_though_weights_want_one(device: torch.device, first: int) -> None:
    """That is known at the capture only: what was captured before is captured again."""
    calls = []

    def note() -> None:
        calls.append("before")

    def script(job: Job) -> None:
        callables = [job.built(Target), job.built(Block), job.built(Target)][first:]
        samples = ((job.sample(requires_grad=True),),) * len(callables)
        with (
            pytest.warns(UserWarning, match=r"\(Target\)(, .* \(Target\))? will run eagerly")
            if job.graphs
            else nullcontext()
        ):
            job.graphed(tuple(callables), samples, allow_unused_input=True, pre_warmup_hook=note)
        *targets, _ = [each for each in callables if isinstance(each, Target)] + [None]

        def step(x: Tensor) -> Tensor:
            trained = next(each for each in callables if isinstance(each, Block))
            result: Tensor = trained(x) - torch.stack([target(x) for target in targets]).sum(0)
            return result

        job.train(step)

    job = compared(device, script)
    assert job.reasons() == {"no-gradient": 5 * (2 - first)}
    assert calls == ["before"]


@pytest.mark.parametrize("allows_unused", [False, True])
def test_nothing_but_results_without_gradient(device: torch.device, allows_unused: bool) -> None:
    target = Target().to(device)
    with pytest.raises(CaptureError, match=r"\bno result .*needs? ") as caught:
        graphstep.make_graphed_callables(target, (torch.randn(3, 8, device=device),), allow_unused_input=allows_unused)
    assert "callables[0] (Target)" in str(caught.value)
    assert "outside of no_grad()" in caught.value.fix
    assert ("allow_unused_input=True" in caught.value.fix) != allows_unused
    assert "forward" not in target.__dict__
    assert int(target.block.num_calls) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_mode_that_is_off_is_told(device: torch.device, mode: type[torch.no_grad]) -> None:
    linear = nn.Linear(4, 4, device=device)
    with mode(), pytest.raises(ConfigError, match="grad mode is off") as caught:
        graphstep.make_graphed_callables(linear, (torch.randn(2, 4, device=device),))
    assert [problem.code for problem in caught.value.problems] == ["graphed-callables-grad-mode"]
