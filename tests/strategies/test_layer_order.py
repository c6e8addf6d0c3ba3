"""One id for each layer: the layers of a backward lie between those of the next forward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.strategies.orders import Pipeline, codes, entries, pipelines

from graphstep.capture.plan import Phase
from graphstep.strategies.layer_order import order_of_layers
from graphstep.strategies.order_steps import OrderStep, max_in_flight, steps_of
from graphstep.strategies.pipeline_order import pipeline_order


def test_layers_of_a_backward_lie_between_those_of_the_next_forward() -> None:
    assert order_of_layers(pipeline_order(2), [3]) == entries("1 2 3  1 -3 2 -2 3 -1  -3 -2 -1")


def test_weight_gradients_are_a_layer_behind_in_a_pair_and_next_to_their_backward_alone() -> None:
    expected = entries("1 2 3  1 -3 2 -2 -3.5 3 -1 -2.5 -1.5  -3 -3.5 -2 -2.5 -1 -1.5")
    assert order_of_layers(pipeline_order(2), [3], delays_weight_gradients=True) == expected


def test_what_one_of_a_pair_has_more_of_follows() -> None:
    order = pipeline_order(2, num_model_chunks=2)
    assert order == (1, 2, -2, 1, -1, 2, -2, -1)
    assert order_of_layers(order, [1, 3]) == entries("1  2 3 4  1 -4 -3 -2  2 -1 3 4  -4 -3 -2  -1")
    delayed = entries("1  2 3 4  1 -4 -3 -4.5 -2 -3.5 -2.5  2 -1 3 4 -1.5  -4 -4.5 -3 -3.5 -2 -2.5  -1 -1.5")
    assert order_of_layers(order, [1, 3], delays_weight_gradients=True) == delayed


def test_a_chunk_without_layers_has_no_entries() -> None:
    assert order_of_layers(pipeline_order(2, num_model_chunks=2), [0, 1]) == entries("1 -1 1 -1")


def test_first_layers_of_an_overlapped_order_have_one_more_microbatch_in_flight() -> None:
    order = pipeline_order(8, pipeline_size=4, pipeline_rank=1)
    layers = steps_of(order_of_layers(order, [2]), num_chunks=2)
    assert max_in_flight(steps_of(order, num_chunks=1)) == {0: 3}
    assert max_in_flight(layers) == {0: 4, 1: 3}


@given(pipelines(), st.lists(st.integers(0, 4), min_size=4, max_size=4), st.booleans())
def test_layers_run_once_for_each_microbatch_in_an_order_that_can_run(
    pipeline: Pipeline, num_layers: list[int], is_delayed: bool
) -> None:
    layers_per_chunk = [1 + num_layers[0], *num_layers[1 : pipeline.num_chunks]]
    for rank in {0, pipeline.size // 2, pipeline.size - 1}:
        order = order_of_layers(pipeline.order(rank), layers_per_chunk, delays_weight_gradients=is_delayed)
        steps = steps_of(order, num_chunks=sum(layers_per_chunk))
        assert len(set(steps)) == len(steps)
        num_phases = 3 if is_delayed else 2
        assert len(steps) == num_phases * sum(layers_per_chunk) * pipeline.num_microbatches
        place = {step: index for index, step in enumerate(steps)}
        first = 0
        for num in layers_per_chunk:
            for layer in range(first, first + num - 1):
                for microbatch in range(pipeline.num_microbatches):
                    here, above = (
                        {phase: place.get(OrderStep(each, microbatch, phase)) for phase in Phase}
                        for each in (layer, layer + 1)
                    )
                    assert here[Phase.FORWARD] < above[Phase.FORWARD] < above[Phase.BACKWARD] < here[Phase.BACKWARD]
            first += num


def test_layers_that_are_no_numbers_and_orders_with_weight_gradients_are_refused() -> None:
    assert codes(order_of_layers, [1, -1], [-1]) == ["pipeline-size"]
    assert codes(order_of_layers, [1, -1], [0]) == codes(order_of_layers, [1, -1], []) == ["order-no-layers"]
    assert codes(order_of_layers, [1, -1, -1.5], [2]) == ["order-weight-gradients-twice"]
    assert codes(order_of_layers, [1, 2, -1], [2, True]) == ["pipeline-size", "order-unbalanced"]
