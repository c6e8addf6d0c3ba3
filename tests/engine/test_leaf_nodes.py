"""Nodes that accumulate gradients: seen while they run, and made anew without a trace."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.engine import Engine, leaf_nodes


def node_of(leaf: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def test_each_leaf_is_noted_where_its_gradient_is_accumulated() -> None:
    weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    numbers = count(5)
    with leaf_nodes.streams_noted([weight, unused], lambda: next(numbers)) as found:
        (weight * 2).sum().backward()
    (weight * 2).sum().backward()
    assert found == {id(weight): 5}
    assert next(numbers) == 6, "asked after the body"


def test_a_node_that_somebody_has_in_hand_is_told_from_one_of_a_graph() -> None:
    leaf = nn.Parameter(torch.ones(3))
    assert not leaf_nodes.is_held(leaf)
    kept = (leaf * 2).sum()
    assert not leaf_nodes.is_held(leaf)
    in_hand = node_of(leaf)
    assert leaf_nodes.is_held(leaf)
    del kept
    assert leaf_nodes.is_held(leaf)
    del in_hand
    assert not leaf_nodes.is_held(leaf)


def test_a_renewed_leaf_is_the_same_but_for_its_node(engine: Engine) -> None:
    device = engine.device
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        leaf = nn.Parameter(torch.ones(2, 3, device=device, dtype=dtype).t())
        leaf.grad = torch.ones_like(leaf)
        seen: list[str] = []
        leaf.register_hook(lambda _gradient, seen=seen: seen.append("gradient"))
        leaf.register_post_accumulate_grad_hook(lambda _leaf, seen=seen: seen.append("accumulated"))
        kept = (leaf * 2).sum()
        before = leaf.data_ptr(), leaf.stride(), leaf._version, leaf.untyped_storage()._cdata, leaf.dtype
        assert leaf_nodes.renew(leaf)
        fresh = (leaf * 2).sum()
        old = kept.grad_fn.next_functions[0][0].next_functions[0][0]
        assert node_of(leaf) is not old
        assert old.variable is leaf
        del old
        assert before == (leaf.data_ptr(), leaf.stride(), leaf._version, leaf.untyped_storage()._cdata, leaf.dtype)
        fresh.backward()
        kept.backward()  # A graph from before it still gives the leaf its gradient.
        assert torch.equal(leaf.grad, torch.full_like(leaf, 5))
        assert seen == ["gradient", "accumulated"] * 2


def test_hooks_on_a_node_in_hand_are_not_lost() -> None:
    leaf = nn.Parameter(torch.ones(3))
    node, calls = node_of(leaf), []
    node.register_hook(lambda *_gradients: calls.append(1))
    assert not leaf_nodes.renew(leaf)
    (leaf * 2).sum().backward()
    assert calls == [1]


def test_subclasses_are_left_alone() -> None:
    class Named(nn.Parameter):
        pass

    assert not leaf_nodes.renew(Named(torch.ones(3)))
