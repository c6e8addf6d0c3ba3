"""What ``local`` changes on a model, when it gives it back, and what becomes of copies and of what callers hold."""

from __future__ import annotations

import copy
import gc
import io
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder, Layer, in_order, run_microbatches
from tests.strategies.runs import Run, compared, differences
from torch import Tensor, nn

from graphstep.errors import CaptureError, ConfigError, GraphstepError, LifecycleError
from graphstep.models.segments import Segment, SegmentedModule

LOCAL = "local"
WITH_DROPOUT = partial(Decoder, dropout=0.2)


def forwards(model: Decoder) -> list[Any]:
    return [layer.__dict__.get("forward") for layer in model.layers]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_closing_gives_the_layers_back(device: torch.device, num_steps: int) -> None:
    def script(run: Run) -> None:
        for _ in range(num_steps):
            run.step(1)
        run.strategy.close()
        run.strategy.close()
        assert forwards(run.model) == [None, None]
        for _ in range(2):
            run.optimizer.zero_grad()
            batches = [{name: value.to(run.device) for name, value in run.batch().items()}]
            run.note(run_microbatches(data_iterator=iter(batches), model=run.model, num_microbatches=1))
            run.optimizer.step()

    compared(device, LOCAL, script, build=WITH_DROPOUT)


def test_a_closed_strategy_refuses(device: torch.device) -> None:
    run = Run(device, LOCAL)
    run.step(1)
    run.strategy.close()
    for use in (lambda: run.forward_backward([run.batch()]), run.strategy.end_step):
        with pytest.raises(LifecycleError):
            use()
    assert run.report.pool_bytes == 0


def test_a_backward_after_closing_is_refused(device: torch.device) -> None:
    run = Run(device, LOCAL)
    run.step(1)
    batch = {name: value.to(device) for name, value in run.batch().items()}
    loss = run.model(batch["tokens"], batch["labels"])
    assert run.num_replays == 2
    run.strategy.close()
    with pytest.raises(GraphstepError, match="closed"):
        loss.backward()


def test_two_strategies_on_one_model_are_refused(device: torch.device) -> None:
    first = Run(device, LOCAL)
    with pytest.raises(ConfigError, match="another strategy"):
        Run(device, LOCAL, build=lambda: first.model)
    first.step(1)
    first.step(1)
    assert first.num_replays == 2
    first.strategy.close()
    second = Run(device, LOCAL, build=lambda: first.model)
    second.step(1)
    second.step(1)
    assert second.num_replays == 2
    second.strategy.close()


def test_two_models_do_not_meet(device: torch.device) -> None:
    alone = [compared(device, LOCAL, lambda run: [run.step(1) for _ in range(4)], build=build) for build in BUILDS]
    both = [Run(device, LOCAL, build=build) for build in BUILDS]
    for _ in range(4):
        for run in both:
            run.step(1)
    for one, other in zip(alone, both, strict=True):
        for taken in (*one.trace, *other.trace):
            taken["rng"] = taken["cuda rng"] = None  # one generator for both
        assert differences(one.trace, other.trace) == []
        other.strategy.close()


BUILDS = [partial(Decoder, num_layers=1), partial(Decoder, num_layers=2)]


class Scaled(Layer):
    """Does more than its segments."""

    def forward(self, hidden: Tensor, *context: Tensor) -> Tensor:
        return super().forward(hidden, *context) * 0.5


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    """Its segments are not all that it computes."""
    with pytest.raises(ConfigError) as caught:
        Run(torch.device("cpu"), LOCAL, build=partial(Decoder, layer=Scaled))
    assert [problem.where for problem in caught.value.problems] == ["layers.0", "layers.1"]
    assert all(problem.code == "forward-not-segments" for problem in caught.value.problems)


def test_a_forward_that_others_replaced_is_refused() -> None:
    def build() -> Decoder:
        model = Decoder()
        own = model.layers[0].forward
        model.layers[0].forward = lambda x: own(x) * 2  # type: ignore[method-assign]
        return model

    with pytest.raises(ConfigError, match="replaced on the instance"):
        Run(torch.device("cpu"), LOCAL, build=build)


