"""The two clocks, runs of captured neighbours, and memory, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphstep.planning import Candidate, Costs, Part
from graphstep.planning.candidates import _named
from graphstep.planning.operations import MODEL, Block, Entry, Operation, StepLog
from graphstep.planning.predict import launched, memory_need, predicted_us, scaled, two_clocks_us
from graphstep.planning.scopes import ITERATION
from graphstep.planning.work import Work

COSTS = Costs(
    eager_operation_us=10.0,
    graph_operation_us=3.0,
    small_kernel_us=2.0,
    region_call_us=40.0,
    iteration_call_us=30.0,
)
LAYERS = Candidate(name="layers", graph_of=lambda scope: scope if scope.startswith("layers.") else None)
STEP = Candidate(name="step", graph_of=lambda scope: None if scope == "outside" else ITERATION, is_iteration=True)


def work_of(*scopes: str, host: float = 10.0, device: float = 4.0) -> list[Work]:
    return [Work(scope.removeprefix("-"), scope.startswith("-"), host, device) for scope in scopes]


def test_a_slow_host_decides() -> None:
    assert two_clocks_us(work_of("a", "a", "a")) == 3 * 10 + 4


def test_a_busy_device_decides() -> None:
    assert two_clocks_us(work_of("a", "a", "a", device=50.0)) == 10 + 3 * 50


def test_a_wait_takes_the_lead_of_the_host_away() -> None:
    work = work_of("a", "a", device=50.0)
    wait = Work("a", False, 1.0, 0.0, 0, waits=True)
    assert two_clocks_us([*work, wait, *work]) == 110 + 10 + 2 * 50
    assert two_clocks_us([*work, *work]) == 10 + 4 * 50


def test_host_times_are_scaled_to_the_step_that_was_measured() -> None:
    work, factor = scaled(work_of("a", "a", "a"), step_us=19.0)
    assert factor == pytest.approx(0.5)
    assert two_clocks_us(work) == pytest.approx(19.0)
    assert sum(each.host_us for each in work) == pytest.approx(15.0)


def test_of_several_factors_the_largest_is_taken() -> None:
    work, factor = scaled(work_of("a", "a", device=100.0), step_us=210.0)
    assert factor == 1.0
    assert work == tuple(work_of("a", "a", device=100.0))


def test_neighbours_of_a_graph_are_one_launch() -> None:
    work = work_of("in", "layers.0", "layers.0", "layers.1", "out", "-layers.1", "-layers.1", "-layers.0", "in")
    after = launched(work, LAYERS, COSTS)
    assert after.num_graphs == 4
    assert after.num_launches == 7
    assert after.num_captured == 6
    assert after.num_calls == 2.0
    graph = after.work[1]
    assert graph.host_us == 20.0  # half of a call: this is its forward
    assert graph.device_us == 2 * 4.0 + 2 * COSTS.graph_gap_us
    assert graph.num_nodes == 2


def test_forward_and_backward_of_neighbours_are_two_graphs_and_of_a_step_one() -> None:
    work = work_of("layers.0", "-layers.0")
    assert launched(work, LAYERS, COSTS).num_graphs == 2
    assert launched(work, STEP, COSTS).num_graphs == 1


def test_what_runs_between_the_operations_of_a_region_does_not_cut_it() -> None:
    after = launched(work_of("layers.0", "eager", "layers.0"), LAYERS, COSTS)
    assert (after.num_graphs, after.num_launches) == (1, 2)


def test_every_microbatch_has_launches_of_its_own() -> None:
    first, second = work_of("layers.0", "-layers.0"), work_of("layers.0", "-layers.0")
    work = [*first, *(replace(each, microbatch=1) for each in second)]
    assert launched(work, LAYERS, COSTS).num_graphs == 4
    assert launched(work, STEP, COSTS).num_graphs == 1


def test_what_is_made_eagerly_is_copied_before_a_graph_runs() -> None:
    work = work_of("layers.0", "layers.1", "-layers.1", "-layers.0")
    assert launched(work, LAYERS, COSTS, {"layers.0"}).num_launches == 6
    assert two_clocks_us(launched(work, LAYERS, COSTS, {"layers.0"}).work) == 4 * 20 + 2 * 10 + 5


def test_segments_with_an_eager_one_between_them_are_two_regions() -> None:
    parts = [
        Part(f"layers.{n}.{kind}", f"layers.{n}", kind) for n in (0, 1) for kind in ("attn", "moe_router", "moe", "end")
    ]
    graph_of = _named(parts, ("attn", "moe_router", "end"))
    regions = [graph_of(part.path) for part in parts]
    assert regions[0] == regions[1] != regions[3]
    assert regions[2] is None
    assert len(set(regions) - {None}) == 4


def test_a_captured_step_waits_for_nothing() -> None:
    wait = Work("outside", False, 1.0, 0.0, 0, waits=True)
    work = [*work_of("a", "a"), wait, *work_of("outside")]
    assert [each.waits for each in launched(work, STEP, COSTS).work] == [False, False]
    assert any(each.waits for each in launched(work, LAYERS, COSTS).work)


def test_the_step_on_a_gpu_is_that_of_the_clocks() -> None:
    work = work_of("outside", *["a"] * 10)
    # One eager launch of 10 us, a graph of 30 us on the host and 10 * (4 + 1) us on the device.
    assert predicted_us(launched(work, STEP, COSTS), STEP, COSTS, step_us=200.0, has_device=True) == 10 + 30 + 50


def test_without_a_gpu_only_launches_change() -> None:
    work = work_of("outside", *["layers.0"] * 6, "eager", *["-layers.0"] * 4)
    found = predicted_us(launched(work, LAYERS, COSTS), LAYERS, COSTS, step_us=1000.0, has_device=False)
    assert found == 1000.0 - 10 * (10.0 - 3.0) + 40.0


def log_of(*blocks: Block, entries: tuple[Entry, ...] = (), num_microbatches: int = 1) -> StepLog:
    operation = Operation("aten::add", "layers.0", False)
    return StepLog([operation], list(blocks), list(entries), num_microbatches)


def test_memory_of_graphs_is_shared_on_a_gpu_and_not_on_a_tape() -> None:
    log = log_of(
        Block(100, "layers.0", False, 0, 1, 2),
        Block(60, "layers.0", False, 0, 3, 4),
        Block(1000, "layers.0", False, 0, 3, None),  # kept: state of an optimizer, for one
        Block(10, "eager", False, 0, 1, 4),
    )
    assert memory_need(log, LAYERS, shares_memory=True).pool_bytes == 100
    assert memory_need(log, LAYERS, shares_memory=False).pool_bytes == 160


def test_gradients_are_made_in_the_pool_and_added_to_their_place() -> None:
    log = log_of(Block(100, "layers.0", False, 0, 1, 9), Block(40, "layers.0", True, 0, 5, None))
    assert memory_need(log, LAYERS, shares_memory=True).pool_bytes == 140
    assert memory_need(log, LAYERS, shares_memory=False).pool_bytes == 140


def test_extra_memory_is_what_the_rest_cannot_use_again() -> None:
    log = log_of(Block(100, "layers.0", False, 0, 1, 2), Block(80, "eager", False, 0, 3, 4))
    need = memory_need(log, LAYERS, shares_memory=True)
    # An eager step has a peak of 100; now the 80 stand beside them.
    assert (need.pool_bytes, need.extra_bytes) == (100, 80)


def test_graphs_of_a_microbatch_serve_all_and_a_step_has_all() -> None:
    blocks = [Block(100, "layers.0", False, number, 10 * number + 1, 10 * number + 2) for number in range(3)]
    log = log_of(*blocks, num_microbatches=3)
    assert memory_need(log, LAYERS, shares_memory=False).pool_bytes == 100
    assert memory_need(log, STEP, shares_memory=False).pool_bytes == 300
    assert memory_need(log, STEP, shares_memory=True).pool_bytes == 100


def test_arguments_are_copied_unless_a_graph_or_the_model_has_them() -> None:
    entries = (
        Entry("layers.0", 0, ("eager", MODEL), (64, 8)),
        Entry("layers.1", 0, ("layers.0",), (64,)),
        Entry("other", 0, ("layers.1",), (64,)),
        Entry("layers.2", 0, ("other", None), (32, 16)),
        Entry("layers.0", 1, ("eager", MODEL), (64, 8)),
    )
    need = memory_need(log_of(entries=entries, num_microbatches=2), LAYERS, shares_memory=True)
    assert need.static_bytes == 64 + 0 + 48


def test_an_argument_of_several_regions_is_copied_once() -> None:
    entries = tuple(Entry(f"layers.{n}", m, (None,), (64,), (7 + m,)) for m in range(2) for n in range(3))
    need = memory_need(log_of(entries=entries, num_microbatches=2), LAYERS, shares_memory=True)
    assert need.static_bytes == 64


def test_inputs_of_a_whole_step_are_those_of_the_model() -> None:
    entries = (Entry(ITERATION, 0, (None,), (128,)), Entry("layers.0", 0, ("iteration",), (64,)))
    assert memory_need(log_of(entries=entries), STEP, shares_memory=True).static_bytes == 128
