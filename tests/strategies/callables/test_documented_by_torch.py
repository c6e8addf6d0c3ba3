"""The uses of ``torch.cuda.make_graphed_callables`` that PyTorch documents: positional, and without an order."""

from __future__ import annotations

from functools import partial
from itertools import chain

import pytest
import torch
from tests.strategies.callables.jobs import DTYPES, HIDDEN, SIZE, Block, Job, compared, one_of
from torch import Tensor, nn

import graphstep


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_single_module(device: torch.device, dtype: torch.dtype, num_microbatches: int, requires_grad: bool) -> None:
    def script(job: Job) -> None:
        block = job.built(Block)
        given = job.graphed(block, (job.sample(requires_grad=requires_grad),))
        assert given is block
        job.train(given, lambda: (job.draw(requires_grad=requires_grad),), num_microbatches=num_microbatches)

    compared(device, script, dtype=dtype, replays=5 * num_microbatches)


@pytest.mark.parametrize("dtype", DTYPES)
def test_module_of_modules(device: torch.device, dtype: torch.dtype) -> None:
    def script(job: Job) -> None:
        model = job.built(lambda: nn.Sequential(Block(), nn.Linear(HIDDEN, HIDDEN), Block(0.5)))
        job.train(job.graphed(model, (job.sample(requires_grad=True),)))

    compared(device, script, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_function(device: torch.device, dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.dropout(x * y.sigmoid(), 0.3) + y

    def script(job: Job) -> None:
        given = job.graphed(function, (job.sample(requires_grad=True), job.sample(requires_grad=True)))
        for _ in range(5):
            x, y = job.draw(requires_grad=True), job.draw(requires_grad=True)
            result = given(x, y)
            result.square().sum().backward()
            job.note(arguments=(x, y), result=result)
            job.keep(x.grad, y.grad)
            del result

    compared(device, script, dtype=dtype, replays=5)


def test_function_that_reads_a_module_trains_it_through_its_closure(device: torch.device) -> None:
    """Its parameters are no arguments: torch refuses such a function, here its gradients are right."""

    def script(job: Job) -> None:
        block = job.built(Block)
        job.train(job.graphed(lambda x: block(x).tanh(), (job.sample(requires_grad=True),)))

    compared(device, script, replays=None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tuple_of_a_module_and_a_function(device: torch.device, dtype: torch.dtype) -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(y.float(), target.float())

    def script(job: Job) -> None:
        block = job.built(Block)
        samples = ((job.sample(requires_grad=True),), (job.sample(requires_grad=True), job.sample()))
        model, graphed_loss = job.graphed((block, loss), samples)
        assert model is block
        optimizer = job.optimizer()
        for _ in range(5):
            optimizer.zero_grad(set_to_none=True)
            x = job.draw(requires_grad=True)
            value = graphed_loss(model(x), job.draw())
            value.backward()
            job.note(x=x, value=value)
            del value
            optimizer.step()

    compared(device, script, dtype=dtype, replays=10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_branch_that_depends_on_data_chooses_between_graphed_parts(
    device: torch.device, dtype: torch.dtype, set_to_none: bool
) -> None:
    """Partial-network capture: the rest is eager, with a loss, an optimizer and a branch on the host."""
    taken: list[bool] = []

    def script(job: Job) -> None:
        first = job.built(lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.2)))
        second, third = job.built(Block), job.built(partial(Block, 0.5))
        sample, hidden = job.sample(), job.sample(requires_grad=True)
        first = job.graphed(first, (sample,))
        second = job.graphed(second, (hidden,))
        third = job.graphed(third, (hidden,))
        optimizer = torch.optim.SGD(chain(*(m.parameters() for m in (first, second, third))), lr=0.1, momentum=0.9)
        for _ in range(8):
            optimizer.zero_grad(set_to_none=set_to_none)
            hidden = first(job.draw())
            branch = bool(hidden.sum() > 0)
            taken.append(branch)
            result = second(hidden) if branch else third(hidden)
            loss = nn.functional.mse_loss(result, job.draw())
            loss.backward()
            job.note(loss=loss)
            optimizer.step()

    compared(device, script, dtype=dtype)
    assert len(set(taken)) == 2


def test_both_branches_in_turn_when_they_were_given_together(device: torch.device) -> None:
    def script(job: Job) -> None:
        blocks = [job.built(Block) for _ in range(3)]
        first, second, third = job.graphed(tuple(blocks), tuple((job.sample(requires_grad=True),) for _ in blocks))
        optimizer = job.optimizer()
        for step in range(8):
            optimizer.zero_grad(set_to_none=True)
            x = job.draw(requires_grad=True)
            result = (second if step % 3 else third)(first(x))
            result.square().mean().backward()
            job.note(x=x, result=result)
            optimizer.step()

    compared(device, script)


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_of_the_last_iteration_still_held_by_a_variable(device: torch.device, dtype: torch.dtype) -> None:
    def script(job: Job) -> None:
        model = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
        held: list[Tensor] = []

        def run() -> None:
            x = job.draw(requires_grad=True)
            y = model(x)
            y.square().sum().backward()
            assert x.grad is not None
            job.note(x=x, y=y)
            job.keep(x.grad)
            held[:] = [y]  # The one before lives until here.

        for _ in range(6):
            run()
        job.keep(*held)
        run()

    compared(device, script, dtype=dtype)


@pytest.mark.parametrize("num_kept", [1, 2, 100])
def test_all_results_that_are_kept_stay_as_they_were(device: torch.device, num_kept: int) -> None:
    def script(job: Job) -> None:
        blocks = (job.built(Block), job.built(Block))
        first, second = job.graphed(blocks, ((job.sample(requires_grad=True),), (job.sample(requires_grad=True),)))
        kept: list[tuple[Tensor, Tensor]] = []
        for _ in range(7):
            hidden = first(job.draw(requires_grad=True))
            result = second(hidden)
            result.sum().backward()
            kept += [(each.detach(), each.detach().clone()) for each in (hidden, result)]
            del kept[: -2 * num_kept]
            assert all(torch.equal(one, other) for one, other in kept)
            job.note(result=result)

    compared(device, script)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_pool_is_the_fifth_positional_argument(device: torch.device, as_keyword: bool) -> None:
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else (0, 1)

    def script(job: Job) -> None:
        sample = (job.sample(requires_grad=True),)
        if as_keyword:
            job.train(job.graphed(job.built(Block), sample, pool=pool))
        else:
            job.train(job.graphed(job.built(Block), sample, 3, False, pool))

    compared(device, script)


@pytest.mark.parametrize("num_warmup_iters", [1, 3, 11])
@pytest.mark.parametrize("allow_unused_input", [False, True])
def test_warmups_and_unused_inputs_are_positional_and_leave_no_trace(
    device: torch.device, num_warmup_iters: int, allow_unused_input: bool
) -> None:
    def script(job: Job) -> None:
        block = job.built(Block)
        given = job.graphed(block, (job.sample(requires_grad=True),), num_warmup_iters, allow_unused_input)
        job.note()
        assert all(parameter.grad is None for parameter in block.parameters())
        job.train(given)

    compared(device, script, replays=5)


def test_gradients_that_are_there_before_the_capture_are_kept(device: torch.device) -> None:
    def script(job: Job) -> None:
        block = job.built(Block)
        block(job.draw()).sum().backward()
        kept = [parameter.grad for parameter in block.parameters()]
        job.keep(*kept)
        given = job.graphed(block, (job.sample(requires_grad=True),))
        assert all(p.grad is gradient for p, gradient in zip(block.parameters(), kept, strict=True))
        job.note()
        job.train(given)

    compared(device, script)


def test_samples_may_be_used_for_anything_afterwards(device: torch.device) -> None:
    def script(job: Job) -> None:
        sample = job.sample(requires_grad=True)
        given = job.graphed(job.built(Block), (sample,))
        job.train(given, lambda: (sample,))
        with torch.no_grad():
            sample.fill_(3.0)
        job.train(given)

    compared(device, script)


def test_sample_with_a_history_and_calls_without_one(device: torch.device) -> None:
    def script(job: Job) -> None:
        sample = job.sample(requires_grad=True) * 2
        job.train(job.graphed(job.built(Block), (sample,)))

    compared(device, script)


def test_named_like_torch_and_given_back_as_given() -> None:
    model = nn.Linear(HIDDEN, HIDDEN)
    made = graphstep.make_graphed_callables((model,), ((torch.ones(SIZE, HIDDEN, requires_grad=True),),))
    assert isinstance(made, tuple)
    assert made[0] is model
    one_of(made).reset()
