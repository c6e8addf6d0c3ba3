"""Gradients of graphed callables: accumulated, clipped, kept, hooked, of frozen, tied and unused parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.callables.jobs import DTYPES, HIDDEN, Block, Job, compared
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, LifecycleError, StaleAddressError

BOTH = pytest.mark.parametrize("accumulates", [False, True])

TIED = pytest.mark.parametrize(
    "accumulates",
    [False, True],
)


def two_blocks(job: Job, *, build: Callable[[], nn.Module] = Block, **options: Any) -> Any:
    """Two graphed modules, one after the other."""
    modules = (job.built(build), job.built(build))
    sample = (job.sample(requires_grad=True),)
    first, second = job.graphed(modules, (sample, sample), **options)
    return lambda x: second(first(x))


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_accumulated_over_microbatches(
    device: torch.device, accumulates: bool, dtype: torch.dtype, set_to_none: bool, num_microbatches: int
) -> None:
    def script(job: Job) -> None:
        model = two_blocks(job, accumulate_param_grads=accumulates)
        job.train(model, num_microbatches=num_microbatches, set_to_none=set_to_none)

    compared(device, script, dtype=dtype, replays=2 * 5 * num_microbatches)


@BOTH
def test_never_zeroed(device: torch.device, accumulates: bool) -> None:
    def script(job: Job) -> None:
        model = two_blocks(job, accumulate_param_grads=accumulates)
        optimizer = job.optimizer()
        for _ in range(6):
            model(job.draw(requires_grad=True)).sum().backward()
            job.note()
            optimizer.step()

    compared(device, script)


@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clones", [True, False])
def test_kept_by_the_caller_from_earlier_steps(
    device: torch.device, accumulates: bool, set_to_none: bool, clones: bool
) -> None:
    """With ``set_to_none`` a kept gradient belongs to the caller alone; without, eager writes to it, too."""

    def script(job: Job) -> None:
        model = two_blocks(job, accumulate_param_grads=accumulates, clone_param_grads_on_return=clones)
        optimizer = job.optimizer()
        kept: list[Tensor | None] = []
        for _ in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(2):
                model(job.draw(requires_grad=True)).square().sum().backward()
                kept += [parameter.grad for parameter in job.models[0].parameters()]
                if set_to_none:
                    job.keep(*(p.grad.clone() for p in job.models[1].parameters() if p.grad is not None))
            job.note(kept=kept)
            optimizer.step()

    compared(device, script)


@BOTH
def test_taken_out_by_the_caller_between_microbatches(device: torch.device, accumulates: bool) -> None:
    def script(job: Job) -> None:
        model = two_blocks(job, accumulate_param_grads=accumulates)
        for _ in range(5):
            model(job.draw(requires_grad=True)).square().sum().backward()
            for module in job.models:
                for parameter in module.parameters():
                    job.keep(parameter.grad)
                    parameter.grad = None
            model(job.draw(requires_grad=True)).square().sum().backward()
            job.note()
            for parameter in job.models[0].parameters():
                parameter.grad = torch.ones_like(parameter)

    compared(device, script)


@BOTH
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipped(device: torch.device, accumulates: bool, max_norm: float) -> None:
    def script(job: Job) -> None:
        model = two_blocks(job, accumulate_param_grads=accumulates)
        optimizer = job.optimizer()
        parameters = [parameter for module in job.models for parameter in module.parameters()]
        for _ in range(5):
            optimizer.zero_grad(set_to_none=True)
            for _ in range(2):
                model(job.draw(requires_grad=True)).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(parameters, max_norm)
            job.note(norm=norm)
            optimizer.step()

    compared(device, script)


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_autograd_grad(device: torch.device, dtype: torch.dtype) -> None:
    def script(job: Job) -> None:
        model = two_blocks(job)
        parameters = [parameter for module in job.models for parameter in module.parameters()]
        for _ in range(5):
            x = job.draw(requires_grad=True)
            found = torch.autograd.grad(model(x).square().sum(), (x, *parameters))
            job.note(found=found)
            job.keep(*found)

    compared(device, script, dtype=dtype, replays=10)


def test_autograd_grad_is_refused_where_graphs_accumulate(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    model = two_blocks(job, accumulate_param_grads=True)
    x = job.draw(requires_grad=True)
    with pytest.raises(LifecycleError, match=r"autograd\.grad"):
        torch.autograd.grad(model(x).square().sum(), x)
    assert all(parameter.grad is None for module in job.models for parameter in module.parameters())
    job.close()


@BOTH
def test_main_grad_added_by_a_hook(device: torch.device, accumulates: bool) -> None:
    """The way of Megatron: a hook adds ``.grad`` to ``main_grad`` and drops it."""

    def add(parameter: Any) -> None:
        if parameter.grad is not None:  # Graphs that accumulate have added it already.
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

    def script(job: Job) -> None:
        modules = [job.built(Block), job.built(Block)]
        for module in modules:
            for parameter in module.parameters():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                parameter.register_post_accumulate_grad_hook(add)
        sample = (job.sample(requires_grad=True),)
        first, second = job.graphed(tuple(modules), (sample, sample), accumulate_param_grads=accumulates)
        for step in range(5):
            for _ in range(2):
                second(first(job.draw(requires_grad=True))).square().sum().backward()
                job.note()
            if step % 2:
                for module in modules:
                    for parameter in module.parameters():
                        parameter.main_grad.zero_()

    compared(device, script, dtype=torch.bfloat16)


@BOTH
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("when", ["before the capture", "after the capture"])
def test_hooks_on_parameters_see_each_gradient(device: torch.device, accumulates: bool, kind: str, when: str) -> None:
    def script(job: Job) -> None:
        modules = (job.built(Block), job.built(Block))
        seen: dict[str, list[Tensor]] = {"up.weight": [], "norm.bias": []}  # Their order in a backward is not told.

        def note(value: Any, name: str) -> None:
            seen[name].append((value if kind == "register_hook" else value.grad).clone())

        def register() -> None:
            for name in seen:
                getattr(modules[0].get_parameter(name), kind)(partial(note, name=name))

        if when == "before the capture":
            register()
        sample = (job.sample(requires_grad=True),)
        first, second = job.graphed(modules, (sample, sample), accumulate_param_grads=accumulates)
        assert not any(seen.values())
        job.train(lambda x: second(first(x)), num_steps=2, num_microbatches=2)
        if when == "after the capture":
            register()
        job.train(lambda x: second(first(x)), num_steps=3, num_microbatches=2)
        assert {len(found) for found in seen.values()} == {10 if when == "before the capture" else 6}
        job.note(seen=seen)

    compared(device, script)


@BOTH
def test_hook_that_replaces_a_gradient(device: torch.device, accumulates: bool) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        module.down.weight.register_hook(lambda gradient: gradient * 3)
        given = job.graphed(module, (job.sample(requires_grad=True),), accumulate_param_grads=accumulates)
        job.train(given, num_microbatches=2)

    compared(device, script, replays=10)


def freeze_some(module: Any) -> Any:
    for parameter in (module.up.weight, module.norm.bias, module.down.bias):
        parameter.requires_grad_(False)
    return module


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", ["some", "all"])
def test_frozen_parameters(device: torch.device, accumulates: bool, dtype: torch.dtype, frozen: str) -> None:
    def script(job: Job) -> None:
        first, second = job.built(lambda: freeze_some(Block())), job.built(Block)
        if frozen == "all":
            first.requires_grad_(False)
        sample = (job.sample(requires_grad=True),)
        given = job.graphed((first, second), (sample, sample), accumulate_param_grads=accumulates)
        job.train(lambda x: given[1](given[0](x)), num_microbatches=2)
        assert first.up.weight.grad is None

    compared(device, script, dtype=dtype, replays=20)


@BOTH
def test_parameter_frozen_after_the_capture_is_refused_by_name(device: torch.device, accumulates: bool) -> None:

    def script(job: Job) -> None:
        module = job.built(Block)
        given = job.graphed(module, (job.sample(requires_grad=True),), accumulate_param_grads=accumulates)
        job.train(given, num_steps=2)
        module.up.weight.requires_grad_(False)
        if job.graphs:
            with pytest.raises(StaleAddressError, match=r"up\.weight"):
                given(job.draw(requires_grad=True))
        job.note()

    compared(device, script)


@TIED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("together", [True, False])
def test_tied_across_callables(device: torch.device, accumulates: bool, dtype: torch.dtype, together: bool) -> None:
    if accumulates and not together:
        pytest.skip("graphs that do not know of each other add their parts one by one, as the docstring says")

    def script(job: Job) -> None:
        first, second = job.built(Block), job.built(Block)
        second.up.weight, second.norm = first.up.weight, first.norm
        if device.type == "cpu":  # On a GPU one launch of the optimizer writes both at the same time.
            second.down.weight = nn.Parameter(first.down.weight.detach())  # The same memory, another parameter.
        sample = (job.sample(requires_grad=True),)
        given: Any
        if together:
            given = job.graphed((first, second), (sample, sample), accumulate_param_grads=accumulates)
        else:
            given = [job.graphed(each, sample, accumulate_param_grads=accumulates) for each in (first, second)]
        second.down.weight.requires_grad_(True)
        job.train(lambda x: given[1](given[0](x)), num_microbatches=2)

    compared(device, script, dtype=dtype)


@TIED
def test_one_module_given_twice(device: torch.device, accumulates: bool) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        sample = (job.sample(requires_grad=True),)
        calls = job.graphed((module, module), (sample, sample), _order=[1, -1], accumulate_param_grads=accumulates)
        job.train(lambda x: calls[1](calls[0](x)), num_microbatches=2)

    compared(device, script, replays=20)


# ----- unused


class Partly(Block):
    """Neither uses its second argument nor one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return super().forward(x)


