"""What a recording can freeze, overwrite or lose: as eager, eager with a reason, or refused; never silently other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.callables.jobs import DTYPES, HIDDEN, Block, Job, compared
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphstep.errors import CaptureError, InputMismatchError, LifecycleError, StaleAddressError

# ----- results and arguments that share memory


class TwoViews(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).chunk(2, -1)


class Twice(Block):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y


class WithBuffer(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.mean


class WithArgument(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.view(-1)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(super().forward(x).add_(1), inplace=True)


class Checkpointed(Block):
    """Activation recompute inside, without random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.up, self.norm(x), use_reentrant=False)
        return result


class NormOfBatch(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN))


class Spectral(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", [TwoViews, Twice, WithBuffer, WithArgument, InPlace, Checkpointed, NormOfBatch])
def test_module_is_as_eager(device: torch.device, build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    def script(job: Job) -> None:
        given = job.graphed(job.built(build), (job.sample(requires_grad=True),), allow_unused_input=True)
        job.train(given, num_microbatches=2)

    compared(device, script, dtype=dtype, replays=10)


def test_parametrized_weights_are_as_eager(device: torch.device) -> None:
    def script(job: Job) -> None:
        job.train(job.graphed(job.built(Spectral), (job.sample(requires_grad=True),)))

    compared(device, script, replays=5)


def test_token_ids(device: torch.device) -> None:
    def script(job: Job) -> None:
        model = job.built(lambda: nn.Sequential(nn.Embedding(7, HIDDEN), nn.Dropout(0.2)))
        given = job.graphed(model, (torch.zeros(5, dtype=torch.long, device=device),))
        job.train(given, lambda: (torch.randint(7, (5,), generator=job.data).to(device),))

    compared(device, script, replays=5)


def test_result_written_in_place_by_the_caller(device: torch.device) -> None:
    def script(job: Job) -> None:
        given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
        job.train(lambda x: given(x).mul_(2).add_(1))

    compared(device, script, replays=5)


def test_result_is_the_next_argument(device: torch.device) -> None:
    """As in a recurrence that is cut: the argument lies in the memory that the replay writes to."""

    def script(job: Job) -> None:
        given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
        x = job.draw()
        for _ in range(6):
            x = given(x.detach().requires_grad_())
            x.sum().backward()
            job.note(x=x)

    compared(device, script)


def test_gradient_of_the_argument_is_the_next_argument(device: torch.device) -> None:
    def script(job: Job) -> None:
        given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
        gradient: Any = job.draw()
        for _ in range(6):
            x = gradient.detach().requires_grad_()
            given(x).backward(gradient)
            gradient = x.grad
            job.note(x=x)

    compared(device, script, replays=6)


@pytest.mark.parametrize("cached", [True, False])
def test_autocast(device: torch.device, cached: bool) -> None:
    def script(job: Job) -> None:
        mode = partial(torch.autocast, device.type, dtype=torch.bfloat16, cache_enabled=cached)
        with mode():
            given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))

        def model(x: Tensor) -> Any:
            with mode():
                return given(x)

        job.train(model, num_microbatches=2)

    compared(device, script, replays=10)


