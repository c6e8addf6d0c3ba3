"""Recommendations, budgets and what a plan says."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tests.coverage.documents import Loop, Model
from tests.planning.test_predict import COSTS
from torch import nn

import graphstep
from graphstep.coverage import StepMeasurement, measure_steps
from graphstep.errors import UserInputError
from graphstep.planning import Candidate, Measured, MeasuredStep, Plan, calibrate, candidates_of, parts_of, plan_step
from graphstep.planning.operations import Block, Operation, StepLog
from graphstep.planning.scopes import ITERATION
from graphstep.planning.work import Work

NAMES = ("layers.0", "layers.1")
LAYERS = Candidate(name="layers", graph_of=lambda s: s if s in NAMES else None, switches=("--cuda-graph-impl", "local"))
STEP = Candidate(name="step", graph_of=lambda _: ITERATION, is_iteration=True, how="graph_step")


def text_of(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(plan.render())
    return console.export_text()


def measured_step(
    *, kind: str = "cuda", step_ms: float = 1.0, device_us: float = 5.0, spread: float = 0.0
) -> MeasuredStep:
    """100 launches of 10 us, 80 of them in layers; 100 MiB of the layers and 10 of the rest in turns."""
    scopes = [*["embedding"] * 10, *["layers.0"] * 40, *["layers.1"] * 40, *["head"] * 10]
    mib = 2**20
    log = StepLog(
        operations=[Operation("aten::add", scope, False) for scope in scopes],
        blocks=[Block(100 * mib, "layers.0", False, 0, 1, 2), Block(10 * mib, "head", False, 0, 3, 4)],
        num_microbatches=1,
    )
    return MeasuredStep(
        device=torch.device(kind),
        times=StepMeasurement(step_ms=step_ms, host_ms=step_ms, step_spread_ms=spread),
        log=log,
        work=tuple(Work(scope, False, 10.0, device_us) for scope in scopes),
        host_factor=1.0,
        peak_bytes=100 * mib,
        free_bytes=1000 * mib if kind == "cuda" else None,
    )


def test_the_fastest_is_recommended() -> None:
    plan = Plan.of(measured_step(), (LAYERS, STEP), COSTS)
    layers, step = plan.predictions
    assert layers.num_launches == 22
    assert step.num_launches == 1
    # Graphs run gapless on the device: 100 * (5 + 1) us after a call of 30 us.
    assert step.step_ms == pytest.approx(0.63)
    assert plan.recommended is step
    assert "recommended: step: 100 launches become 1, 1.59 times as fast" in plan.advice()


def test_a_budget_excludes_what_needs_more() -> None:
    tight = Plan.of(measured_step(), (LAYERS, STEP), COSTS, budget_bytes=5 * 2**20)
    layers, step = tight.predictions
    # The rest of the step can no longer lie where the layers were; of a whole step there is no rest.
    assert layers.extra_bytes == 10 * 2**20
    assert not layers.fits
    assert step.fits
    assert tight.recommended is step
    none = Plan.of(measured_step(), (LAYERS,), COSTS, budget_bytes=5 * 2**20)
    assert none.recommended is None
    assert "within 5 MiB" in none.advice()
    assert "too large" in text_of(none)


def test_what_the_options_rule_out_is_listed_and_not_recommended() -> None:
    plan = Plan.of(measured_step(), (LAYERS, replace(STEP, problem="it reads on the host")), COSTS)
    assert plan.recommended is plan.predictions[0]
    assert "not possible, step: it reads on the host" in text_of(plan)


def test_of_equals_the_one_with_the_least_memory_is_recommended() -> None:
    quick = replace(COSTS, region_call_us=1.0, iteration_call_us=1.0)
    busy = measured_step(device_us=50.0, step_ms=8.0, spread=1.0)
    plan = Plan.of(busy, (LAYERS, STEP), quick)
    assert abs(plan.predictions[0].step_ms - plan.predictions[1].step_ms) < 0.5
    assert plan.recommended is plan.predictions[1]


def test_a_step_that_keeps_the_device_busy_gains_nothing() -> None:
    busy = measured_step(device_us=100.0, step_ms=10.01)
    plan = Plan.of(busy, (LAYERS, STEP), COSTS)
    assert plan.recommended is None
    assert plan.launch_boundness < 0.01
    assert "nothing is predicted to gain" in plan.advice()


def test_launch_boundness_is_the_idle_share_of_the_device() -> None:
    assert Plan.of(measured_step(), (), COSTS).launch_boundness == pytest.approx(0.5)
    counted = Plan.of(measured_step(kind="cpu", step_ms=4.0), (), COSTS)
    assert counted.launch_boundness == pytest.approx(0.25)


def test_without_a_gpu_the_estimate_is_called_one_and_launches_decide() -> None:
    plan = Plan.of(measured_step(kind="cpu"), (LAYERS, STEP), COSTS)
    assert plan.model == "counted-operations"
    assert plan.gain_of(plan.predictions[0]) is None
    assert plan.recommended is plan.predictions[1]
    assert plan.budget_bytes is None
    assert "an estimate, there is no GPU here" in text_of(plan)


def test_data_has_everything_and_survives_a_round_trip() -> None:
    plan = Plan.of(measured_step(), (LAYERS, STEP), COSTS)
    found = Measured(
        step_ms=0.7, num_launches=1.0, num_graphs=1.0, pool_bytes=2**20, static_bytes=64, capture_seconds=0.5
    )
    plan = plan.with_measured("step", found)
    plain = json.loads(json.dumps(plan.to_json()))
    assert plain["model"] == "two-clocks"
    assert plain["eager"]["kernel_ms"] == pytest.approx(0.5)
    assert plain["recommended"] == "step"
    assert plain["candidates"][1]["measured"]["step_ms"] == 0.7
    assert plain["candidates"][0]["measured"] is None
    assert plain["costs"]["region_call_us"] == 40.0
    assert plain["candidates"][1]["gain"] == pytest.approx(1 / 0.63)
    assert "0.63 / 0.70" in text_of(plan)
    assert "1.59x" in text_of(plan)


def test_a_candidate_that_is_not_there_cannot_have_been_measured() -> None:
    plan = Plan.of(measured_step(), (LAYERS, STEP), COSTS)
    found = Measured(step_ms=0.7, num_launches=1.0, num_graphs=1.0, pool_bytes=0, static_bytes=0, capture_seconds=0.5)
    with pytest.raises(UserInputError, match="did you mean layers"):
        plan.with_measured("layer", found)
    with pytest.raises(UserInputError, match="name one of: layers, step"):
        plan.with_measured("qkv", found)


def test_a_negative_budget_is_an_error_before_a_step_runs() -> None:
    def step() -> None:
        raise AssertionError

    with pytest.raises(UserInputError, match="-1 is no size of memory"):
        plan_step(step, Model(1), budget_bytes=-1, costs=COSTS)


def test_a_model_that_has_graphs_is_not_planned_for() -> None:
    model = Model(2)
    with (
        graphstep.attach(model, regions={"layers.*": "layer"}),
        pytest.raises(UserInputError, match=r"such as layers\.0"),
    ):
        plan_step(Loop(model), model, costs=COSTS)
    plan_step(Loop(model), model, costs=COSTS, num_timed=1)


def test_a_step_of_ones_own_on_the_tape() -> None:
    loop = Loop(Model(3))
    plan = plan_step(loop, loop.model, costs=COSTS, num_timed=3)
    names = {each.candidate.name: each for each in plan.predictions}
    assert set(names) == {"up", "down", "whole layers", "forward and backward", "whole step"}
    assert names["whole layers"].candidate.regions == {"layers.*": "layer"}
    assert names["up"].candidate.regions == {"layers.*.up": "up"}
    assert names["whole layers"].num_graphs == 6
    assert names["up"].num_graphs == 6
    assert names["whole step"].num_launches == 2  # Its batch is copied.
    assert plan.recommended is names["whole step"]
    with graphstep.attach(loop.model, regions=names["whole layers"].candidate.regions) as manager:
        after = measure_steps(loop, "cpu", num_timed=3, num_profiled=0)
        found = Measured.of(manager.report(), after)
    plan = plan.with_measured("whole layers", found)
    assert found.pool_bytes == names["whole layers"].pool_bytes
    assert found.static_bytes == names["whole layers"].static_bytes
    assert found.step_ms == after.step_ms
    assert "predicted / measured" in text_of(plan)


def test_a_model_that_is_not_called_is_an_error() -> None:
    loop = Loop()
    with pytest.raises(UserInputError, match="did not call Model"):
        plan_step(loop, Model(), costs=COSTS, num_timed=1)


def test_a_model_without_repeated_parts_has_its_steps_alone() -> None:
    model = nn.Linear(8, 1)
    assert parts_of(model) == ()
    assert [each.name for each in candidates_of(model)] == ["forward and backward", "whole step"]


def test_lists_inside_of_layers_are_not_layers() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    model = nn.Sequential(Outer(), Outer())
    whole = next(each for each in candidates_of(model) if each.name == "whole layers")
    assert whole.regions == {"*": "layer"}


def test_layers_with_others_between_them_are_found_one_by_one() -> None:
    class Block(nn.Module):
        def __init__(self, has_tail: bool = True) -> None:
            super().__init__()
            self.up = nn.Linear(2, 2)
            self.tail = nn.Linear(2, 2) if has_tail else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x) if self.tail is None else self.tail(self.up(x))

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), Block(False), Block(), nn.Tanh(), nn.Linear(2, 2))
    found = {each.name: each.regions for each in candidates_of(model)}
    assert found["whole layers"] == {"2": "layer", "3": "layer"}
    assert found["up"] == {"2.up": "up", "3.up": "up"}
    with graphstep.attach(model, regions=found["whole layers"]) as manager:
        assert [row.name for row in manager.report().rows] == ["2", "3"]


def test_costs_are_measured_and_leave_the_generators_alone() -> None:
    before = torch.get_rng_state()
    costs = calibrate("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < costs.eager_operation_us < 10_000
    assert 0 < costs.graph_operation_us < 10_000
    assert costs.small_kernel_us == 0
    assert min(costs.to_json().values()) >= 0


@pytest.mark.gpu
def test_on_a_gpu_both_clocks_are_read_and_graphs_counted_as_predicted() -> None:
    layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True, device="cuda")
    model = nn.TransformerEncoder(layer, num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(2, 64, 128, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    plan = plan_step(step, model)
    eager_ms = plan.measured.times.step_ms
    assert eager_ms is not None
    assert plan.model == "two-clocks"
    assert plan.launch_boundness > 0
    assert plan.budget_bytes is not None
    layers = next(each for each in plan.predictions if each.candidate.name == "whole layers")
    with graphstep.attach(model, regions=layers.candidate.regions) as manager:
        after = measure_steps(step, "cuda")
        found = Measured.of(manager.report(), after)
    assert found.step_ms is not None
    assert found.num_graphs == layers.num_graphs
