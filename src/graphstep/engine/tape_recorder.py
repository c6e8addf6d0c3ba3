"""Records every ATen operation of a function, forward and backward, as steps on the same storages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphstep.engine import torch_private
from graphstep.engine.host_reads import host_read_error
from graphstep.engine.tape_ops import (
    OperationTable,
    OperationTraits,
    Replay,
    has_boolean_index,
    replace_tensors,
    tensors_in,
    written_tensors,
)
from graphstep.engine.tape_random import GeneratorTrack
from graphstep.engine.undo import UndoLog
from graphstep.engine.user_frame import user_line
from graphstep.errors import CaptureError

_IGNORED_NAMESPACES = frozenset({"profiler", "prim"})


@dataclass(slots=True)
class Tape:
    """What a recorder leaves: steps to run in order, and the storages they work on."""

    steps: list[Callable[[], Any]] = field(default_factory=list)
    external: dict[int, Tensor] = field(default_factory=dict)
    """Storages that existed before, by key: one tensor over each."""
    written: set[int] = field(default_factory=set)
    """Keys of the external storages that the steps write."""
    created: dict[int, Tensor] = field(default_factory=dict)
    """Storages that the recording allocated, by key."""

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the recording allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.created.values())


class TapeRecorder(TorchDispatchMode):
    """Runs operations as they come and appends each to a tape.

    Recorded tensors are detached aliases made at dispatch: a later ``.data =`` of the user leaves them alone.
    """

    def __init__(self, table: OperationTable, undo: UndoLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self._table = table
        self._undo = undo
        self._tracks: dict[int, GeneratorTrack] = {}
        self._default_generator = torch.default_generator
        self._track(self._default_generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_private.unwraps_itself(types):
            return NotImplemented  # A wrapper unwraps itself; its inner operations come back here.
        if func.namespace in _IGNORED_NAMESPACES:
            return func(*args, **kwargs)
        traits = self._table.of(func)
        self._refuse(traits, args, kwargs)
        track = self._before_random(traits, args, kwargs)
        given = self._note_inputs(traits, args, kwargs)
        result = func(*args, **kwargs)
        self._append(func, traits, args, kwargs, result, given)
        if track is not None:
            track.drawn(len(self.tape.steps))
        return result

    def finish(self) -> Tape:
        """The tape, with the generator states that its rewinds need being kept.

        Raises:
            CaptureError: a generator was reseeded inside the function.
        """
        for track in self._tracks.values():
            self._append_rewind(track)
        saves = [save for track in self._tracks.values() for save in track.saves()]
        for position, save in sorted(saves, key=lambda item: item[0], reverse=True):
            self.tape.steps.insert(position, save)
        return self.tape

    def restore_generators(self) -> None:
        """Put every generator back to where the capture began."""
        for track in self._tracks.values():
            track.restore_initial()

    # ----- before the operation runs

    def _refuse(self, traits: OperationTraits, args: Any, kwargs: Any) -> None:
        if traits.reads_host:
            raise host_read_error(traits.name, "keep the value in a tensor, or read it after the replay")
        if traits.changes_storage:
            raise CaptureError(
                f"{traits.name} replaces or resizes the storage of a tensor; a graph works on fixed storages",
                where=str(user_line() or ""),
                fix="allocate the tensor at its final size before the captured call and write into it",
            )
        if traits.has_dynamic_shape and _shape_depends_on_values(traits, args, kwargs):
            raise CaptureError(
                f"{traits.name} has a result whose shape depends on values",
                where=str(user_line() or ""),
                fix="use torch.where or a multiplication by the mask, or an explicit size (output_size=)",
            )

    def _before_random(self, traits: OperationTraits, args: Any, kwargs: Any) -> GeneratorTrack | None:
        if not traits.is_random:
            return None
        named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        track = self._track(named[0] if named else self._default_generator)
        self._append_rewind(track)
        return track

    def _track(self, generator: torch.Generator) -> GeneratorTrack:
        return self._tracks.setdefault(id(generator), GeneratorTrack(generator))

    def _append_rewind(self, track: GeneratorTrack) -> None:
        try:
            rewind = track.rewind_before()
        except LookupError as error:
            raise CaptureError(
                "a random generator was reseeded inside the captured function; a replay would repeat the same numbers",
                where=str(user_line() or ""),
                fix="seed before the captured call",
            ) from error
        if rewind is not None:
            self.tape.steps.append(rewind)

    def _note_inputs(self, traits: OperationTraits, args: Any, kwargs: Any) -> set[int]:
        given = set()
        for tensor in tensors_in([*args, *kwargs.values()]):
            key = torch_private.storage_key(tensor)
            given.add(key)
            if key not in self.tape.created and key not in self.tape.external:
                self.tape.external[key] = tensor.detach()
        for tensor in written_tensors(traits, args, kwargs):
            key = torch_private.storage_key(tensor)
            if key not in self.tape.created:
                self._undo.save(tensor)
                self.tape.written.add(key)
        return given

    # ----- after it ran

    def _append(self, func: Any, traits: OperationTraits, args: Any, kwargs: Any, result: Any, given: set[int]) -> None:
        fresh = []
        for tensor in tensors_in(result):
            key = torch_private.storage_key(tensor)
            if key in given:
                continue
            alias = tensor.detach()
            if key in self.tape.external:
                fresh.append(alias)  # A result in memory that existed before: a constant the operation looked up.
                continue
            self.tape.created.setdefault(key, alias)
            fresh.append(alias)
        if traits.replay is Replay.SKIP:
            return
        fixed_args = replace_tensors(tuple(args), _alias)
        fixed_kwargs = {name: replace_tensors(value, _alias) for name, value in kwargs.items()}
        step: Callable[[], Any]
        if traits.replay is Replay.COLLECTIVE:
            step = partial(_collective, func, fixed_args, fixed_kwargs, fresh)
        elif traits.replay is Replay.CALL:
            step = partial(func, *fixed_args, **fixed_kwargs)
            if fresh:
                step = partial(_copy_results, func, fixed_args, fixed_kwargs, fresh)
        elif not fresh:
            # An operation without annotations returned its argument: in ATen that is a view, elsewhere it wrote it.
            if func.namespace == "aten":
                return
            step = partial(func, *fixed_args, **fixed_kwargs)
        elif traits.replay is Replay.OUT and len(fresh) == len(traits.out_names):
            step = _out_step(traits, fixed_args, fixed_kwargs, fresh)
        else:
            step = partial(_copy_results, func, fixed_args, fixed_kwargs, fresh)
        self.tape.steps.append(step)


def _shape_depends_on_values(traits: OperationTraits, args: Any, kwargs: Any) -> bool:
    if traits.name.startswith("aten::index"):
        return has_boolean_index(args)
    if traits.name.startswith("aten::repeat_interleave"):
        return kwargs.get("output_size") is None
    return True


def _alias(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _out_step(traits: OperationTraits, args: Any, kwargs: Any, fresh: list[Tensor]) -> Callable[[], Any]:
    accepted = {name: value for name, value in kwargs.items() if name in traits.out_arguments}
    outs = dict(zip(traits.out_names, fresh, strict=True))
    return partial(traits.out_variant, *args, **accepted, **outs)


def _new_tensors(result: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = {torch_private.storage_key(t) for t in tensors_in([*args, *kwargs.values()])}
    return [t for t in tensors_in(result) if torch_private.storage_key(t) not in given]


def _copy_results(func: Any, args: Any, kwargs: Any, recorded: list[Tensor]) -> None:
    for target, value in zip(recorded, _new_tensors(func(*args, **kwargs), args, kwargs), strict=True):
        target.copy_(value)


def _collective(func: Any, args: Any, kwargs: Any, recorded: list[Tensor]) -> None:
    result = func(*args, **kwargs)
    for item in result if isinstance(result, tuple) else (result,):
        if torch_private.work_is_pending(item):
            item.wait()
    if not recorded:
        return
    for target, value in zip(recorded, _new_tensors(result, args, kwargs), strict=True):
        target.copy_(torch.ops._c10d_functional.wait_tensor(value))
