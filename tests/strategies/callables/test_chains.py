"""Callables that take each other's results: read where they are, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.strategies.callables.delayed import delayed
from tests.strategies.callables.jobs import DTYPES, HIDDEN, Block, Job, compared
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphstep.errors import LifecycleError

NUM_LAYERS = 3
LARGE = (256, HIDDEN)
"""Results that are handed out as they are."""


class Copies(TorchDispatchMode):
    """Counts copies of arguments; those inside of replays are not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num += func.name() == "aten::copy_"
        return func(*args, **(kwargs or {}))


def samples_of(job: Job, layers: Sequence[nn.Module], *, linked: bool = True) -> list[tuple[Tensor]]:
    """For each layer, as the one before returns it."""
    x = job.sample(*LARGE, requires_grad=True)
    found = [(x,)]
    for layer in layers[:-1]:
        x = layer(x) if linked else job.sample(*LARGE, requires_grad=True)
        found.append((x,))
    return found


def chained(job: Job, *, linked: bool = True, order: Sequence[float] | None = None, **options: Any) -> list[Any]:
    layers = [job.built(Block) for _ in range(NUM_LAYERS)]
    with torch.random.fork_rng(devices=[0] if job.device.type == "cuda" else []):
        state = [value.clone() for layer in layers for value in layer.buffers()]
        samples = samples_of(job, layers, linked=linked)
        for value, before in zip((v for layer in layers for v in layer.buffers()), state, strict=True):
            value.copy_(before)
    if order is not None:
        num_microbatches = sum(entry == 1 for entry in order)
        made: list[Any] = job.graphed(tuple(layers), samples * num_microbatches, _order=list(order), **options)
        return made
    return list(job.graphed(tuple(layers), tuple(samples), **options))


def through(calls: Sequence[Any], x: Tensor) -> Tensor:
    for call in calls:
        x = call(x)
    return x


@pytest.mark.parametrize("order", [None, [1, -1], [1, -1, -1.5]])
@pytest.mark.parametrize(("linked", "expected"), [(True, 1), (False, NUM_LAYERS)])
def test_only_the_first_argument_is_copied(
    device: torch.device, order: list[float] | None, linked: bool, expected: int
) -> None:
    job = Job(device, True, torch.float32)
    calls = chained(job, linked=linked, order=order)
    for _ in range(3):
        x = job.draw(*LARGE, requires_grad=True)
        with Copies() as copies:
            result = through(calls, x)
        assert copies.num == expected
        result.sum().backward()
        del result
        for call in reversed(calls) if order is not None and -1.5 in order else ():
            call.backward_dw()
    assert [row.num_replays for row in job.rows] == [3] * NUM_LAYERS
    job.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [None, [1, 1, -1, -1], [1, 1, -1, 1, -1, -1], delayed([1, 1, -1, 1, -1, -1], 1)])
@pytest.mark.parametrize("accumulates", [True, False])
def test_bits_are_those_of_eager(
    device: torch.device, order: list[float] | None, accumulates: bool, dtype: torch.dtype
) -> None:
    def script(job: Job) -> None:
        options = {"_reuse_graph_input_output_buffers": True} if order is not None else {}
        calls = chained(job, order=order, accumulate_param_grads=accumulates, **options)
        optimizer = job.optimizer()
        for _ in range(4):
            optimizer.zero_grad()
            losses: list[Tensor] = []
            inputs: list[Tensor] = []
            counts = {1.0: 0, -1.0: 0, -1.5: 0}
            for entry in order or [1, -1]:
                number = counts[float(entry)]
                counts[float(entry)] += 1
                layers = calls[number * NUM_LAYERS : (number + 1) * NUM_LAYERS]
                if entry == 1:
                    inputs.append(job.draw(*LARGE, requires_grad=True))
                    losses.append(through(layers, inputs[-1]).float().square().mean())
                elif entry == -1:
                    losses[number].backward()
                    losses[number] = losses[number].detach()
                elif job.graphs:
                    for layer in reversed(layers):
                        layer.backward_dw()
            optimizer.step()
            job.note(inputs=inputs, losses=losses)

    job = compared(device, script, dtype=dtype)
    assert job.reasons() == {}


