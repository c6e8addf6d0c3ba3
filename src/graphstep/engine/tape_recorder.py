"""Records every ATen operation of a function, forward and backward, as steps on the same storages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.foreign import InsideKernel
from graphstep.engine.refusals import Refusals
from graphstep.engine.tape_collectives import (
    WAITS,
    CollectiveCall,
    InsideCollective,
    has_memory_of_its_own,
    waits_again_for,
)
from graphstep.engine.tape_ops import (
    OperationTable,
    OperationTraits,
    Replay,
    tensors_in,
    written_tensors,
)
from graphstep.engine.tape_random import GeneratorTrack
from graphstep.engine.tape_rules import CaptureRules
from graphstep.engine.tape_steps import Step, fixed_call, restore_constant, step_for
from graphstep.engine.undo import UndoLog

_IGNORED_NAMESPACES = frozenset({"profiler", "prim"})


@dataclass(slots=True)
class Tape:
    """What a recorder leaves: steps to run in order, and the storages they work on."""

    steps: list[Step] = field(default_factory=list)
    external: dict[int, Tensor] = field(default_factory=dict)
    """Storages that existed before, by key: one tensor over each."""
    written: set[int] = field(default_factory=set)
    """Keys of the external storages that the steps write."""
    created: dict[int, Tensor] = field(default_factory=dict)
    """Storages that the recording allocated, by key."""
    starts_with_grad: bool = False
    """Grad mode of the first step. Some kernels ask for it."""
    default_dtype: torch.dtype = torch.float32
    """Process-wide default at the first step."""

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the recording allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.created.values())


class TapeRecorder(DispatchMode):
    """Runs operations as they come and appends each to a tape.

    Recorded tensors are detached aliases made at dispatch: a later ``.data =`` of the user leaves them alone.

    Args:
        generators: named generators that the function may draw from; the default one is always known.
    """

    supports_higher_order_operators = True

    def __init__(
        self, table: OperationTable, undo: UndoLog, refusals: Refusals, generators: Sequence[torch.Generator]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape(starts_with_grad=torch.is_grad_enabled(), default_dtype=torch.get_default_dtype())
        self._table = table
        self._undo = undo
        self._refusals = refusals
        self._default_generator = torch.default_generator
        known = (self._default_generator, *(g for g in generators if g.device.type == "cpu"))
        self._tracks = {torch_private.generator_key(generator): GeneratorTrack(generator) for generator in known}
        self._constants: set[int] = set()
        self._rules = CaptureRules(refusals, self.tape.created, self._constants)
        self._borrowed: set[int] = set()
        self._grad_enabled = self.tape.starts_with_grad
        self._default_dtype = self.tape.default_dtype
        self._pending: list[Step] = []
        self._started: list[CollectiveCall] = []
        self._collective_memory: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_private.unwraps_itself(types):
            return NotImplemented  # A wrapper unwraps itself; its inner operations come back here.
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._divide(torch_private.dense_kernel(func), func.name(), args, kwargs)
        if func.namespace in _IGNORED_NAMESPACES:
            return func(*args, **kwargs)
        traits = self._table.of(func)
        if traits.is_composite:
            return self._divide(func.decompose, traits.name, args, kwargs)
        if self._is_inside_collective(args, kwargs):
            with InsideCollective(self._collective_memory):
                return func(*args, **kwargs)
        self._rules.check(traits, args, kwargs)
        self._follow_settings()
        track = self._before_random(traits, args, kwargs)
        given = self._note_inputs(traits, args, kwargs)
        result = self._run(func, traits, args, kwargs)
        self._finish_collectives(traits, args, kwargs)
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
            if track.has_drawn:  # Else it is not this capture's business: another thread may use the generator.
                self._append_rewind(track)
        self.tape.steps.extend(collective.finish for collective in self._started)
        saves = [save for track in self._tracks.values() for save in track.saves()]
        for position, save in sorted(saves, key=lambda item: item[0], reverse=True):
            self.tape.steps.insert(position, save)
        return self.tape

    def restore_generators(self) -> None:
        """Put every generator back to where the capture began."""
        for track in self._tracks.values():
            track.restore_initial()

    def wait_for_collectives(self) -> None:
        """Wait for collectives that the function started: they may still write."""
        while self._pending:
            self._pending.pop()()

    def forget(self) -> None:
        """Let go of all tensors, after a failure: the error may be kept for long and keeps this object."""
        self.tape = Tape()
        self._started.clear()
        self._collective_memory.clear()

    # ----- before the operation runs

    def _divide(self, kernel: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that is made of others, and record those."""
        if kernel is None:
            self._refusals.refuse(f"the tape cannot record {name}", "call a plain implementation of it")
        with self:
            return kernel(*args, **kwargs)

    def _follow_settings(self) -> None:
        """Repeat changes of the settings that operations look up."""
        if torch.is_grad_enabled() != self._grad_enabled:
            self._grad_enabled = torch.is_grad_enabled()
            self.tape.steps.append(partial(torch.set_grad_enabled, self._grad_enabled))
        if torch.get_default_dtype() != self._default_dtype:
            self._default_dtype = torch.get_default_dtype()
            self.tape.steps.append(partial(torch.set_default_dtype, self._default_dtype))

    def _before_random(self, traits: OperationTraits, args: Any, kwargs: Any) -> GeneratorTrack | None:
        if not traits.is_random and not traits.is_foreign:
            return None
        named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        track = self._tracks.get(torch_private.generator_key(named[0] if named else self._default_generator))
        if track is None:
            self._refusals.refuse(
                f"{traits.name} draws from a generator that the capture does not know",
                "pass the generator to the capture (generators=...)",
            )
        self._append_rewind(track)
        return track

    def _append_rewind(self, track: GeneratorTrack) -> None:
        try:
            rewind = track.rewind_before()
        except LookupError:
            self._refusals.refuse(
                "a random generator was reseeded inside the captured function (or another thread used it); "
                "a replay would repeat the same numbers",
                "seed before the captured call",
            )
        if rewind is not None:
            self.tape.steps.append(rewind)

    def _note_inputs(self, traits: OperationTraits, args: Any, kwargs: Any) -> set[int]:
        given = set()
        for tensor in tensors_in([*args, *kwargs.values()]):
            key = self._key(traits, tensor)
            given.add(key)
            if key in self.tape.created or key in self.tape.external:
                continue
            alias = torch_private.plain_alias(tensor)
            if traits.replay is Replay.CONSTANT and alias.untyped_storage().resizable():
                # Made from Python values: memory of the function's own, filled anew in each eager run.
                self.tape.created[key] = alias
                self.tape.steps.append(restore_constant(alias))
                self._constants.add(key)
            else:
                self.tape.external[key] = alias
                if traits.replay is Replay.CONSTANT:
                    self._borrowed.add(key)
        return given

    def _key(self, traits: OperationTraits, tensor: Tensor) -> int:
        if not torch_private.has_plain_memory(tensor):
            self._refusals.refuse(
                f"{traits.name} works on a tensor that is sparse, nested, quantised or opaque: a replay has no fixed "
                "memory to write it to",
                "use dense tensors in the captured function",
            )
        return torch_private.storage_key(tensor)

    def _save_writes(self, traits: OperationTraits, args: Any, kwargs: Any) -> list[Tensor]:
        """Keep memory from before that the operation is about to write; returns the tensors that lie in it."""
        outside = []
        for tensor in written_tensors(traits, args, kwargs):
            key = torch_private.storage_key(tensor)
            if key in self._borrowed:
                self._refusals.refuse(
                    f"{traits.name} writes to memory that torch does not own, such as an array of numpy",
                    "copy the array into a tensor before the captured call",
                )
            if key not in self.tape.created:
                outside.append(tensor)
                self._undo.save(tensor)
                self.tape.written.add(key)
        return outside

    def _save_all(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Keep all arguments of an operation that may write without saying so; returns those kept just now."""
        new = []
        for tensor in tensors_in([*args, *kwargs.values()]):
            key = torch_private.storage_key(tensor)
            if key not in self.tape.created and key not in self._undo:
                self._undo.save(tensor)
                new.append(tensor)
        return new

    # ----- while it runs

    def _run(self, func: Any, traits: OperationTraits, args: Any, kwargs: Any) -> Any:
        if traits.is_foreign and not traits.written:
            suspects = self._save_all(args, kwargs)
            result = self._call(func, traits, args, kwargs)
            changed = [tensor for tensor in suspects if not self._undo.drop_unchanged(tensor)]
            self.tape.written.update(torch_private.storage_key(tensor) for tensor in changed)
            return result
        outside = self._save_writes(traits, args, kwargs)
        places = [(t.untyped_storage(), t.storage_offset(), t.shape, t.stride()) for t in outside]
        result = self._call(func, traits, args, kwargs)
        for tensor, place in zip(outside, places, strict=True):
            if tensor.shape != place[2]:
                tensor.set_(*place)
                self._refusals.refuse(
                    f"{traits.name} resizes a tensor from outside the captured function from {tuple(place[2])}",
                    "give it its final shape before the captured call",
                )
        return result

    def _call(self, func: Any, traits: OperationTraits, args: Any, kwargs: Any) -> Any:
        if has_memory_of_its_own(traits):
            with InsideCollective(self._collective_memory):
                result = torch_private.call_kernel(func, args, kwargs)
            for tensor in tensors_in(result):
                self._collective_memory.pop(torch_private.storage_key(tensor), None)
            return result
        if traits.is_foreign:
            with InsideKernel(self._rules, self._table):
                return torch_private.call_kernel(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_inside_collective(self, args: Any, kwargs: Any) -> bool:
        """True for work that a collective does while the function waits for it."""
        return bool(self._collective_memory) and any(
            torch_private.storage_key(tensor) in self._collective_memory
            for tensor in tensors_in([*args, *kwargs.values()])
        )

    def _finish_collectives(self, traits: OperationTraits, args: Any, kwargs: Any) -> None:
        """Have the replay wait for collectives whose memory the operation uses."""
        if not self._started:
            return
        used = {torch_private.storage_key(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
        written = {torch_private.storage_key(tensor) for tensor in written_tensors(traits, args, kwargs)}
        for collective in list(self._started):
            if used & collective.touches_by_reading or written & collective.touches_by_writing:
                self._started.remove(collective)
                self.tape.steps.append(collective.finish)

    # ----- after it ran

    def _append(self, func: Any, traits: OperationTraits, args: Any, kwargs: Any, result: Any, given: set[int]) -> None:
        fresh = []
        for tensor in tensors_in(result):
            key = self._key(traits, tensor)
            if key in given:
                continue
            alias = torch_private.plain_alias(tensor)
            fresh.append(alias)
            if key not in self.tape.external:  # Else a constant that the operation looked up.
                self.tape.created.setdefault(key, alias)
        if traits.replay is Replay.COLLECTIVE:
            if traits.name in WAITS:
                return  # Touching the tensor was enough.
            collective = CollectiveCall(traits, fixed_call(func, args, kwargs), fresh)
            self._pending.extend(waits_again_for(traits, result))
            self._started.append(collective)
            self.tape.steps.append(collective.start)
            return
        step = step_for(func, traits, args, kwargs, fresh)
        if step is not None:
            self.tape.steps.append(step)
