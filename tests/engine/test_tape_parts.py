"""Parts of the tape engine on their own: undo, out-variants on trial, the user's line, generator tracks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from graphstep.engine.tape_ops import OperationTable, Replay
from graphstep.engine.tape_random import GeneratorTrack
from graphstep.engine.tape_steps import step_for
from graphstep.engine.undo import UndoLog
from graphstep.engine.user_frame import user_line, user_line_of

ATEN = torch.ops.aten


def test_undo_writes_only_what_changed() -> None:
    log, kept, changed = UndoLog(), torch.arange(4.0), torch.arange(6.0)
    log.save(kept)
    log.save(changed[2:4])  # the whole storage counts
    log.save(changed)
    assert log.nbytes == 16 + 24
    changed.zero_()
    versions = kept._version, changed._version
    log.restore()
    assert changed.tolist() == [0, 1, 2, 3, 4, 5]
    assert (kept._version, changed._version) == versions
    changed.zero_()
    log.restore()
    assert changed.sum() == 0


def test_undo_forgets_what_did_not_change() -> None:
    log, x = UndoLog(), torch.ones(3)
    log.save(x)
    assert log.drop_unchanged(x)
    assert log.nbytes == 0
    log.save(x)
    x.zero_()
    assert not log.drop_unchanged(x)
    log.restore()
    assert x.tolist() == [1.0] * 3


def doubled(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x * 2)


def does_nothing(x: Tensor, *, out: Tensor) -> Tensor:
    return x * 2


def grows(x: Tensor, *, out: Tensor) -> Tensor:
    return out.resize_(100).resize_(3).copy_(x * 2)


def fails(x: Tensor, *, out: Tensor) -> Tensor:
    raise RuntimeError("not for this layout")


@pytest.mark.parametrize("variant", [doubled, does_nothing, grows, fails])
def test_out_variant_is_used_only_if_it_works(variant: Any) -> None:
    """Batch norm's out-variant, for one, leaves the result alone where the input is not contiguous."""
    table = OperationTable()
    traits = table.of(ATEN.exp.default)
    assert traits.replay is Replay.OUT
    used: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        used.append(1)
        return variant(*args, **kwargs)

    x = torch.ones(3)
    result = x * 2
    fake = type(traits)(
        name=traits.name, replay=Replay.OUT, out_variant=counted, out_names=("out",), out_arguments=frozenset()
    )
    step = step_for(Doubling(), fake, (x,), {}, [result])
    assert step is not None
    assert len(used) == 1
    x.fill_(5)
    step()
    assert len(used) == (2 if variant is doubled else 1)
    assert result.tolist() == [10.0] * 3


class Doubling:
    """An operation with a schema."""

    _schema = ATEN.exp.default._schema

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("operation", "replay"),
    [
        (ATEN.mm.default, Replay.OUT),
        (ATEN.view.default, Replay.VIEW),
        (ATEN.add_.Tensor, Replay.CALL),
        (ATEN.add.out, Replay.CALL),
        (ATEN.empty_strided.default, Replay.NOTHING),
        (ATEN.lift_fresh.default, Replay.CONSTANT),
        (ATEN.bernoulli.default, Replay.COPY),
        (ATEN.native_dropout.default, Replay.COPY),
        (ATEN.native_batch_norm.default, Replay.COPY),
        (ATEN.mse_loss.default, Replay.COPY),
        (ATEN._foreach_add.Scalar, Replay.COPY),
        (ATEN._assert_async.default, Replay.CALL),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_kind_of_replay(operation: Any, replay: Replay) -> None:
    assert OperationTable().of(operation).replay is replay


def test_facts_about_operations() -> None:
    table = OperationTable()
    assert table.of(ATEN.item.default).reads_host
    assert table.of(ATEN.nonzero.default).has_dynamic_shape
    assert table.of(ATEN.linear.default).is_composite
    assert not table.of(ATEN.mm.default).is_composite
    assert table.of(ATEN.native_batch_norm.default).written == ((3, "running_mean"), (4, "running_var"))
    assert table.of(ATEN.t_.default).changes_metadata
    assert table.of(ATEN.resize_.default).changes_storage
    assert table.of(ATEN.mm.default) is table.of(ATEN.mm.default)


def test_every_sampling_operation_is_known_as_random() -> None:
    """Rewinds are found by looking at the generator around random operations: one that is not known looks like one."""
    table, taking = OperationTable(), []
    for name in torch._C._dispatch_get_all_op_names():
        base, _, kind = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or not hasattr(ATEN, base):
            continue
        operation = getattr(getattr(ATEN, base), kind or "default", None)
        if operation is not None and any("Generator" in str(a.type) for a in operation._schema.arguments):
            taking.append(operation)
    assert len(taking) > 50
    unknown = {op.name() for op in taking if not (traits := table.of(op)).is_random and not traits.is_composite}
    assert unknown == set()


def test_generator_track_keeps_marks() -> None:
    generator = torch.Generator()
    generator.manual_seed(1)
    before = generator.get_state()
    track = GeneratorTrack(generator)
    assert track.rewind_before() is None
    assert track.saves() == []
    start = generator.get_state()
    torch.rand(2, generator=generator)
    track.drawn(1)
    middle = generator.get_state()
    torch.rand(2, generator=generator)
    track.drawn(2)
    generator.set_state(middle)
    assert track.rewind_before() is not None
    assert [position for position, _ in track.saves()] == [1]
    generator.set_state(start)
    assert track.rewind_before() is not None
    assert sorted(position for position, _ in track.saves()) == [0, 1]
    generator.manual_seed(1)
    with pytest.raises(LookupError):
        track.rewind_before()
    track.restore_initial()
    assert torch.equal(generator.get_state(), before)


def test_user_line_is_the_callers() -> None:
    here = user_line()
    assert here is not None
    assert (here.file, here.function) == (__file__, "test_user_line_is_the_callers")
    assert "here = user_line()" in str(here)
    # through the standard library and torch
    found = json.loads("[1]", parse_int=lambda text: user_line())
    assert found[0].file == __file__
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(user_line()))
    x.sum().backward()
    assert seen[0].file == __file__


def test_user_line_of_an_error() -> None:
    try:
        json.loads("{")
    except json.JSONDecodeError as error:
        line = user_line_of(error)
    assert line is not None
    assert line.file == __file__
    assert 'json.loads("{")' in str(line)


def test_code_without_a_file_is_named_too() -> None:
    program = "from graphstep.engine.user_frame import user_line; print(user_line())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.startswith("<string>:1 in <module>")