def test_something_between_two_callables(device: torch.device) -> None:
    """The argument is another tensor than the result that the sample was: that call runs eagerly."""

    def script(job: Job) -> None:
        first, second, third = chained(job)
        for step in range(4):
            x = job.draw(*LARGE, requires_grad=True)
            hidden = first(x)
            if step % 2:
                hidden = hidden * 2
            hidden = second(hidden)
            result = third(hidden)
            del hidden
            result.square().mean().backward()
            job.note(x=x, result=result)
            del result

    job = compared(device, script)
    assert job.reasons() == {"place-in-use": 2}


def test_results_between_that_are_kept(device: torch.device) -> None:
    def script(job: Job) -> None:
        calls = chained(job)
        kept: list[tuple[Tensor, Tensor]] = []
        for _ in range(7):
            x = job.draw(*LARGE, requires_grad=True)
            given = x
            for call in calls:
                x = call(x)
                kept.append((x.detach(), x.detach().clone()))
            x.square().mean().backward()
            assert all(torch.equal(tensor, as_it_was) for tensor, as_it_was in kept)
            del kept[:-NUM_LAYERS]
            job.note(x=given)

    job = compared(device, script)
    assert sum(row.num_replays for row in job.rows) >= 3 * NUM_LAYERS


def test_each_callable_by_itself(device: torch.device) -> None:
    """Nothing is in flight: its argument is copied over a result that nobody reads any more."""

    def script(job: Job) -> None:
        calls = chained(job)
        for _ in range(3):
            for call in calls:
                x = job.draw(*LARGE, requires_grad=True)
                call(x).square().mean().backward()
                job.note(x=x)

    assert compared(device, script, replays=9).reasons() == {}


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_result_that_is_changed_in_place_after_the_next_callable_has_read_it(
    device: torch.device, is_changed: bool
) -> None:
    job = Job(device, True, torch.float32)
    first, second, third = chained(job, order=[1, -1, -1.5])
    hidden = first(job.draw(*LARGE, requires_grad=True))
    result = third(second(hidden))
    if is_changed:
        with torch.no_grad():
            hidden.mul_(2)
        with pytest.raises(LifecycleError, match=r"(an argument|a result) was changed in place"):
            result.sum().backward()
    else:
        result.sum().backward()
    job.handles[0].reset()


def test_a_result_that_is_changed_in_place_before_the_next_callable_reads_it(device: torch.device) -> None:
    def script(job: Job) -> None:
        first, second, third = chained(job)
        for _ in range(3):
            x = job.draw(*LARGE, requires_grad=True)
            hidden = first(x)
            hidden.mul_(2)
            result = third(second(hidden))
            del hidden
            result.square().mean().backward()
            job.note(x=x, result=result)
            del result

    assert compared(device, script, replays=9).reasons() == {}


@pytest.mark.parametrize("kind", ["detached", "scaled", "other layer"])
def test_a_sample_that_is_no_result_is_copied(device: torch.device, kind: str) -> None:
    job = Job(device, True, torch.float32)
    first, second = job.built(Block), job.built(Block)
    x = job.sample(*LARGE, requires_grad=True)
    sample = {
        "detached": lambda: first(x).detach().requires_grad_(),
        "scaled": lambda: first(x) * 2,
        "other layer": lambda: second(x),
    }[kind]()
    calls = job.graphed((first, second), ((x,), (sample,)))
    with Copies() as copies:
        through(calls, job.draw(*LARGE, requires_grad=True))
    assert copies.num == 2
    job.close()


def test_looking_for_results_leaves_no_trace(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    first, second = job.built(Block), job.built(Block)
    x = job.sample(*LARGE, requires_grad=True)
    sample = first(x)
    before = torch.get_rng_state()
    state = [value.clone() for model in (first, second) for value in model.state_dict().values()]
    job.graphed((first, second), ((x,), (sample,)))
    now = [value for model in (first, second) for value in model.state_dict().values()]
    assert all(map(torch.equal, state, now))
    assert torch.equal(torch.get_rng_state(), before)
    assert x.grad is None
    job.close()
