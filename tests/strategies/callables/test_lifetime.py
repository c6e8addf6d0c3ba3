"""What reset, failures, copies and changes leave behind."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.strategies.callables.jobs import HIDDEN, SIZE, Block, Job, compared, nothing_is_replayed
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, LifecycleError, StaleAddressError


def graphed_block(job: Job, **options: Any) -> Any:
    return job.graphed(job.built(Block), (job.sample(requires_grad=True),), **options)


def test_reset_gives_the_module_its_forward_back(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = graphed_block(job)
        job.train(module)
        if job.graphs:
            assert "forward" in vars(module)
            handle = job.handles[0]
            handle.reset()
            handle.reset()
            assert "forward" not in vars(module)
            assert handle.report().pool_bytes == 0
        job.train(module)

    compared(device, script, replays=5)


def test_reset_gives_back_a_forward_that_the_instance_had(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    module = job.built(Block)

    def own(x: Tensor) -> Tensor:
        return type(module).forward(module, x) * 2  # type: ignore[no-any-return]

    module.forward = own
    job.graphed(module, (job.sample(requires_grad=True),))
    assert module.forward is not own
    job.close()
    assert module.forward is own


def test_reset_of_one_frees_all_that_were_given_with_it(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    first, second = job.built(Block), job.built(Block)
    sample = (job.sample(requires_grad=True),)
    *_, function = job.graphed((first, second, torch.tanh), (sample,) * 3)
    forward = second.forward
    first.forward.reset()
    assert "forward" not in vars(first)
    assert "forward" not in vars(second)
    for call in (function, forward):
        with pytest.raises(LifecycleError, match="reset"):
            call(job.draw(requires_grad=True))
    assert function.report().pool_bytes == 0


def test_capture_again_after_reset(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        for _ in range(3):
            job.graphed(module, (job.sample(requires_grad=True),))
            job.train(module, num_steps=2)
            if job.graphs:
                job.handles[-1].reset()

    compared(device, script, replays=6)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_held_stays_valid_after_reset(device: torch.device, ordered: bool) -> None:
    def script(job: Job) -> None:
        module, sample = job.built(Block), (job.sample(requires_grad=True),)
        call = job.graphed((module,), (sample,), _order=[1, -1])[0] if ordered else job.graphed(module, sample)
        x = job.draw(requires_grad=True)
        result = call(x)
        result.sum().backward()
        job.keep(result, x.grad, *(parameter.grad for parameter in module.parameters()))
        if job.graphs:
            job.handles[0].reset()
        gc.collect()
        job.note(x=x, result=result)

    compared(device, script, replays=1)


def test_backward_of_a_forward_before_the_reset_is_right_or_refused(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    module = graphed_block(job)
    result = module(job.draw(requires_grad=True))
    as_it_was = result.detach().clone()
    module.forward.reset()
    assert torch.equal(result, as_it_was)
    with pytest.raises(LifecycleError):
        result.sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_dropped_module_and_graphs_are_collected(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    module = graphed_block(job)
    module(job.draw(requires_grad=True)).sum().backward()
    gone = weakref.ref(module)
    job.handles.clear()
    job.models.clear()
    del module
    gc.collect()
    assert gone() is None


# ----- failures


class ReadsValue(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1 + 0 * y.sum().item())  # the line to name


class NoGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Raises(Block):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ValueError("on purpose")


class Branches(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else y * 2


class NoTensor(Block):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return 5


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("build", [ReadsValue, NoGradient, Raises, Branches, NoTensor])
def test_failing_capture_leaves_nothing(
    device: torch.device, build: Callable[[], nn.Module], ordered: bool, place: int
) -> None:
    job = Job(device, True, torch.float32)
    modules = [job.built(Block), job.built(Block)]
    modules[place] = job.built(build)
    modules[0].up.weight.grad = kept = torch.ones_like(modules[0].up.weight)
    before = [value.clone() for module in modules for value in module.state_dict().values()]
    generator = torch.get_rng_state()
    samples = ((job.sample(requires_grad=True),),) * (4 if ordered else 2)
    with pytest.raises(CaptureError) as caught:
        job.graphed(tuple(modules), samples, **({"_order": [1, 1, -1, -1]} if ordered else {}))
    assert f"callables[{place}]" in str(caught.value)
    assert build.__name__ in str(caught.value)
    assert not any("forward" in vars(module) for module in modules)
    now = [value for module in modules for value in module.state_dict().values()]
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert modules[0].up.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert all(parameter.grad is None for parameter in modules[1].parameters())


def test_failure_in_a_hook_leaves_nothing(device: torch.device) -> None:
    def fails(_module: nn.Module) -> None:
        raise KeyError("on purpose")

    module = Block().to(device)
    sample = (torch.ones(SIZE, HIDDEN, device=device, requires_grad=True),)
    for kind in ("forward_hooks", "backward_pre_hooks"):
        with pytest.raises((KeyError, CaptureError)):
            graphstep.make_graphed_callables(module, sample, capture_time_hooks=({kind: fails},))
        assert "forward" not in vars(module)
        assert int(module.num_calls) == 0


def test_failure_in_the_last_hook_leaves_nothing(device: torch.device) -> None:
    def fails() -> None:
        raise KeyError("on purpose")

    module = Block().to(device)
    sample = (torch.ones(SIZE, HIDDEN, device=device, requires_grad=True),)
    with pytest.raises(KeyError):
        graphstep.make_graphed_callables(module, sample, post_warmup_hook=fails)
    assert "forward" not in vars(module)


# ----- copies


def test_deepcopy_of_a_graphed_module_is_eager_and_its_own(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = graphed_block(job)
        job.train(module, num_steps=2)
        other = copy.deepcopy(module)
        job.models.append(other)
        job.train(other, num_steps=2)
        job.train(module, num_steps=2)
        job.train(lambda x: other(module(x)), num_steps=2)
        if job.graphs:
            job.handles[0].reset()
        job.train(other, num_steps=2)

    compared(device, script, replays=6)


def test_state_dict_is_that_of_the_module_and_can_be_loaded(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        names = list(module.state_dict())
        job.graphed(module, (job.sample(requires_grad=True),))
        assert list(module.state_dict()) == names
        saved = copy.deepcopy(module.state_dict())
        for _ in range(3):
            job.train(module, num_steps=2)
            module.load_state_dict(saved)
        job.train(module, num_steps=2)

    compared(device, script, replays=8)


def test_graphed_module_can_be_saved(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    module = graphed_block(job)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    other.eval()
    module.eval()
    x = job.draw()
    assert torch.equal(other(x), module(x))
    job.close()


# ----- changes after the capture


def replace_weight(module: Any) -> None:
    module.up.weight = nn.Parameter(module.up.weight.detach().clone())


def replace_data(module: Any) -> None:
    module.up.weight.data = module.up.weight.detach().clone()


def replace_buffer(module: Any) -> None:
    module.mean = module.mean.clone()


@pytest.mark.parametrize(
    ("change", "name"), [(replace_weight, "up.weight"), (replace_data, "up.weight"), (replace_buffer, "mean")]
)
@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_replaced_after_the_capture_is_refused_by_name(
    device: torch.device, change: Callable[[Any], None], name: str, ordered: bool
) -> None:
    job = Job(device, True, torch.float32)
    module, sample = job.built(Block), (job.sample(requires_grad=True),)
    call = job.graphed((module,), (sample,), _order=[1, -1])[0] if ordered else job.graphed(module, sample)
    call(job.draw(requires_grad=True)).sum().backward()
    change(module)
    with nothing_is_replayed(job.handles[0], module), pytest.raises(StaleAddressError, match=name):
        call(job.draw(requires_grad=True))
    job.close()


def test_weights_written_in_place_after_the_capture(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = graphed_block(job)
        job.train(module, num_steps=2)
        with torch.no_grad():
            module.up.weight.copy_(job.draw(12, HIDDEN))
            module.mean.fill_(1.0)
        module.down.weight.data.mul_(2)
        job.train(module, num_steps=3)

    compared(device, script, replays=5)


def test_changed_attribute_runs_eagerly_and_is_counted(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = graphed_block(job)
        job.train(module, num_steps=2)
        module.dropout.p = 0.7
        job.train(module, num_steps=3)
        module.dropout.p = 0.2
        job.train(module, num_steps=2)

    job = compared(device, script, replays=4)
    assert job.reasons() == {"changed-attribute": 3}
    assert "dropout.p" in job.rows[0].last_detail


def test_training_flag_of_a_part_runs_eagerly(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = graphed_block(job)
        job.train(module, num_steps=2)
        module.dropout.eval()
        job.train(module, num_steps=3)
        module.dropout.train()
        job.train(module, num_steps=2)

    job = compared(device, script, replays=4)
    assert sum(job.reasons().values()) == 3


def test_two_groups_do_not_notice_each_other(device: torch.device) -> None:
    def script(job: Job) -> None:
        first, second = graphed_block(job), graphed_block(job)
        job.train(lambda x: second(first(x)))
        if job.graphs:
            job.handles[0].reset()
        job.train(lambda x: second(first(x)))

    compared(device, script, replays=15)
