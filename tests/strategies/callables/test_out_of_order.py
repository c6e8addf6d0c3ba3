"""Calls in another order than the one that was given: refused with what was expected, and what may go on after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.strategies.callables.jobs import Block, Job, compared
from torch import Tensor

from graphstep.errors import PlanError


def two_in_flight(job: Job, order: Sequence[float] = (1, 1, -1, -1), num_layers: int = 1, **options: Any) -> list[Any]:
    modules = tuple(job.built(Block) for _ in range(num_layers))
    samples = ((job.sample(requires_grad=True),),) * (num_layers * sum(entry == 1 for entry in order))
    calls: list[Any] = job.graphed(modules, samples, _order=list(order), **options)
    return calls


def backward(result: Tensor) -> None:
    result.square().sum().backward()


def one_step(job: Job, calls: Sequence[Callable[..., Tensor]]) -> None:
    results = [call(job.draw(requires_grad=True)) for call in calls]
    for result in results:
        backward(result)
    job.note()


def test_second_microbatch_first(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = two_in_flight(job)
    with pytest.raises(PlanError) as caught:
        calls[1](job.draw(requires_grad=True))
    assert "expected the forward of callables[0] (Block) for microbatch 0" in str(caught.value)
    assert "the forward of callables[0] (Block) for microbatch 1" in str(caught.value)
    assert "(chunk 0)" in str(caught.value)
    assert job.rows[0].num_replays == 0
    assert int(job.models[0].num_calls) == 0  # type: ignore[arg-type]
    one_step(job, calls)
    job.close()


def test_forward_where_a_backward_is_expected(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = two_in_flight(job)
    results = [call(job.draw(requires_grad=True)) for call in calls]
    with pytest.raises(PlanError, match=r"expected the backward of .* for microbatch 0.*, and the forward of"):
        calls[0](job.draw(requires_grad=True))
    for result in results:
        backward(result)  # Nothing is lost.
    one_step(job, calls)
    job.close()


def test_backwards_in_the_wrong_order_change_no_gradient(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = two_in_flight(job)
    results = [call(job.draw(requires_grad=True)) for call in calls]
    with pytest.raises(
        PlanError, match=r"expected the backward of .* for microbatch 0.*the backward of .* microbatch 1"
    ):
        backward(results[1])
    assert all(parameter.grad is None for parameter in job.models[0].parameters())
    job.handles[0].reset()


def test_backward_where_a_forward_is_expected(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = two_in_flight(job)
    result = calls[0](job.draw(requires_grad=True))
    with pytest.raises(
        PlanError, match=r"expected the forward of .* for microbatch 1.*the backward of .* microbatch 0"
    ):
        backward(result)
    assert all(parameter.grad is None for parameter in job.models[0].parameters())
    job.handles[0].reset()


def test_wrong_chunk(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = two_in_flight(job, (1, 2, -2, -1), num_layers=2, _num_layers_per_chunk=[1, 1])
    with pytest.raises(PlanError, match=r"expected .*callables\[0\].*chunk 0.*callables\[1\].*chunk 1"):
        calls[1](job.draw(requires_grad=True))
    job.close()


def test_wrong_layer_of_a_chunk(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = two_in_flight(job, (1, -1), num_layers=2)
    with pytest.raises(PlanError, match=r"expected .*callables\[0\].*callables\[1\]"):
        calls[1](job.draw(requires_grad=True))
    job.close()


@pytest.mark.parametrize("num_done", [1, 2])
def test_a_step_that_was_given_up_may_begin_anew(device: torch.device, num_done: int) -> None:
    def script(job: Job) -> None:
        calls = two_in_flight(job)
        for _ in range(5):
            results = [call(job.draw(requires_grad=True)) for call in calls[:num_done]]
            results.clear()  # No backward will come.
            one_step(job, calls)

    compared(device, script, replays=5 * (2 + num_done))


def test_a_step_that_was_given_up_in_its_backwards_may_begin_anew(device: torch.device) -> None:
    def script(job: Job) -> None:
        calls = two_in_flight(job)
        for _ in range(5):
            results = [call(job.draw(requires_grad=True)) for call in calls]
            backward(results[0])
            results.clear()
            one_step(job, calls)

    compared(device, script, replays=20)


def test_after_an_error_between_forward_and_backward(device: torch.device) -> None:
    def script(job: Job) -> None:
        calls = two_in_flight(job)

        def failing_step() -> None:
            results = [call(job.draw(requires_grad=True)) for call in calls]
            assert not results, "something in the loop"

        for _ in range(5):
            with pytest.raises(AssertionError, match="something in the loop"):
                failing_step()
            one_step(job, calls)

    compared(device, script, replays=20)


def test_after_a_plan_error_the_order_may_begin_anew(device: torch.device) -> None:
    def script(job: Job) -> None:
        calls = two_in_flight(job)
        for _ in range(5):
            result = calls[0](job.draw(requires_grad=True))
            if job.graphs:
                with pytest.raises(PlanError, match="expected"):
                    calls[0](job.sample(requires_grad=True))
            del result
            one_step(job, calls)

    compared(device, script, replays=15)


def test_a_step_that_was_given_up_may_not_go_on_elsewhere(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = two_in_flight(job)
    calls[0](job.draw(requires_grad=True))  # Its result is dropped.
    calls[1](job.draw(requires_grad=True))
    with pytest.raises(PlanError, match=r"expected the backward of"):
        calls[1](job.draw(requires_grad=True))
    one_step(job, calls)
    job.close()


def test_without_an_order_a_second_forward_in_flight_is_refused(device: torch.device) -> None:
    """One set of memory serves one call: its results would be overwritten."""
    job = Job(device, True, torch.float32)
    given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
    first = given(job.draw(requires_grad=True))
    as_it_was = first.detach().clone()
    with pytest.raises(PlanError, match="needs its memory"):
        given(job.draw(requires_grad=True))
    assert torch.equal(first, as_it_was)
    first.sum().backward()
    del first
    given(job.draw(requires_grad=True)).sum().backward()
    job.close()


@pytest.mark.parametrize("turns", ["abcCBA", "abBcCA", "aAbBcC", "abcABC", "acCA", "bBaA"])
def test_without_an_order_any_order_that_keeps_memory_apart_is_as_eager(device: torch.device, turns: str) -> None:
    """Callables that were given together share memory in the order of the tuple; another order may be refused."""

    def script(job: Job) -> None:
        modules = tuple(job.built(Block) for _ in range(3))
        calls = job.graphed(modules, ((job.sample(requires_grad=True),),) * 3)
        for _ in range(5):
            results: dict[str, Tensor] = {}
            for turn in turns:
                if turn.islower():
                    results[turn] = calls["abc".index(turn)](job.draw(requires_grad=True))
                else:
                    backward(results.pop(turn.lower()))
            job.note()

    compared(device, script)


def test_without_an_order_a_forward_whose_memory_is_taken_is_refused(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    modules = tuple(job.built(Block) for _ in range(2))
    first, second = job.graphed(modules, ((job.sample(requires_grad=True),),) * 2)
    result = second(job.draw(requires_grad=True))
    with pytest.raises(PlanError, match=r"callables\[0\].*needs its memory"):
        first(job.draw(requires_grad=True))
    backward(result)
    backward(first(job.draw(requires_grad=True)))
    job.close()


@pytest.mark.parametrize("reuses", [True, False])
def test_result_of_a_microbatch_that_is_kept_runs_on_in_its_turn(device: torch.device, reuses: bool) -> None:
    def script(job: Job) -> None:
        calls = two_in_flight(job, _reuse_graph_input_output_buffers=reuses)
        kept: list[Tensor] = []
        for _ in range(6):
            results = [call(job.draw(requires_grad=True)) for call in calls]
            kept += [result.detach() for result in results]
            for result in results:
                backward(result)
            job.keep(*kept)
            del kept[:-2]
            job.note()

    compared(device, script)


def test_changed_attribute_runs_eagerly_in_its_turn(device: torch.device) -> None:
    def script(job: Job) -> None:
        calls = two_in_flight(job)
        one_step(job, calls)
        job.models[0].dropout.p = 0.5  # type: ignore[union-attr]
        for _ in range(3):
            one_step(job, calls)
        job.models[0].dropout.p = 0.2  # type: ignore[union-attr]
        one_step(job, calls)
        if job.graphs:
            with pytest.raises(PlanError, match="expected"):
                calls[1](job.sample(requires_grad=True))

    job = compared(device, script, replays=4)
    assert job.reasons() == {"changed-attribute": 6}