class ReturnsTwo(SegmentedModule):
    def __init__(self, _dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def segments(self) -> tuple[Segment, ...]:
        return (Segment("mlp", "linear", lambda x: (self.linear(x), x), (self.linear,)),)


def test_a_layer_that_returns_two_tensors_fails_as_eagerly(device: torch.device) -> None:
    for impl in ("none", LOCAL):
        run = Run(device, impl, build=partial(Decoder, layer=ReturnsTwo))
        with pytest.raises(TypeError, match="must return one tensor"):
            run.step(1)
        run.strategy.close()


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_copy_of_the_model_runs_on_its_own(
    device: torch.device, duplicate: Callable[[nn.Module], nn.Module], num_steps: int
) -> None:
    """As averaged weights are kept, and whole models saved: the graphs belong to the original."""
    run = Run(device, LOCAL)
    for _ in range(num_steps):
        run.step(1)
    twin = duplicate(run.model)
    eager = Decoder().to(device)
    eager.load_state_dict(twin.state_dict())
    replays = run.num_replays
    batch = {name: value.to(device) for name, value in run.batch().items()}
    with torch.no_grad():
        for parameter in (*twin.parameters(), *eager.parameters()):
            parameter.mul_(1.1)
    losses = [model(batch["tokens"], batch["labels"]) for model in (twin, eager)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert torch.equal(twin.get_parameter("norm.weight").grad, eager.norm.weight.grad)
    assert run.num_replays == replays
    again = Run(device, LOCAL, build=lambda: twin)
    again.step(1)
    again.step(1)
    assert again.num_replays == 2
    for each in (run, again):
        each.strategy.close()


def test_the_state_dict_is_untouched(device: torch.device) -> None:
    run = Run(device, LOCAL)
    run.step(1)
    assert run.model.state_dict().keys() == Decoder().state_dict().keys()
    run.strategy.close()


class Keeps(Decoder):
    """Keeps the results of some layers, as probes do."""

    def __init__(self, *which: int) -> None:
        super().__init__(3, 0.2)
        self.kept: list[Tensor] = []
        for index in which or range(3):
            self.layers[index].register_forward_hook(lambda _module, _inputs, out: self.kept.append(out.detach()))


@pytest.mark.parametrize("which", [(), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("forward_backward", [run_microbatches, in_order("ffbb")], ids=["one by one", "in flight"])
def test_results_that_a_caller_keeps_do_not_change(device: torch.device, which: Any, forward_backward: Any) -> None:
    """Design rule 2: never silently overwritten data."""
    runs = []
    for impl in ("none", LOCAL):
        run = Run(device, impl, build=partial(Keeps, *which), forward_backward=forward_backward)
        for _ in range(5):
            run.step(2)
        runs.append(run)
    eager, graphed = (run.model.kept for run in runs)
    assert len(eager) == len(graphed) == (len(which) or 3) * 2 * 5
    assert all(map(torch.equal, eager, graphed))
    assert differences(runs[0].trace, runs[1].trace) == []
    assert "an earlier result is still held" in runs[1].reasons()
    runs[1].strategy.close()


def test_results_that_are_dropped_are_no_hindrance(device: torch.device) -> None:
    run = Run(device, LOCAL, build=Keeps)
    for _ in range(4):
        run.step(1)
        run.model.kept.clear()
    assert run.num_replays == 3 * 3
    run.strategy.close()


def test_a_second_backward_is_refused(device: torch.device) -> None:
    def twice(**arguments: Any) -> Tensor:
        model, batch = arguments["model"], next(arguments["data_iterator"])
        loss = model(batch["tokens"], batch["labels"])
        loss.backward(retain_graph=True)
        if calls:
            loss.backward()
        calls.append(1)
        return loss.detach()[None]

    calls: list[int] = []
    run = Run(device, LOCAL, forward_backward=twice)
    run.step(1)
    with pytest.raises(LifecycleError, match="run already") as caught:
        run.step(1)
    assert "layers.1" in caught.value.where
    run.strategy.close()


class StopError(Exception):
    pass


def test_an_error_between_forward_and_backward(device: torch.device) -> None:
    """What was in flight is given up; training goes on with replays."""

    def fails(**arguments: Any) -> Tensor:
        if arguments["num_microbatches"] == 2:
            batch = next(arguments["data_iterator"])
            arguments["model"](batch["tokens"], batch["labels"])
            raise StopError
        return run_microbatches(**arguments)

    def script(run: Run) -> None:
        for number in (1, 1, 2, 1, 1):
            try:
                run.step(number)
            except StopError:
                gc.collect()

    run = compared(device, LOCAL, script, build=WITH_DROPOUT, forward_backward=fails)
    assert run.num_replays == 2 * 4
    assert run.reasons() == {"observed": 2}


def test_an_error_that_is_kept(device: torch.device) -> None:
    """Its traceback holds the results of the step: those slots stay taken, and calls run eagerly."""
    errors: list[StopError] = []

    def fails(**arguments: Any) -> Tensor:
        if arguments["num_microbatches"] == 2:
            batch = next(arguments["data_iterator"])
            loss = arguments["model"](batch["tokens"], batch["labels"])
            raise StopError(loss)
        return run_microbatches(**arguments)

    def script(run: Run) -> None:
        errors.clear()
        for number in (1, 1, 2, 1, 1):
            try:
                run.step(number)
            except StopError as error:
                errors.append(error)

    compared(device, LOCAL, script, build=WITH_DROPOUT, forward_backward=fails)


class ReadsLayer(Layer):
    """The last of the layers reads the host."""

    reads = True

    def _mlp(self, x: Tensor, *context: Tensor) -> Tensor:
        y = super()._mlp(x, *context)
        return y * (y.sum().item() * 0 + 1) if self.reads else y  # the line to name


class ReadsLast(Decoder):
    def __init__(self) -> None:
        super().__init__(3, 0.2, layer=ReadsLayer)
        for layer in self.layers[:-1]:
            layer.reads = False


@pytest.mark.parametrize("modules", [(), ("attn",), ("mlp",)], ids=["layers", "attn", "mlp"])
@pytest.mark.parametrize("zero", ["none", "buffers"])
def test_a_capture_that_fails_half_way(device: torch.device, modules: Any, zero: str) -> None:
    """Design rule 7: what was captured before is released, and training goes on eagerly."""

    def script(run: Run) -> None:
        for step in range(4):
            if step == 0 and run.report.engine != "none" and modules != ("attn",):
                with pytest.raises(CaptureError) as caught:
                    run.step(2)
                assert "layers.2" in caught.value.where
                assert "the line to name" in caught.value.where
                assert run.report.num_recordings == 0
                assert all(row.pool_bytes == 0 for row in run.report.rows)
            else:
                run.step(2)
            run.note(torch.zeros(1))

    run = compared(device, LOCAL, script, build=ReadsLast, modules=modules, zero=zero)
    if modules != ("attn",):
        assert run.num_replays == 0
        assert run.reasons()["not captured yet"] == 3 * 3 * 2


CALLS: Counter[int] = Counter()


class BugLayer(Layer):
    """A bug that shows on the third call: while capturing."""

    def _mlp(self, x: Tensor, *context: Tensor) -> Tensor:
        CALLS[id(self)] += 1
        if CALLS[id(self)] == 3:
            raise KeyError("a bug")
        return super()._mlp(x, *context)


def test_any_error_while_capturing_releases_everything(device: torch.device) -> None:
    run = Run(device, LOCAL, build=partial(Decoder, 3, layer=BugLayer))
    with pytest.raises((KeyError, GraphstepError), match="a bug"):
        run.step(1)
    assert run.report.num_recordings == 0
    run.step(1)
    assert run.num_replays == 0
    run.strategy.close()


class Rebinding(Layer):
    def _mix(self, x: Tensor, *context: Tensor) -> Tensor:
        self.mix.mean = self.mix.mean * 0.9
        return super()._mix(x, *context)


def test_state_that_a_layer_replaces_is_refused(device: torch.device) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            if step == 0 and run.report.engine != "none":
                with pytest.raises(CaptureError, match=r"replace state layers\.0\.mix\.mean"):
                    run.step(1)
            else:
                run.step(1)

    assert compared(device, LOCAL, script, build=partial(Decoder, layer=Rebinding)).report.num_recordings == 0
