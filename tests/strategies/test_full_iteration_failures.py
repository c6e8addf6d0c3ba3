"""What cannot be captured or replayed is refused by name, and the job can go on without graphs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.strategies.models import HIDDEN, VOCABULARY, Decoder, run_microbatches
from tests.strategies.runs import Run, differences
from torch import Tensor, nn

from graphstep.errors import CaptureError, GraphstepError, StaleAddressError

FULL = "full_iteration"


class Reads(Decoder):
    """Reads the loss on the host, as loggers do."""

    reads = True

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(tokens, labels)
        if self.reads and loss.item() > 1e9:  # the line to name
            raise ValueError
        return loss


def failing_after(run: Run, num_steps: int) -> CaptureError:
    """Steps until the capture fails; the failed call is the last."""
    for _ in range(num_steps):
        run.step(2)
    run.optimizer.zero_grad(set_to_none=run.zero == "none")
    drawn = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(9))
    batches = [{"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}] * 2
    run.note(torch.zeros(2))
    with pytest.raises(CaptureError) as caught:
        run.forward_backward(batches)
    run.note(torch.zeros(2))
    return caught.value


@pytest.mark.parametrize("warmup_steps", [0, 1, 3])
@pytest.mark.parametrize("zero", ["zeros", "none", "buffers"])
def test_a_host_read_names_the_line_and_leaves_no_trace(device: torch.device, warmup_steps: int, zero: str) -> None:
    run = Run(device, FULL, build=lambda: Reads(dropout=0.2), warmup_steps=warmup_steps, zero=zero)
    error = failing_after(run, warmup_steps)
    assert "test_full_iteration_failures.py" in error.where
    assert "the line to name" in error.where
    assert error.fix
    assert differences(run.trace[-2:-1], run.trace[-1:]) == []
    assert run.report.num_recordings == 0
    assert all(row.pool_bytes == 0 for row in run.report.rows)
    run.strategy.close()


def test_training_goes_on_eagerly_after_a_failure(device: torch.device) -> None:
    runs = []
    for impl in ("none", FULL):
        run = Run(device, impl, build=lambda: Reads(dropout=0.2), zero="none")
        runs.append(run)
        run.step(2)
        if impl == FULL:
            failing_after(run, 0)
            del run.trace[-2:]
        for _ in range(3):
            run.optimizer.zero_grad(set_to_none=True)
            batches = [{k: v.to(device) for k, v in run.batch().items()} for _ in range(2)]
            run.note(run_microbatches(data_iterator=iter(batches), model=run.model, num_microbatches=2))
            run.optimizer.step()
    assert differences(runs[0].trace, runs[1].trace) == []
    runs[1].strategy.close()


def test_the_same_call_may_be_tried_again(device: torch.device) -> None:
    run = Run(device, FULL, build=Reads)
    failing_after(run, 1)
    failing_after(run, 0)
    run.model.reads = False
    run.step(2)  # One more eager run, as the model is not what it was in the last one.
    run.step(2)
    assert run.num_replays == 1
    run.strategy.close()


MOVES: dict[str, tuple[Callable[[Decoder], Any], str]] = {
    "a parameter is replaced": (
        lambda model: setattr(model.norm, "weight", nn.Parameter(model.norm.weight.detach().clone())),
        "norm.weight",
    ),
    "a parameter is moved": (
        lambda model: setattr(model.layers[1].mix.query.bias, "data", model.layers[1].mix.query.bias.data.clone()),
        "layers.1.mix.query.bias",
    ),
    "a buffer is replaced": (lambda model: setattr(model, "scale", model.scale.clone()), "scale"),
    "a module is replaced": (lambda model: setattr(model, "norm", copy.deepcopy(model.norm)), "norm"),
    "a layer is removed": (lambda model: model.layers.pop(1), "layers.1"),
    "a parameter is added": (
        lambda model: model.norm.register_parameter("lora_A", nn.Parameter(torch.zeros(1))),
        "norm.lora_A",
    ),
    "a parameter is frozen": (lambda model: model.norm.weight.requires_grad_(False), "norm.weight"),
    "the model goes elsewhere and comes back": (lambda model: model.double().float(), "layers.0.mix.query.weight"),
    "state is assigned": (
        lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
        "embedding.weight",
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moved_is_named(device: torch.device, name: str) -> None:
    """Never a replay over memory that is not the model's any more."""
    change, part = MOVES[name]
    run = Run(device, FULL)
    for _ in range(3):
        run.step(2)
    change(run.model)
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    with pytest.raises(StaleAddressError) as caught:
        run.forward_backward([run.batch(), run.batch()])
    assert part in caught.value.what
    assert "reset_cuda_graph" in caught.value.fix
    assert all(torch.equal(value, before[key]) for key, value in run.model.state_dict().items())
    run.strategy.close()


