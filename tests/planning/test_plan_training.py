"""Plans for the options of ``graphstep train``: predicted against measured, on the tape."""

from __future__ import annotations

import pytest
import torch
from tests.planning.test_predict import COSTS

from graphstep.config import from_argv
from graphstep.planning.plan import Plan, Prediction
from graphstep.planning.plan_training import config_of, measure_candidate, plan_training

TINY = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
    *("--micro-batch-size", "2", "--device", "cpu", "--mock-data"),
)


def plan_of(*argv: str) -> Plan:
    return plan_training(from_argv([*TINY, *argv], for_training=True), costs=COSTS)


def by_name(plan: Plan) -> dict[str, Prediction]:
    return {each.candidate.name: each for each in plan.predictions}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_memory_and_graphs_come_out_as_predicted(num_microbatches: int) -> None:
    config = from_argv([*TINY, "--global-batch-size", str(2 * num_microbatches)], for_training=True)
    plan = plan_training(config, costs=COSTS)
    found = by_name(plan)
    for name in ("attn", "whole layers", "full_iteration", "full_iteration, optimizer"):
        predicted = found[name]
        measured = measure_candidate(config, predicted.candidate)
        assert measured.pool_bytes == pytest.approx(predicted.pool_bytes, rel=0.05), name
        assert measured.num_graphs == predicted.num_graphs, name
        assert measured.step_ms is not None
        assert measured.static_bytes == predicted.static_bytes or predicted.candidate.is_iteration, name


def test_switches_lead_to_what_they_are_named_after() -> None:
    config = from_argv([*TINY, "--cuda-graph-impl", "local"], for_training=True)
    found = by_name(plan_training(config, costs=COSTS))
    assert list(found) == [
        "attn",
        "mlp",
        "attn mlp",
        "whole layers",
        "whole layers, merged",
        "full_iteration",
        "full_iteration, optimizer",
    ]
    graphs = config_of(found["attn"].candidate, config).graphs
    assert (str(graphs.impl), [str(each) for each in graphs.modules]) == ("local", ["attn"])
    assert config_of(found["whole layers, merged"].candidate, config).graphs.merge_layers == 0
    assert config_of(found["full_iteration, optimizer"].candidate, config).graphs.optimizer
    assert not any(each.candidate.problem for each in found.values())


def test_the_more_is_captured_the_fewer_launches_are_left() -> None:
    found = by_name(plan_of())
    numbers = [found[name].num_launches for name in ("mlp", "attn mlp", "full_iteration", "full_iteration, optimizer")]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 2  # The batch is copied.
    assert found["attn"].num_captured + found["mlp"].num_captured == found["whole layers"].num_captured


def test_layers_with_dropout_are_not_merged() -> None:
    dropped = by_name(plan_of())
    plain = by_name(plan_of("--attention-dropout", "0", "--hidden-dropout", "0"))
    assert dropped["whole layers, merged"].num_graphs == dropped["whole layers"].num_graphs == 4
    assert plain["whole layers, merged"].num_graphs == 2


def test_experts_that_read_on_the_host_rule_out_what_contains_them() -> None:
    found = by_name(plan_of("--num-experts", "4"))
    assert "on the host" in found["whole layers"].candidate.problem
    assert "on the host" in found["full_iteration"].candidate.problem
    assert found["attn moe_router moe_preprocess"].candidate.problem == ""
    assert found["attn moe_router moe_preprocess"].num_graphs == 8  # Two regions a layer, forward and backward.
    assert 0 < found["moe_router moe_preprocess"].num_captured < found["whole layers"].num_captured


def test_random_numbers_and_settings_of_the_caller_are_as_before() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    plan_of()
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()
