"""Hooks of modules: those of the captured module run at each replay, those inside of it when it is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.strategies.callables.jobs import DTYPES, HIDDEN, Block, Job, compared
from torch import Tensor, nn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("when", ["before the capture", "after the capture"])
def test_forward_hooks_of_the_module_itself_run_at_each_replay(
    device: torch.device, dtype: torch.dtype, when: str
) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        seen: list[str] = []

        def before(_module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            seen.append("before")
            return (given[0] * (len(seen) + 1),)

        def after(_module: nn.Module, _given: Any, result: Tensor) -> Tensor:
            seen.append("after")
            return result + len(seen)

        def register() -> None:
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)

        if when == "before the capture":
            register()
        given = job.graphed(module, (job.sample(requires_grad=True),))
        if when == "after the capture":
            register()
        assert seen == []
        job.train(given, num_microbatches=2)
        assert seen == ["before", "after"] * 10

    compared(device, script, dtype=dtype, replays=10)


def test_forward_hooks_with_keywords(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        names: list[str] = []

        def before(_module: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
            names.extend(named)
            return arguments, {"x": named["x"] * 2}

        module.register_forward_pre_hook(before, with_kwargs=True)
        given = job.graphed(module, (), sample_kwargs={"x": job.sample(requires_grad=True)})
        job.train(lambda x: given(x=x))
        assert names == ["x"] * 5

    compared(device, script, replays=5)


def test_hook_that_changes_the_shape_is_refused_like_a_call(device: torch.device) -> None:
    """What the hook returns is what the graph is given."""

    def script(job: Job) -> None:
        module = job.built(Block)
        given = job.graphed(module, (job.sample(requires_grad=True),))
        module.register_forward_pre_hook(lambda _module, arguments: (arguments[0][:3],))
        job.train(given, lambda: (job.draw(6, HIDDEN, requires_grad=True),))

    compared(device, script, replays=5)


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
def test_hooks_inside_are_captured(device: torch.device, kind: str) -> None:
    num_calls: list[int] = []

    def script(job: Job) -> None:
        module = job.built(Block)

        def pre(_module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            num_calls.append(1)
            return (given[0] * 2,)

        def post(_module: nn.Module, _given: Any, result: Tensor) -> Tensor:
            num_calls.append(1)
            return result * 3

        getattr(module.up, kind)(pre if kind == "register_forward_pre_hook" else post)
        given = job.graphed(module, (job.sample(requires_grad=True),))
        num_calls.clear()
        job.train(given)
        assert len(num_calls) == (0 if job.graphs else 5)

    compared(device, script, replays=5)


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
def test_hook_added_inside_after_the_capture_is_not_lost(device: torch.device, kind: str) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        given = job.graphed(module, (job.sample(requires_grad=True),))
        job.train(given, num_steps=2)
        seen: list[int] = []
        handle = getattr(module.up, kind)(lambda *_: seen.append(1))
        job.train(given, num_steps=3)
        assert len(seen) == 3
        handle.remove()
        job.train(given, num_steps=2)

    job = compared(device, script, replays=4)
    assert sum(job.reasons().values()) == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("when", ["before the capture", "after the capture"])
def test_full_backward_hooks_of_the_module_itself_run_at_each_backward(
    device: torch.device, dtype: torch.dtype, when: str
) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        seen: list[Tensor] = []

        def before(_module: nn.Module, gradients: Any) -> Any:
            seen.extend(gradient.clone() for gradient in gradients)
            return tuple(gradient * 2 for gradient in gradients)

        def after(_module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> Any:
            seen.extend(gradient.clone() for gradient in (*grad_inputs, *grad_outputs))
            return tuple(gradient + 1 for gradient in grad_inputs)

        def register() -> None:
            module.register_full_backward_pre_hook(before)
            module.register_full_backward_hook(after)

        if when == "before the capture":
            register()
        given = job.graphed(module, (job.sample(requires_grad=True),))
        if when == "after the capture":
            register()
        assert not seen
        job.train(given)
        job.note(seen=seen)
        assert len(seen) == 15

    compared(device, script, dtype=dtype, replays=5)


def test_full_backward_hook_inside_either_changes_the_gradient_or_is_refused(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        module.up.register_full_backward_hook(lambda _m, grad_inputs, _o: tuple(g * 2 for g in grad_inputs))
        given = job.graphed(module, (job.sample(requires_grad=True),))
        job.train(given)

    compared(device, script, replays=5)


def test_full_backward_hook_inside_with_side_effects_runs_at_the_capture_only(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        seen: list[int] = []
        module.up.register_full_backward_hook(lambda *_: seen.append(1))
        given = job.graphed(module, (job.sample(requires_grad=True),))
        seen.clear()
        job.train(given)
        assert len(seen) == (0 if job.graphs else 5)

    compared(device, script, replays=5)


def test_hooks_on_results_and_arguments(device: torch.device) -> None:
    def script(job: Job) -> None:
        given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
        seen: list[Tensor] = []
        for _ in range(5):
            x = job.draw(requires_grad=True)
            x.register_hook(lambda gradient: seen.append(gradient.clone()))
            y = given(x)
            y.register_hook(lambda gradient: gradient * 2)
            y.retain_grad()
            y.square().sum().backward()
            job.note(x=x, seen=seen, retained=y.grad)
            del y

    compared(device, script, replays=5)


def test_with_an_order_hooks_of_the_module_run_at_each_replay(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        seen: list[int] = []
        module.register_forward_hook(lambda *_: seen.append(1))
        module.register_forward_pre_hook(lambda _module, arguments: (arguments[0] * 2,))
        (given,) = job.graphed(module, ((job.sample(requires_grad=True),),), _order=[1, -1])
        seen.clear()
        job.train(given)
        assert len(seen) == 5

    compared(device, script, replays=5)