@pytest.mark.parametrize("name", [name for name in MOVES if "layer" not in name])
def test_after_a_reset_training_goes_on_with_what_is_there_now(device: torch.device, name: str) -> None:
    def script(run: Run) -> None:
        for _ in range(3):
            run.step(2)
        MOVES[name][0](run.model)
        run.model.to(run.device)
        if run.strategy.report().engine != "none":
            run.strategy.reset_cuda_graph()  # type: ignore[attr-defined]
        run.optimizer = torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(4):
            run.step(2)

    runs = [Run(device, impl) for impl in ("none", FULL)]
    for run in runs:
        script(run)
    assert differences(runs[0].trace, runs[1].trace) == []
    assert runs[1].num_replays == 2 + 3
    runs[1].strategy.close()


def test_a_model_that_moves_before_the_capture(device: torch.device) -> None:
    """What counts is where the tensors were when they were captured, not when the strategy was built."""
    run = Run(device, FULL, warmup_steps=2)
    run.step(2)
    MOVES["state is assigned"][0](run.model)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for _ in range(3):
        run.step(2)
    assert run.num_replays == 2
    run.strategy.close()


@pytest.mark.parametrize("zero", ["zeros", "buffers"])
def test_a_gradient_whose_memory_moved_is_refused(device: torch.device, zero: str) -> None:
    """The optimizer would read one buffer while the graph fills another."""
    run = Run(device, FULL, zero=zero)
    for _ in range(3):
        run.step(1)
    gradient = run.model.norm.weight.grad
    gradient.data = gradient.data.clone()
    with pytest.raises(StaleAddressError, match="grad of a parameter of shape"):
        run.forward_backward([run.batch()])
    run.strategy.close()


class Rebinds(Decoder):
    """Makes a new tensor of its state in each forward."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.scale = self.scale * 0.9
        return super().forward(tokens, labels) * self.scale.mean()


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_state_that_is_replaced_by_the_step_is_refused(device: torch.device, warmup_steps: int) -> None:
    """A replay would read the old tensor for ever."""
    run = Run(device, FULL, build=Rebinds, warmup_steps=warmup_steps)
    error = failing_after(run, warmup_steps)
    assert "replace state scale" in error.what
    assert differences(run.trace[-2:-1], run.trace[-1:]) == []
    run.strategy.close()


def zeroing(set_to_none: bool) -> Callable[..., Tensor]:
    def forward_backward(*, model: nn.Module, **arguments: Any) -> Tensor:
        model.zero_grad(set_to_none=set_to_none)
        return run_microbatches(model=model, **arguments)

    return forward_backward


def scaling(*, model: nn.Module, **arguments: Any) -> Tensor:
    losses = run_microbatches(model=model, **arguments)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
    return losses


def test_gradients_that_are_used_and_replaced_by_the_step_are_refused(device: torch.device) -> None:
    run = Run(device, FULL, forward_backward=scaling, zero="zeros", warmup_steps=2)
    error = failing_after(run, 2)
    assert "replaces .grad" in error.what
    assert "set_to_none" in error.fix
    assert differences(run.trace[-2:-1], run.trace[-1:]) == []
    run.strategy.close()


@pytest.mark.parametrize("warmup_steps", [1, 3])
@pytest.mark.parametrize("zero", ["zeros", "none"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_zeroed_by_the_step(
    device: torch.device, set_to_none: bool, zero: str, warmup_steps: int
) -> None:
    runs = [
        Run(device, impl, forward_backward=zeroing(set_to_none), zero=zero, warmup_steps=warmup_steps)
        for impl in ("none", FULL)
    ]
    for run in runs:
        for _ in range(7):
            run.step(2)
        for _ in range(4):
            run.step(1, length=4)
    assert differences(runs[0].trace, runs[1].trace) == []
    assert runs[1].num_replays > 0
    assert runs[1].report.num_recordings == 2
    runs[1].strategy.close()


class Drops(Decoder):
    """Leaves a layer out now and then, as the host's dice fall."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        whole, self.order = self.order, (0, 1) if random.random() < 0.5 else (0,)
        try:
            return super().forward(tokens, labels)
        finally:
            self.order = whole


def test_dice_of_the_host_are_refused(device: torch.device) -> None:
    run = Run(device, FULL, build=Drops)
    before = random.getstate()
    error = failing_after(run, 1)
    assert "random" in error.what
    random.setstate(before)
    run.strategy.close()