def test_other_autocast_than_at_the_capture_is_refused(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(InputMismatchError, match="autocast"):
        given(job.draw(requires_grad=True))
    job.close()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_around_a_graphed_module(device: torch.device, reentrant: bool) -> None:
    def script(job: Job) -> None:
        given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
        job.train(lambda x: checkpoint(given, x, use_reentrant=reentrant))

    compared(device, script, replays=None)


def test_second_backward_through_a_kept_graph_is_refused(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    given = job.graphed(job.built(Block), (job.sample(requires_grad=True),), retain_graph_in_backward=True)
    loss = given(job.draw(requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    gradient = job.models[0].up.bias.grad.clone()  # type: ignore[union-attr, operator]
    with pytest.raises(LifecycleError, match="has run already"):
        loss.backward()
    assert torch.equal(job.models[0].up.bias.grad, gradient)  # type: ignore[union-attr, arg-type]
    del loss
    job.close()


def test_callable_that_writes_into_its_argument_is_refused(device: torch.device) -> None:
    def function(x: Tensor, state: Tensor) -> Tensor:
        return x * state.add_(1)

    job = Job(device, True, torch.float32)
    state = job.sample()
    with pytest.raises(CaptureError, match="writes into its arguments"):
        job.graphed(function, (job.sample(requires_grad=True), state))
    assert torch.equal(state, job.sample())


def test_losses_that_are_kept_do_not_end_replays(device: torch.device) -> None:
    """``losses.append(loss.detach())`` is what loops do."""

    def script(job: Job) -> None:
        sample = (job.sample(requires_grad=True),)
        model, loss_of = job.graphed((job.built(Block), lambda y: y.square().mean()), (sample, sample))
        losses: list[Tensor] = []
        for _ in range(10):
            loss = loss_of(model(job.draw(requires_grad=True)))
            loss.backward()
            losses.append(loss.detach())
            job.note(losses=losses)

    job = compared(device, script)
    assert sum(row.num_replays for row in job.rows) >= 10


# ----- Python state


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        result: Tensor = super().forward(x) * self.number
        return result


class Carries(Block):
    """Reads what its last run has left."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) + self.last
        self.last = y.detach().mean()
        return y


class LeavesLoss(Block):
    """A second loss in an attribute, as mixtures of experts have it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.square().mean()
        return y


class ReplacesBuffer(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        result: Tensor = self.up(x) * self.mean.sum()
        return result


@pytest.mark.parametrize("build", [Counts, Carries, LeavesLoss, ReplacesBuffer])
def test_module_whose_attributes_a_replay_would_not_set_is_refused(
    device: torch.device, build: Callable[[], nn.Module]
) -> None:
    job = Job(device, True, torch.float32)
    module = job.built(build)
    before = dict(vars(module)), dict(module.named_buffers())
    with pytest.raises(CaptureError):
        job.graphed(module, (job.sample(requires_grad=True),), allow_unused_input=True)
    assert vars(module).keys() == before[0].keys()
    assert all(vars(module)[name] is value for name, value in before[0].items())
    assert all(buffer is before[1][name] for name, buffer in module.named_buffers())


def test_failing_capture_puts_attributes_back(device: torch.device) -> None:
    class Fails(Counts):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * int(x.sum().item())

    job = Job(device, True, torch.float32)
    module: Any = job.built(Fails)
    with pytest.raises(CaptureError):
        job.graphed(module, (job.sample(requires_grad=True),))
    assert module.number == 0


# ----- functions over modules


def over(form: str, module: nn.Module) -> Callable[..., Tensor]:
    def closure(x: Tensor) -> Tensor:
        result: Tensor = module(x)
        return result

    forms: dict[str, Any] = {
        "closure": closure,
        "method": module.forward,
        "partial": partial(type(module).forward, module),
    }
    result: Callable[..., Tensor] = forms[form]
    return result


FORMS = pytest.mark.parametrize("form", ["closure", "method", "partial"])


@FORMS
@pytest.mark.parametrize("dtype", DTYPES)
def test_function_over_a_module_trains_it(device: torch.device, form: str, dtype: torch.dtype) -> None:
    def script(job: Job) -> None:
        job.train(job.graphed(over(form, job.built(Block)), (job.sample(requires_grad=True),)), num_microbatches=2)

    compared(device, script, dtype=dtype, replays=10)


@FORMS
def test_function_over_a_module_in_eval_mode(device: torch.device, form: str) -> None:
    def script(job: Job) -> None:
        module = job.built(partial(Block, 0.5))
        given = job.graphed(over(form, module), (job.sample(requires_grad=True),))
        module.eval()
        job.note(result=given(job.draw(requires_grad=True)).detach())

    compared(device, script, replays=None)


def replace_weight(module: Any) -> None:
    module.up.weight = nn.Parameter(module.up.weight.detach() * 2)


def replace_data(module: Any) -> None:
    module.up.weight.data = module.up.weight.detach() * 2


@FORMS
@pytest.mark.parametrize("change", [replace_weight, replace_data])
def test_function_over_a_module_with_other_weights_is_right_or_refused(
    device: torch.device, form: str, change: Callable[[Any], None]
) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        given = job.graphed(over(form, module), (job.sample(requires_grad=True),))
        change(module)
        x = job.draw(requires_grad=True)
        if job.graphs:
            try:
                result = given(x)
            except StaleAddressError:
                result = module(x)
        else:
            result = given(x)
        job.note(result=result.detach())

    compared(device, script, replays=None)
