"""What the compiled part sees: each kind of fact holds, and no longer after a change."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphstep.native.interface import Facts, FastPath


def noted(
    facts: Facts, tensor: torch.Tensor, requires_grad: int = -1, *, hooks: bool = False, layout: bool = False
) -> None:
    """Add a tensor as it is now."""
    facts.tensor(tensor, tensor.data_ptr(), requires_grad, hooks, layout)


def test_entries_of_dicts(fast: FastPath) -> None:
    owner, value = {"a": object()}, object()
    owner["b"] = value
    facts = fast.Facts()
    facts.entry(owner, "b", value)
    assert facts.hold()
    owner["c"] = 1
    assert facts.hold()
    owner["b"] = object()
    assert not facts.hold()
    del owner["b"]
    assert not facts.hold()
    owner["b"] = value
    assert facts.hold()


def test_whole_dicts_keep_their_order(fast: FastPath) -> None:
    owner = OrderedDict(a=object(), b=object())
    facts = fast.Facts()
    facts.whole(owner, tuple(owner.values()))
    assert facts.hold()
    owner["c"] = owner["a"]
    assert not facts.hold()
    del owner["c"]
    assert facts.hold()
    first = owner.pop("a")
    owner["a"] = first
    assert not facts.hold()


@pytest.mark.parametrize("kind", [list, deque])
def test_sequences_and_sizes(fast: FastPath, kind: type) -> None:
    items = [object(), object()]
    owner = kind(items)
    facts = fast.Facts()
    facts.elements(owner, tuple(items))
    facts.size(owner, 2)
    assert facts.hold()
    owner[1] = object()
    assert not facts.hold()
    owner[1] = items[1]
    assert facts.hold()
    owner.append(items[0])
    assert not facts.hold()


def test_attributes(fast: FastPath) -> None:
    owner = SimpleNamespace(a=object())
    facts = fast.Facts()
    facts.slot(owner, "a", owner.a)
    assert facts.hold()
    owner.a = object()
    assert not facts.hold()
    del owner.a
    assert not facts.hold()


def test_tensors_that_move_or_change_their_layout(fast: FastPath) -> None:
    tensor = torch.zeros(4, 4)
    memory = tensor.data
    place, layout = fast.Facts(), fast.Facts()
    noted(place, tensor)
    noted(layout, tensor, layout=True)
    assert place.hold()
    assert layout.hold()
    tensor.data = memory.t()
    assert place.hold()
    assert layout.hold() == (memory.t().stride() == memory.stride())
    tensor.data = torch.zeros(4, 4)
    assert not place.hold()
    assert not layout.hold()


def test_tensors_that_are_frozen_or_get_hooks(fast: FastPath) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    trained, quiet = fast.Facts(), fast.Facts()
    noted(trained, parameter, 1)
    noted(quiet, parameter, hooks=True)
    assert trained.hold()
    assert quiet.hold()
    handle = parameter.register_hook(lambda gradient: gradient)
    assert trained.hold()
    assert not quiet.hold()
    handle.remove()
    assert quiet.hold()
    parameter.requires_grad_(False)
    assert not trained.hold()


def test_modes_of_the_thread(fast: FastPath) -> None:
    facts = fast.Facts()
    facts.modes(torch.zeros(1), True, False, False, torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
    assert facts.hold()
    with torch.no_grad():
        assert not facts.hold()
    with torch.autocast("cpu"):
        assert not facts.hold()
    with torch.inference_mode():
        assert not facts.hold()
    assert facts.hold()


def test_answers_are_compared_and_errors_are_no_answer(fast: FastPath) -> None:
    state = {"value": [1, 2]}
    facts, failing = fast.Facts(), fast.Facts()
    facts.answer(state.get, ("value",), [1, 2])
    failing.answer(int, ("no number",), 0)
    assert facts.hold()
    state["value"] = [2, 1]
    assert not facts.hold()
    assert not failing.hold()


def test_other_types_are_refused(fast: FastPath) -> None:
    facts = fast.Facts()
    with pytest.raises(TypeError):
        facts.entry([], 0, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        facts.tensor(1, 0, -1, False, False)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        facts.modes(torch.zeros(1), True, False, False, "float32", True)
    assert facts.hold()
