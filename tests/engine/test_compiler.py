"""Compiled code runs as it was written where work is recorded, there alone, and nothing is left behind."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from graphstep.engine.compiler import compiled_code_off

Compiled = Callable[[Tensor], Tensor]


@pytest.fixture
def stances() -> Iterator[Any]:
    """What knows the stance of the compiler; it is the default after the test, too."""
    frames: Any = importlib.import_module("torch._dynamo.eval_frame")
    torch.compiler.reset()
    before = frames._stance
    yield frames
    assert frames._stance is before


class Counter:
    """A function of a tensor that counts how often its Python runs other than to be compiled."""

    def __init__(self) -> None:
        self.num_runs = 0

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.num_runs += 1
        return x * 2


def counted() -> tuple[Counter, Compiled]:
    """A counter, and it under a compiler that changes nothing."""
    counter = Counter()

    def function(x: Tensor) -> Tensor:
        return counter(x)

    compiled: Compiled = torch.compile(function, backend="eager")
    return counter, compiled


def runs_as_written(counter: Counter, compiled: Compiled) -> bool:
    before = counter.num_runs
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    return counter.num_runs > before


def elsewhere(function: Callable[[], None]) -> None:
    """Run in another thread, to the end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_off_inside_and_on_again(stances: Any) -> None:
    pair = counted()
    assert not runs_as_written(*pair)
    with compiled_code_off():
        assert runs_as_written(*pair)
        with compiled_code_off():
            assert runs_as_written(*pair)
        assert runs_as_written(*pair)
    assert not runs_as_written(*pair)


def test_on_in_other_threads(stances: Any) -> None:
    pair, seen = counted(), list[bool]()
    runs_as_written(*pair)
    with compiled_code_off():
        elsewhere(lambda: seen.append(runs_as_written(*pair)))
    assert seen == [False]


@pytest.mark.parametrize("first_out", ["outer", "inner"])
def test_threads_that_end_in_any_order(stances: Any, first_out: str) -> None:
    """Whichever ends first, each thread has its own stance as long as it wants it, and the process its own after."""
    pair = counted()
    runs_as_written(*pair)
    entered, leave, seen = threading.Event(), threading.Event(), list[bool]()

    def inner() -> None:
        with compiled_code_off():
            entered.set()
            assert leave.wait(30)
            seen.append(runs_as_written(*pair))

    thread = threading.Thread(target=inner)
    with ExitStack() as outer:
        outer.enter_context(compiled_code_off())
        thread.start()
        assert entered.wait(30)
        assert runs_as_written(*pair)
        if first_out == "outer":
            outer.close()
            assert not runs_as_written(*pair)
        leave.set()
        thread.join(30)
    assert seen == [True]
    assert not runs_as_written(*pair)


def test_many_that_overlap_leave_no_chain(stances: Any) -> None:
    """One stance is always on top of one that is over: those below are dropped."""
    held = ExitStack()
    for _ in range(50):
        following = ExitStack()
        following.enter_context(compiled_code_off())
        held.close()
        held = following
    length, stance = 0, stances._stance
    while hasattr(stance, "prior"):
        length, stance = length + 1, stance.prior
    held.close()
    assert length == 1


@pytest.mark.parametrize("name", ["fail_on_recompile", "eager_on_recompile"])
def test_a_stance_of_the_user_s_own_below(stances: Any, name: str) -> None:
    pair = counted()
    assert not runs_as_written(*pair)
    with torch.compiler.set_stance(name):
        with compiled_code_off():
            assert stances._stance.stance == "force_eager"
            seen: list[str] = []
            elsewhere(lambda: seen.append(stances._stance.stance))
            assert seen == [name]
        assert stances._stance.stance == name


def test_a_stance_of_the_user_s_own_that_outlasts_it(stances: Any) -> None:
    """It puts back what it found, and that says no longer what it said."""
    pair = counted()
    runs_as_written(*pair)
    before, inside = stances._stance, ExitStack()
    inside.enter_context(compiled_code_off())
    theirs = torch.compiler.set_stance("default")
    with theirs:
        inside.close()
        assert stances._stance.stance == "default"
    assert stances._stance.stance == "default"
    assert not runs_as_written(*pair)
    with compiled_code_off():
        assert runs_as_written(*pair)
    assert stances._stance is before


def test_an_error_inside(stances: Any) -> None:
    with pytest.raises(ValueError, match="inside"), compiled_code_off():
        raise ValueError("inside")
    assert stances._stance.stance == "default"


def test_without_the_private_names(stances: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = counted()
    runs_as_written(*pair)
    real = sys.modules["torch._dynamo.eval_frame"]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch._dynamo.eval_frame", None)
        with compiled_code_off():
            assert real._stance.stance == "force_eager"
            assert runs_as_written(*pair)
    assert not runs_as_written(*pair)