def returning(make: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda **arguments: make(run_microbatches(**arguments))


def test_a_result_with_a_number_that_changes_is_refused(device: torch.device) -> None:
    numbers: list[int] = []

    def numbered(losses: Tensor) -> Any:
        numbers.append(1)
        return {"loss": losses, "number": len(numbers)}

    run = Run(device, FULL, forward_backward=returning(numbered))
    run.forward_backward([run.batch()])
    with pytest.raises(CaptureError, match=r"each run changes|something else"):
        run.forward_backward([run.batch()])
    assert run.report.num_recordings == 0
    run.strategy.close()


def test_losses_on_the_host_are_refused(device: torch.device) -> None:
    run = Run(device, FULL, forward_backward=returning(lambda x: x.cpu()), warmup_steps=0)
    with pytest.raises(CaptureError):
        run.forward_backward([run.batch()])
    run.strategy.close()


class Breaks(Decoder):
    """A bug of the user's."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.num_calls_left == 0:
            raise KeyError("a bug")
        self.num_calls_left -= 1
        return super().forward(tokens, labels)

    num_calls_left = 3


def test_a_bug_of_the_user_comes_through_and_leaves_no_trace(device: torch.device) -> None:
    run = Run(device, FULL, build=Breaks)
    run.step(2)
    run.optimizer.zero_grad(set_to_none=True)
    run.note(torch.zeros(2))
    with pytest.raises((KeyError, GraphstepError), match="a bug"):
        run.forward_backward([run.batch(), run.batch()])
    run.note(torch.zeros(2))
    assert differences(run.trace[-2:-1], run.trace[-1:]) == []
    run.model.num_calls_left = 100
    run.step(2)
    run.strategy.close()


def test_a_parameter_without_gradient_has_none_afterwards(device: torch.device) -> None:
    """An optimizer passes over it; with a gradient of zero it would decay."""

    class Unused(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return super().forward(tokens, labels) + (self.unused * 2).sum().detach()

    runs = [Run(device, impl, build=Unused) for impl in ("none", FULL)]
    for run in runs:
        for _ in range(4):
            run.step(2)
    assert differences(runs[0].trace, runs[1].trace) == []
    assert runs[1].model.unused.grad is None
    runs[1].strategy.close()


def stepping(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[..., Tensor]:
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def forward_backward(*, model: nn.Module, **arguments: Any) -> Tensor:
        if id(model) not in optimizers:
            optimizers[id(model)] = make(model.parameters())
        losses = run_microbatches(model=model, **arguments)
        optimizers[id(model)].step()
        return losses

    return forward_backward


def test_an_optimizer_inside_the_step_is_refused(device: torch.device) -> None:
    """Its learning rate would be baked in."""
    run = Run(device, FULL, forward_backward=stepping(lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
    error = failing_after(run, 1)
    assert "learning rate" in error.what
    assert differences(run.trace[-2:-1], run.trace[-1:]) == []
    torch.optim.SGD(run.model.parameters(), lr=0.1).step()
    run.strategy.close()


class Descent(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: Tensor) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"])


def test_an_optimizer_with_its_rate_on_the_device_may_step_inside(device: torch.device) -> None:
    rates: list[Tensor] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        rates.append(torch.tensor(0.1, device=device))
        return Descent(parameters, rates[-1])

    traces = []
    for impl in ("none", FULL):
        run = Run(device, impl, forward_backward=stepping(make))
        for _ in range(6):
            run.step(2, optimize=False)
            rates[-1].mul_(0.5)
        traces.append(run.trace)
        run.strategy.close()
    assert differences(*traces) == []


class Sparse(Decoder):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, sparse=True)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_sparse_gradients_are_refused(device: torch.device, warmup_steps: int) -> None:
    run = Run(device, FULL, build=Sparse, warmup_steps=warmup_steps)
    with pytest.raises(CaptureError, match="sparse") as caught:
        run.forward_backward([run.batch()])
    assert "test_full_iteration_failures.py" in caught.value.where or "models.py" in caught.value.where
    run.strategy.close()


def test_iterators_are_read_before_the_step(device: torch.device) -> None:
    """A generator that fails tells so itself, and nothing has run."""

    def batches(run: Run) -> Iterator[Any]:
        yield run.batch()
        raise OSError("the disk")

    run = Run(device, FULL)
    run.step(2)
    with pytest.raises(OSError, match="the disk"):
        run.strategy.forward_backward(data_iterator=batches(run), num_microbatches=2)
    run.step(2)
    run.strategy.close()
