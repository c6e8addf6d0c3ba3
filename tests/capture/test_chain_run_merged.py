"""Pairs whose halves are one graph: faster, and only usable as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.capture.chains import Layers, Model, counts, straight
from torch import Tensor

from graphstep.capture.session import GraphSession
from graphstep.errors import LifecycleError


@pytest.mark.parametrize(("num_blocks", "merge", "graphs"), [(3, 3, [3, 2, 1]), (3, 2, [2, 1, 1]), (4, 2, [2, 1] * 2)])
def test_which_pairs_are_launched_together(
    session: GraphSession, num_blocks: int, merge: int, graphs: list[int]
) -> None:
    chain = Model(session, num_blocks, merge=merge).chain
    assert [len(chain.graph_at(index)) for index in range(num_blocks)] == graphs
    assert [pair.forward is not None for pair in chain.pairs] == [i % merge == 0 for i in range(num_blocks)]
    last = [i % merge == merge - 1 or i == num_blocks - 1 for i in range(num_blocks)]
    assert [pair.backward is not None for pair in chain.pairs] == last
    assert all(pair.is_ready for pair in chain.pairs)


def first_only(layers: Layers, xs: Sequence[Tensor]) -> Tensor:
    return layers[0](xs[0])


def first_as_well(layers: Layers, xs: Sequence[Tensor]) -> Tensor:
    hidden = layers[0](xs[0])
    return layers[1](hidden) + hidden * 2


def first_of_both(layers: Layers, xs: Sequence[Tensor]) -> Tensor:
    hidden = layers[0](xs[0])
    layers[1](hidden)
    return hidden


def with_another_call(layers: Layers, xs: Sequence[Tensor]) -> Tensor:
    return layers[1](layers[0](xs[0]) * 1.0)


@pytest.mark.parametrize("use", [first_only, first_as_well, with_another_call])
def test_partial_use_is_refused(session: GraphSession, use: Any) -> None:
    model = Model(session, merge=2)
    model.compare(straight)
    before = [parameter.grad.clone() for parameter in model.graphed[0].parameters()]
    with pytest.raises(LifecycleError, match="a result inside a graph of several layers was used by itself") as caught:
        use(model.callers, model.inputs(1)).sum().backward()
    assert caught.value.where in {"layers.0", "layers.1"}
    assert "merge_layers=1" in caught.value.fix
    del caught
    after = [parameter.grad for parameter in model.graphed[0].parameters()]
    assert all(map(torch.equal, before, after))
    model.check_idle()
    model.eager.load_state_dict(model.graphed.state_dict())
    for blocks in (model.eager, model.graphed):
        blocks.zero_grad()
    model.compare(straight)


def test_partial_use_of_results_that_were_all_made_is_refused(session: GraphSession) -> None:
    model = Model(session, merge=2)
    with pytest.raises(LifecycleError, match="used by itself"):
        first_of_both(model.callers, model.inputs(1)).sum().backward()


def test_partial_use_of_a_whole_graph_is_no_such_use(session: GraphSession) -> None:
    model = Model(session, 4, merge=2)

    def script(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        return straight(layers[:2], xs)

    model.compare(script)
    assert counts(model) == [(3, 0, 0), (0, 3, 0), (0, 0, 0), (0, 0, 0)]
    model.compare(straight)
    model.check_idle()


def test_results_inside_can_be_looked_at(session: GraphSession) -> None:
    model = Model(session, merge=2)

    def script(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        hidden = layers[0](xs[0])
        seen = hidden.detach().clone()
        layers[1](hidden).sum().backward()
        return [seen]

    model.compare(script)
    model.check_idle()


def test_evaluation_of_the_loss_without_backward_leaves_nothing_behind(session: GraphSession) -> None:
    model = Model(session, 3, merge=2)
    hidden = model.inputs(1)[0]
    for caller in model.callers:
        hidden = caller(hidden)
    del hidden
    model.check_idle()
    for block in model.eager:  # The other copies have counted that call.
        block.calls += 1
    model.compare(straight)