class OnlyInput(Block):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return super().forward(x)


@BOTH
@pytest.mark.parametrize("build", [Partly, OnlyInput])
def test_unused_is_none_as_in_eager_if_allowed(
    device: torch.device, accumulates: bool, build: Callable[[], nn.Module]
) -> None:
    def script(job: Job) -> None:
        module = job.built(build)
        samples = (job.sample(requires_grad=True), job.sample(requires_grad=True))
        given = job.graphed(module, samples, allow_unused_input=True, accumulate_param_grads=accumulates)
        job.train(given, lambda: (job.draw(requires_grad=True), job.draw(requires_grad=True)), num_microbatches=2)
        if build is Partly:
            assert all(parameter.grad is None for parameter in module.unused.parameters())

    compared(device, script, replays=10)


@pytest.mark.parametrize(
    ("build", "names"), [(Partly, ["unused.weight", "unused.bias", "argument"]), (OnlyInput, ["argument"])]
)
def test_unused_is_an_error_that_names_all_of_it(
    device: torch.device, build: Callable[[], nn.Module], names: list[str]
) -> None:
    job = Job(device, True, torch.float32)
    module = job.built(build)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CaptureError) as caught:
        job.graphed(module, (job.sample(requires_grad=True), job.sample(requires_grad=True)))
    for name in names:
        assert name in str(caught.value)
    assert "forward" not in vars(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_unused_argument_without_gradient_is_no_error(device: torch.device) -> None:
    def script(job: Job) -> None:
        given = job.graphed(job.built(OnlyInput), (job.sample(requires_grad=True), job.sample()))
        job.train(given, lambda: (job.draw(requires_grad=True), job.draw()))

    compared(device, script, replays=5)


@BOTH
def test_results_of_which_only_one_gets_a_gradient(device: torch.device, accumulates: bool) -> None:
    class Two(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.detach().sum(), (y * 2).sum()

    def script(job: Job) -> None:
        given = job.graphed(job.built(Two), (job.sample(requires_grad=True),), accumulate_param_grads=accumulates)
        for which in (0, 2, 0, 2, 2, 0):
            x = job.draw(requires_grad=True)
            given(x)[which].sum().backward()
            job.note(x=x)

    compared(device, script)


def test_results_that_are_dropped_without_a_backward(device: torch.device) -> None:
    def script(job: Job) -> None:
        model = two_blocks(job)
        for step in range(8):
            result = model(job.draw(requires_grad=True))
            if step % 2:
                result.sum().backward()
            job.note(result=result)
            del result

    compared(device, script)


@pytest.mark.parametrize("build", [partial(Block, 0.0), Block])
def test_backward_twice_is_an_error_as_in_eager(device: torch.device, build: Callable[[], nn.Module]) -> None:
    job = Job(device, True, torch.float32)
    model = two_blocks(job, build=build)
    loss = model(job.draw(requires_grad=True)).sum()
    loss.backward()
    gradients = [p.grad.clone() for module in job.models for p in module.parameters() if p.grad is not None]
    with pytest.raises(RuntimeError):
        loss.backward()
    found = [p.grad for module in job.models for p in module.parameters() if p.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(gradients, found, strict=True))
    del loss
    job.close()


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.dropout(self.first(x), 0.2)
        return y, self.second(y)


@pytest.mark.parametrize("accumulates", [False, True])
def test_parameters_that_the_loss_does_not_reach_have_no_gradient(device: torch.device, accumulates: bool) -> None:
    """None, and not zeros: an optimizer skips it."""
    module = TwoResults().to(device)
    sample = torch.ones(4, 8, device=device, requires_grad=True)
    graphstep.make_graphed_callables(module, (sample,), accumulate_param_grads=accumulates)
    for uses_second in (True, False, True):
        module.zero_grad()
        y, z = module(torch.randn(4, 8, device=device, requires_grad=True))
        (y.sum() + z.sum() if uses_second else y.sum()).backward()
        assert module.first.weight.grad is not None
        assert (module.second.weight.grad is not None) is uses_second
        del y, z
    assert module.forward.report().rows[0].num_replays == 3
    module.forward.reset()
