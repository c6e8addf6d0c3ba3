"""Weight gradients out of turn, forgotten or given up, and eager calls among replays."""

from __future__ import annotations

import pytest
import torch
from tests.strategies.callables.delayed import InPython, Several, calls_of, stepped, weight_gradients
from tests.strategies.callables.jobs import HIDDEN, Block, Job, compared
from torch import Tensor, nn

from graphstep.errors import LifecycleError, PlanError

# Out of turn.


def test_weight_gradients_before_the_backward(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    (call,) = calls_of(job, job.built(Block), [1, -1, -1.5])
    loss = call(job.draw(requires_grad=True)).sum()
    with pytest.raises(PlanError) as caught:
        call.backward_dw()
    assert "expected the backward of callables[0] (Block) for microbatch 0 (chunk 0)" in str(caught.value)
    assert "the weight gradients of callables[0] (Block) for microbatch 0 (chunk 0) came" in str(caught.value)
    assert all(parameter.grad is None for parameter in job.models[0].parameters())
    loss.backward()
    call.backward_dw()
    with pytest.raises(PlanError, match="expected the forward of"):
        call.backward_dw()
    job.close()


def test_weight_gradients_of_another_microbatch(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = calls_of(job, job.built(Block), [1, 1, -1, -1, -1.5, -1.5])
    losses = [call(job.draw(requires_grad=True)).sum() for call in calls]
    for loss in losses:
        loss.backward()
    with pytest.raises(PlanError, match=r"expected the weight gradients.* microbatch 0 .* microbatch 1 .* came"):
        calls[1].backward_dw()
    assert all(parameter.grad is None for parameter in job.models[0].parameters())
    for call in calls:
        call.backward_dw()
    job.handles[0].reset()


def test_forgotten_weight_gradients_are_missed_at_the_next_event(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = calls_of(job, job.built(Block), [1, -1, -1.5, 1, -1, -1.5])
    calls[0](job.draw(requires_grad=True)).sum().backward()
    with pytest.raises(PlanError, match=r"expected the weight gradients.* microbatch 0.*the forward .* microbatch 1"):
        calls[1](job.draw(requires_grad=True))
    calls[0].backward_dw()
    loss = calls[1](job.draw(requires_grad=True)).sum()
    loss.backward()
    del loss
    with pytest.raises(PlanError, match=r"expected the weight gradients.* microbatch 1.*the forward .* microbatch 0"):
        calls[0](job.draw(requires_grad=True))  # The first event of the next step.
    calls[1].backward_dw()
    calls[0](job.draw(requires_grad=True)).sum().backward()
    job.handles[0].reset()


def test_forgotten_weight_gradients_are_missed_at_the_next_backward(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    calls = calls_of(job, job.built(Block), [1, 1, -1, -1.5, -1, -1.5])
    losses = [call(job.draw(requires_grad=True)).sum() for call in calls]
    losses[0].backward()
    with pytest.raises(PlanError, match=r"expected the weight gradients.* microbatch 0.*the backward .*microbatch 1"):
        losses[1].backward()
    job.handles[0].reset()


def test_a_step_that_was_given_up_may_begin_anew(device: torch.device) -> None:
    """What waits for its weight gradients goes with it."""

    def script(job: Job) -> None:
        order = [1, 1, -1, -1, -1.5, -1.5]
        calls = calls_of(job, job.built(Block), order)
        for _ in range(3):
            if job.graphs:
                state = [(value, value.clone()) for value in job.models[0].buffers()]
                generators = torch.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else None
                losses = [call(job.sample(requires_grad=True)).sum() for call in calls]
                losses[0].backward()
                losses.clear()
                for value, before in state:
                    value.copy_(before)
                torch.set_rng_state(generators[0])
                if generators[1] is not None:
                    torch.cuda.set_rng_state(generators[1])
            stepped(job, calls, order)

    compared(device, script, replays=12)


def test_a_backward_of_weights_that_has_no_turn(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    (call,) = calls_of(job, job.built(Block), [1, -1])
    call(job.draw(requires_grad=True)).sum().backward()
    with pytest.raises(PlanError, match="its backward computes the gradients of the weights"):
        call.backward_dw()
    job.close()


def test_after_reset(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    (call,) = calls_of(job, job.built(Block), [1, -1, -1.5])
    call(job.draw(requires_grad=True)).sum().backward()
    call.reset()
    with pytest.raises(LifecycleError, match="reset"):
        call.backward_dw()


def test_a_result_that_is_changed_before_the_weight_gradients(device: torch.device) -> None:
    class Saves(nn.Module):
        """Its result is an argument of a product with a weight."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = x.sin()
            return hidden, self.linear(hidden)

    job = Job(device, True, torch.float32)
    sample = job.sample(256, HIDDEN, requires_grad=True)  # Large enough not to be handed out as a copy.
    (call,) = calls_of(job, job.built(Saves), [1, -1, -1.5], sample)
    hidden, result = call(job.draw(256, HIDDEN, requires_grad=True))
    (result.sum() + hidden.sum()).backward()
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(LifecycleError, match="changed in place"):
        call.backward_dw()
    job.handles[0].reset()


# Eager calls in their turn.


def test_changed_attribute_runs_eagerly_with_weight_gradients_in_their_turn(device: torch.device) -> None:
    def script(job: Job) -> None:
        order = [1, 1, -1, -1, -1.5, -1.5]
        calls = calls_of(job, job.built(Block), order)
        for probability in (0.2, 0.5, 0.5, 0.2):
            job.models[0].dropout.p = probability  # type: ignore[union-attr]
            stepped(job, calls, order)

    job = compared(device, script, replays=4)
    assert job.reasons() == {"changed-attribute": 4}


@pytest.mark.parametrize("hidden_first", [True, False])
def test_second_derivatives_are_refused_eagerly_too(device: torch.device, hidden_first: bool) -> None:
    """Whether or not what arrives at the call has a history of its own."""
    job = Job(device, True, torch.float32)
    (call,) = calls_of(job, job.built(Block), [1, -1, -1.5])
    job.models[0].dropout.p = 0.5  # type: ignore[union-attr]
    x = job.draw(requires_grad=True)
    result = call(x)
    loss = result.square().sum() if hidden_first else result.sum()
    with pytest.raises(LifecycleError, match="create_graph=True") as caught:
        torch.autograd.grad(loss, x, create_graph=True)
    assert caught.value.where == "callables[0] (Block)"
    job.handles[0].reset()


class HooksActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.doubles = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.doubles:
            hidden.register_hook(lambda gradient: gradient * 2)
        result: Tensor = self.second(hidden.tanh())
        return result


def test_a_hook_on_an_activation_that_is_new_after_the_capture_runs_once(device: torch.device) -> None:
    def script(job: Job) -> None:
        order = [1, -1, -1.5]
        module = job.built(HooksActivations)
        calls = calls_of(job, module, order)
        for doubles in (False, True, False, True):
            module.doubles = doubles  # type: ignore[assignment]
            stepped(job, calls, order)

    assert compared(device, script, replays=2).reasons() == {"changed-attribute": 2}


@pytest.mark.parametrize("kind", [Several, InPython, Block])
def test_eager_calls_among_replays(device: torch.device, kind: type[nn.Module]) -> None:
    """A hook that is new at one call: gradients are accumulated in the order of the turns all the same."""

    def script(job: Job) -> None:
        module = job.built(kind)
        num = 2 if kind is Several else 1
        order = [1, 1, -1, -1, -1.5, -1.5]
        sample = tuple(job.sample(requires_grad=True) for _ in range(num))
        calls = calls_of(job, module, order, *sample, accumulate_param_grads=True)

        def feed() -> tuple[Tensor, ...]:
            return tuple(job.draw(requires_grad=True) for _ in range(num))

        weight = next(module.parameters())
        stepped(job, calls, order, feed)
        handle = weight.register_hook(lambda gradient: gradient * 0.5)
        stepped(job, calls, order, feed)
        handle.remove()
        stepped(job, calls, order, feed)

    compared(device, script)


def test_results_that_are_kept(device: torch.device) -> None:
    def script(job: Job) -> None:
        order = [1, 1, -1, -1.5, -1, -1.5]
        sample = job.sample(256, HIDDEN, requires_grad=True)
        calls = calls_of(job, job.built(Block), order, sample, _reuse_graph_input_output_buffers=True)
        kept: list[Tensor] = []
        for _ in range(4):
            results = [call(job.draw(256, HIDDEN, requires_grad=True)) for call in calls]
            kept += [result.detach() for result in results]
            for call, result in zip(calls, results, strict=True):
                result.square().sum().backward()
                weight_gradients(job, call)
            job.keep(*kept)
            del kept[:-2]
            job.note()

    compared(device, script)


def test_evaluation_between_backward_and_weight_gradients(device: torch.device) -> None:
    def script(job: Job) -> None:
        (call,) = calls_of(job, job.built(Block), [1, -1, -1.5])
        for _ in range(3):
            x = job.draw(requires_grad=True)
            call(x).sum().backward()
            with torch.no_grad():
                found = call(job.draw())
            weight_gradients(job, call)
            job.note(x=x, found=found)

    compared(device, script, replays=3)
