"""Operations and memory of a step."""

from __future__ import annotations

import torch

from graphstep.planning.operations import MODEL, Block, StepLog, log_step, peak_bytes
from graphstep.planning.scopes import Scopes

CPU = torch.device("cpu")


def logged(function: object, owned: tuple[torch.Tensor, ...] = ()) -> StepLog:
    def run(scopes: Scopes) -> None:
        scopes.enter("part")
        function(scopes)  # type: ignore[operator]

    return log_step(run, CPU, owned)


def test_views_and_empty_memory_launch_nothing() -> None:
    def step(_scopes: Scopes) -> None:
        x = torch.ones(4, 4)
        y = x.t().reshape(2, 8)[0]
        torch.empty(4)
        y.add_(1)

    names = [each.name.split(".")[0] for each in logged(step).operations]
    assert names == ["aten::ones", "aten::clone", "aten::add_"]  # A transposed matrix has to be copied to be reshaped.


def test_operations_that_return_nothing_count() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    names = [each.name for each in logged(lambda _: torch._foreach_add_(tensors, 1.0)).operations]
    assert names == ["aten::_foreach_add_.Scalar"]


def test_blocks_know_when_they_were_freed() -> None:
    kept = []

    def step(scopes: Scopes) -> None:
        a = torch.ones(256)  # 1024 bytes
        b = a * 2
        del a
        scopes.enter("later")
        c = b + 1
        del b
        scopes.enter("last")
        kept.append(c)

    log = logged(step)
    assert [block.nbytes for block in log.blocks] == [1024, 1024, 1024]
    assert [block.outlives for block in log.blocks] == [False, False, True]
    assert [block.scope for block in log.blocks] == ["part", "part", "later"]
    assert log.peak_bytes() == 2048
    assert log.peak_bytes(lambda block: block.scope == "later") == 0  # it outlives the step


def test_memory_that_is_given_again_is_told_apart() -> None:
    def step(_scopes: Scopes) -> None:
        for _ in range(50):
            torch.ones(1024)

    log = logged(step)
    assert len(log.blocks) == 50
    assert all(not block.outlives for block in log.blocks)
    assert 4096 <= log.peak_bytes() <= 2 * 4096


def test_the_peak_is_of_what_is_alive_together() -> None:
    blocks = [Block(10, "a", False, 0, 1, 5), Block(20, "a", False, 0, 3, 4), Block(30, "b", False, 0, 5, 9)]
    assert peak_bytes(blocks) == 30
    assert peak_bytes(blocks[:2]) == 30
    assert peak_bytes([]) == 0


def test_entries_say_who_made_the_arguments() -> None:
    weight = torch.ones(4)
    before = torch.ones(4)

    def step(scopes: Scopes) -> None:
        made = before * 2
        scopes.run("called", lambda *tensors: None, made, weight, before)

    (entry,) = logged(step, (weight,)).entries
    assert entry.scope == "called"
    assert entry.made_by == ("part", MODEL, None)
    assert entry.nbytes == (16, 16, 16)


def test_random_operations_are_marked() -> None:
    log = logged(lambda _: torch.nn.functional.dropout(torch.ones(4)))
    assert [each.name.split(".")[0] for each in log.operations if each.is_random] in (
        ["aten::bernoulli_"],
        ["aten::native_dropout"],
    )
