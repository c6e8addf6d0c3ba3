"""Arguments that do not fit each other: all problems in one error, and nothing has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.strategies.callables.jobs import HIDDEN, SIZE, Block
from torch import Tensor

import graphstep
from graphstep.errors import ConfigError


def sample() -> Tensor:
    return torch.ones(SIZE, HIDDEN, requires_grad=True)


def refused(*arguments: Any, **options: Any) -> ConfigError:
    ran: list[str] = []
    with pytest.raises(ConfigError) as caught:
        graphstep.make_graphed_callables(
            *arguments,
            **options,
            pre_warmup_hook=lambda: ran.append("pre"),
            post_warmup_hook=lambda: ran.append("post"),
        )
    assert not ran
    for problem in caught.value.problems:
        assert problem.code
        assert problem.what
        assert problem.where
        assert problem.fix
    return caught.value


@pytest.mark.parametrize("num_samples", [0, 1, 3])
def test_wrong_number_of_samples(num_samples: int) -> None:
    error = refused((Block(), Block()), ((sample(),),) * num_samples)
    assert "sample_args: expected 2 entries" in str(error)
    assert f"got {num_samples}" in str(error)


@pytest.mark.parametrize("num_samples", [1, 3, 8])
def test_wrong_number_of_samples_for_an_order(num_samples: int) -> None:
    error = refused((Block(), Block()), ((sample(),),) * num_samples, _order=[1, 1, -1, -1])
    assert "sample_args: expected 4 entries" in str(error)


def test_wrong_number_of_keyword_samples() -> None:
    error = refused((Block(), Block()), ((sample(),),) * 2, sample_kwargs=({}, {}, {}))
    assert "sample_kwargs: expected 2 entries" in str(error)


@pytest.mark.parametrize(
    "given",
    [sample(), ([sample()], sample()), (sample(), sample()), None, 5, {"x": (sample(),)}],
    ids=["a tensor", "one of two", "tensors", "None", "a number", "a dict"],
)
def test_samples_that_are_no_tuples(given: Any) -> None:
    error = refused((Block(), Block()), given)
    assert [problem.where for problem in error.problems] == ["sample_args"]
    assert "(x,)" in str(error)


def test_tensor_for_the_sample_of_a_single_callable() -> None:
    assert "(x,)" in str(refused(Block(), sample()))


@pytest.mark.parametrize("given", [5, None, "forward", sample()], ids=["number", "None", "text", "tensor"])
def test_not_callable(given: Any) -> None:
    error = refused((Block(), given), ((sample(),),) * 2)
    assert "number 2" in str(error)
    assert type(given).__name__ in str(error)


def test_no_callables_at_all() -> None:
    assert "callables" in str(refused((), ()))


@pytest.mark.parametrize(
    ("order", "code"),
    [
        ([], "order-empty"),
        ([1, 0, -1], "order-zero"),
        ([1, -1, -1], "order-unbalanced"),
        ([1, 1, -1], "order-unbalanced"),
        ([-1, 1], "order-backward-before-forward"),
        ([1, 2, 1, -1, -2, -1], "order-not-whole-microbatches"),
    ],
)
def test_order_that_cannot_run(order: list[float], code: str) -> None:
    error = refused((Block(), Block()), ((sample(),),) * 2, _order=order)
    assert code in [problem.code for problem in error.problems]


@pytest.mark.parametrize("order", [[1, 1.25, -1], [1, True, -1]])
def test_order_of_numbers_that_are_no_entries(order: Any) -> None:
    error = refused((Block(),), ((sample(),),), _order=order)
    assert any("order" in problem.code for problem in error.problems)


@pytest.mark.parametrize("order", [[1, "a", -1], [1, None, -1], "1 -1", 5, [float("nan")]])
def test_order_of_what_are_no_numbers(order: Any) -> None:
    error = refused((Block(),), ((sample(),),), _order=order)
    assert any("order" in problem.code for problem in error.problems)


def test_order_that_names_more_chunks_than_there_are() -> None:
    error = refused((Block(), Block()), ((sample(),),) * 3, _order=[1, 2, 3, -3, -2, -1])
    assert "2 callables" in str(error)
    assert "3 chunks" in str(error)
    error = refused((Block(), Block()), ((sample(),),) * 2, _order=[1, 3, -3, -1], _num_layers_per_chunk=[1, 1])
    assert "_num_layers_per_chunk" in str(error)


@pytest.mark.parametrize("layers", [[1], [1, 2], [2, 0], [1, 1, 1], [3, -1], []])
def test_layers_per_chunk_that_do_not_fit(layers: list[int]) -> None:
    error = refused((Block(), Block()), ((sample(),),) * 2, _order=[1, 2, -2, -1], _num_layers_per_chunk=layers)
    assert "_num_layers_per_chunk" in [problem.where for problem in error.problems]


def test_layers_per_chunk_without_an_order() -> None:
    error = refused((Block(), Block()), ((sample(),),) * 2, _num_layers_per_chunk=[1, 1])
    assert "without _order" in str(error)


@pytest.mark.parametrize("num", [0, 1, 3])
def test_wrong_number_of_capture_time_hooks(num: int) -> None:
    error = refused((Block(), Block()), ((sample(),),) * 2, capture_time_hooks=[None] * num)
    assert f"{num} for 2 callables" in str(error)


def test_all_problems_at_once() -> None:
    error = refused(
        (Block(), 5, Block()),
        ((sample(),),) * 7,
        sample_kwargs=({},),
        _order=[1, 2, -2, -1],
        _num_layers_per_chunk=[1, 1],
        capture_time_hooks=[{"wrong": print}],
    )
    places = [problem.where for problem in error.problems]
    for place in ("callables", "sample_args", "sample_kwargs", "_num_layers_per_chunk", "capture_time_hooks"):
        assert place in places
    assert places.count("capture_time_hooks") == 2


@pytest.mark.parametrize("num", [-1, 1.5, "3", None])
def test_number_of_warmups_that_is_none(num: Any) -> None:
    error = refused(Block(), (sample(),), num)
    assert "num_warmup_iters" in str(error)


def test_reuse_without_an_order_is_harmless_or_refused() -> None:
    """There is one microbatch then: nothing to reuse."""
    module: Any = Block()
    graphstep.make_graphed_callables(module, (sample(),), _reuse_graph_input_output_buffers=True)
    module.forward.reset()


@pytest.mark.parametrize("option", ["fp8_enable", "_orders", "sample_kwarg"])
def test_unknown_option(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        graphstep.make_graphed_callables(Block(), (sample(),), **dict[str, Any]({option: True}))


def test_module_that_is_graphed_already() -> None:
    module: Any = Block()
    graphstep.make_graphed_callables(module, (sample(),))
    forward = module.forward
    with pytest.raises(ConfigError, match="captured already"):
        graphstep.make_graphed_callables(module, (sample(),))
    assert module.forward is forward
    forward.reset()


def test_the_same_module_twice_without_an_order() -> None:
    """One forward cannot stand for both places."""
    module = Block()
    assert "callables" in str(refused((module, module), ((sample(),),) * 2))
