"""``graph_step`` in places where loops have it: methods, arguments of any kind, beside other graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.strategies.step_jobs import Job, compared, replays, zeroing_in_place
from torch import Tensor, nn

import graphstep
from graphstep.capture.reasons import EagerReason
from graphstep.capture.session import GraphSession
from graphstep.errors import CaptureError, ConfigError
from graphstep.strategies import FullCudaGraphWrapper


def parts(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=2.0**-7, fused=True)


def batches(device: torch.device, number: int) -> list[Tensor]:
    data = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=data).to(device) for _ in range(number)]


class Plain:
    def __init__(self, device: torch.device) -> None:
        self.model, self.optimizer = parts(device)

    def step(self, values: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(values).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Decorated(Plain):
    @graphstep.graph_step(cuda_graph_warmup_steps=2)
    def step(self, values: Tensor) -> Tensor:
        """Docstring."""
        return super().step(values)


class DecoratedAgain(Decorated):
    @graphstep.graph_step
    def step(self, values: Tensor) -> Tensor:
        return super().step(values)


@pytest.mark.parametrize("kind", [Decorated, DecoratedAgain])
def test_a_method_decorated_in_the_class(device: torch.device, kind: Any) -> None:
    """Each instance has graphs of its own."""
    plain, first, second = Plain(device), kind(device), kind(device)
    for values in batches(device, 7):
        expected = plain.step(values)
        assert torch.equal(first.step(values), expected)
        assert torch.equal(second.step(values), expected)
    assert first.step.report().rows[0].num_replays == (5 if kind is Decorated else 4)
    assert first.step is not second.step
    assert kind.step.report().rows == ()
    assert Decorated.step.__doc__ == "Docstring."
    first.step.close()
    second.step.close()


def test_a_method_of_a_class_with_slots_is_refused() -> None:
    class Slotted:
        __slots__ = ()

        @graphstep.graph_step
        def step(self, values: Tensor) -> Tensor:
            return values

    with pytest.raises(ConfigError, match="no __dict__") as caught:
        Slotted().step(torch.zeros(1))
    assert "graph_step(instance.step)" in caught.value.problems[0].fix


def test_model_optimizer_and_scaler_may_be_arguments(device: torch.device) -> None:
    def step(model: nn.Module, tools: dict[str, Any], values: Tensor) -> Tensor:
        tools["optimizer"].zero_grad()
        loss: Tensor = model(values).square().mean()
        tools["scaler"].scale(loss).backward()
        tools["scaler"].step(tools["optimizer"])
        tools["scaler"].update()
        return loss.detach()

    def losses(call: Callable[..., Tensor]) -> Tensor:
        model, optimizer = parts(device)
        tools = {"optimizer": optimizer, "scaler": torch.amp.GradScaler(device.type, growth_interval=3)}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        found = []
        for values in batches(device, 9):
            found.append(call(model, tools, values))
            schedule.step()
        return torch.stack(found)

    graphed = graphstep.graph_step(step)
    assert torch.equal(losses(graphed), losses(step))
    assert graphed.report().rows[0].num_replays == 6
    graphed.close()


def test_a_model_that_has_graphs_of_its_own_is_refused(device: torch.device) -> None:
    plain = Plain(device)
    with graphstep.attach(plain.model, regions={"0": "layer"}) as manager:
        step = graphstep.graph_step(plain.step)
        for values in batches(device, 3):
            step(values)
        with pytest.raises(
            CaptureError, match=r"1 modules of the step have graphs of their own: Sequential\.0"
        ) as caught:
            step(batches(device, 1)[0])
        assert "OptimizerGraph" in caught.value.fix
    assert manager.session.is_closed
    for values in batches(device, 4):
        step(values)
    assert step.report().rows[0].num_replays > 0
    step.close()


@pytest.mark.filterwarnings("ignore:step runs eagerly")
def test_with_auto_the_graphs_of_a_model_go_on(device: torch.device) -> None:
    plain, other = Plain(device), Plain(device)
    manager = graphstep.attach(plain.model, regions={"0": "layer"})
    step = graphstep.graph_step(plain.step, policy="auto")
    for values in batches(device, 8):
        assert torch.equal(step(values), other.step(values))
    assert manager.report().rows[0].num_replays > 0
    step.close()
    manager.close()


@pytest.mark.parametrize("outside", [False, True])
def test_parameters_that_are_frozen_and_thawed(device: torch.device, outside: bool) -> None:
    """With the optimizer in the step it is followed; without, what to do is said by the error."""
    traces = []
    for is_graphed in (False, True):
        plain = Plain(device)
        step: Any = graphstep.graph_step(plain.step) if is_graphed else plain.step
        trace = []
        for index, values in enumerate(batches(device, 16)):
            if index in (6, 11):
                plain.model[0].weight.requires_grad_(index == 11)
                if outside and is_graphed:
                    step.reset_cuda_graph()
            trace += [step(values), *(p.detach().clone() for p in plain.model.parameters())]
        traces.append(trace)
    assert all(map(torch.equal, *traces))
    assert step.report().rows[0].num_replays > 6
    step.close()


def test_what_is_left_in_a_frozen_parameter_counts(device: torch.device) -> None:
    """A gradient of zeros has momentum go on; without any, the optimizer leaves the parameter alone."""

    def script(job: Job) -> None:
        job.optimizer = torch.optim.SGD(job.model.parameters(), lr=2.0**-5, momentum=0.9, fused=True)
        frozen = job.model.outer.bias
        for index in range(16):
            if index == 2:
                frozen.requires_grad_(False)
            if index == 8:
                frozen.grad = None
            if index == 13:
                frozen.grad = torch.ones_like(frozen)
            job.run()

    job = compared(device, zeroing_in_place, script)
    assert replays(job) >= 6
    job.close()


def test_zeroing_that_no_warmup_has_shown(device: torch.device) -> None:
    def forward_backward(
        *, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        model.zero_grad()
        loss: Tensor = model(next(data_iterator)).square().mean()
        loss.backward()
        return loss.detach().view(1)

    model, _ = parts(device)
    wrapper = FullCudaGraphWrapper(
        forward_backward, model=model, session=GraphSession(device), cuda_graph_warmup_steps=0
    )
    with pytest.raises(CaptureError, match=r"replaces \.grad") as caught:
        wrapper(data_iterator=iter(batches(device, 1)), num_microbatches=1)
    assert "cuda_graph_warmup_steps" in caught.value.fix
    wrapper.close()


def test_an_argument_that_is_returned_stays_as_it_is(device: torch.device) -> None:
    """In the warmup calls as well, which run on the static inputs."""
    graphed = graphstep.graph_step(lambda values: (values * 2, values, values[1:]))
    given = batches(device, 7)
    kept = [graphed(values) for values in given]
    for values, (double, same, part) in zip(given, kept, strict=True):
        assert torch.equal(double, values * 2)
        assert torch.equal(same, values)
        assert torch.equal(part, values[1:])
    graphed.close()


def test_a_graphed_step_in_another_is_refused(device: torch.device) -> None:
    inner, outer = Plain(device), Plain(device)
    evaluate = graphstep.graph_step(lambda values: inner.model(values).detach())

    def step(values: Tensor) -> Tensor:
        return outer.step(values) + evaluate(values).mean()

    graphed = graphstep.graph_step(step)
    for values in batches(device, 3):
        graphed(values)
    with pytest.raises(CaptureError, match="the step uses evaluate, which has a graph of its own") as caught:
        graphed(batches(device, 1)[0])
    assert "__wrapped__" in caught.value.fix
    graphed.close()
    with_auto = graphstep.graph_step(step, policy="auto")
    plain_inner, plain_outer = Plain(device), Plain(device)
    outer.model.load_state_dict(plain_outer.model.state_dict())
    outer.optimizer = torch.optim.AdamW(outer.model.parameters(), lr=2.0**-7, fused=True)
    for index, values in enumerate(batches(device, 7)):
        expected = plain_outer.step(values) + plain_inner.model(values).detach().mean()
        if index == 3:
            with pytest.warns(UserWarning, match="runs eagerly"):
                found = with_auto(values)
        else:
            found = with_auto(values)
        assert torch.equal(found, expected)
    assert evaluate.report().rows[0].num_replays > 0
    with_auto.close()
    evaluate.close()


@pytest.mark.parametrize("kind", ["generator", "loader"])
def test_a_batch_that_the_step_takes_itself_is_refused(device: torch.device, kind: str) -> None:
    """Each replay would train on the batch of the capture."""
    plain = Plain(device)
    given = batches(device, 8)
    loader = torch.utils.data.DataLoader(given, batch_size=None)
    source = (values for values in given) if kind == "generator" else iter(loader)
    graphed = graphstep.graph_step(lambda: plain.step(next(source)))
    for _ in range(3):
        graphed()
    with pytest.raises(CaptureError, match="the step takes from source, an iterator") as caught:
        graphed()
    assert "as an argument" in caught.value.fix
    graphed.close()


def test_a_rate_that_the_step_reads_from_its_scheduler(device: torch.device) -> None:
    """It is a number of the host: captured anew when the scheduler has stepped."""
    results = []
    for is_graphed in (False, True):
        plain = Plain(device)
        schedule = torch.optim.lr_scheduler.StepLR(plain.optimizer, 1, gamma=0.5)

        def both(
            values: Tensor, plain: Plain = plain, schedule: torch.optim.lr_scheduler.StepLR = schedule
        ) -> tuple[Tensor, Any]:
            return plain.step(values), schedule.get_last_lr()[0]

        step: Any = graphstep.graph_step(both) if is_graphed else both
        found = []
        for index, values in enumerate(batches(device, 14)):
            found.append(step(values)[1])
            if index == 6:
                schedule.step()
        results.append(found)
    assert results[0] == results[1]
    assert len(set(results[0])) == 2
    assert step.report().rows[0].num_replays > 5
    step.close()


# ----- more signatures than there is room for


def test_more_signatures_in_turn_than_graphs_are_warned_of_once(device: torch.device) -> None:
    plain = Plain(device)
    step = graphstep.graph_step(plain.step, max_graphs=2, modules=[plain.model])

    def rotate() -> None:
        for index in range(12):
            step(torch.ones(2 + index % 3, 4, device=device))

    with pytest.warns(UserWarning, match=r"more signatures than the 2 of max_graphs.*changed shape") as caught:
        rotate()
    assert len(caught) == 1
    reasons = step.report().rows[0].eager_calls
    assert reasons[EagerReason.TOO_MANY_SIGNATURES] == 12 - 3 - 1
    assert step.report().num_recordings == 0
    step.close()


def test_a_value_that_is_another_in_each_call_is_named(device: torch.device) -> None:
    def step(values: Tensor, number: int) -> Tensor:
        return values * number

    graphed = graphstep.graph_step(step, max_graphs=2)

    def run() -> None:
        for number in range(8):
            assert torch.equal(graphed(torch.ones(2, device=device), number), torch.full((2,), number, device=device))

    with pytest.warns(UserWarning, match=r"batch\[0\]\[1\] changed value"):
        run()
    graphed.close()


def test_graphs_that_are_pushed_out_are_counted_and_come_back(device: torch.device) -> None:
    plain, other = Plain(device), Plain(device)
    step = graphstep.graph_step(plain.step, max_graphs=2)

    def run() -> None:
        for size in (2, 3, 4, 2, 3, 4):
            for _ in range(5):
                values = torch.ones(size, 4, device=device)
                assert torch.equal(step(values), other.step(values))

    with pytest.warns(UserWarning, match="more signatures"):
        run()
    row = step.report().rows[0]
    assert row.num_recordings == 2
    assert row.num_evictions == 4
    assert row.eager_calls[EagerReason.TOO_MANY_SIGNATURES] == 6
    step.close()


def test_something_that_changes_again_and_again_is_warned_of(device: torch.device) -> None:
    plain = Plain(device)
    plain.model.scale = 1.0

    def step(values: Tensor) -> Tensor:
        return plain.model(values) * plain.model.scale

    graphed = graphstep.graph_step(lambda values: step(values).detach(), policy="auto")

    def run() -> None:
        for index in range(20):
            plain.model.scale = 1.0 + index // 4
            graphed(torch.ones(2, 4, device=device))

    with pytest.warns(UserWarning, match=r"scale changes; keep it in a tensor"):
        run()
    graphed.close()
