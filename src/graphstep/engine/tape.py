"""The CPU engine: records ATen operations once and replays them on the same storages, without the user's Python.

It is the reference for what a captured graph means, for laptops and tests. It is no faster than eager execution.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.ambient import casts_forgotten, collection_held, default_dtype
from graphstep.engine.assignments import DataAssignments
from graphstep.engine.compiler import compiled_code_off
from graphstep.engine.host_reads import HostReadGuard, answers_as_capturing, is_capturing_here
from graphstep.engine.refusals import Refusals
from graphstep.engine.tape_ops import OperationTable
from graphstep.engine.tape_recorder import Tape, TapeRecorder
from graphstep.engine.undo import UndoLog
from graphstep.engine.user_frame import user_line_of
from graphstep.errors import CaptureError, LifecycleError

T = TypeVar("T")


class TapeRecording:
    """A tape and what its function returned. Owned by the engine that made it until it is closed."""

    def __init__(self, engine: TapeEngine, tape: Tape, result: Any) -> None:
        self._engine = engine
        self._tape: Tape | None = tape
        self._result = result
        self._num_operations = len(tape.steps)
        self._nbytes = tape.nbytes

    @property
    def result(self) -> Any:
        """What the function returned; every replay overwrites the tensors in it."""
        return self._result

    @property
    def num_operations(self) -> int | None:
        """Steps of one replay."""
        return self._num_operations

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the recording allocated."""
        return self._nbytes if self._tape is not None else 0

    @property
    def is_closed(self) -> bool:
        """True once closed."""
        return self._tape is None

    @property
    def tape(self) -> Tape | None:
        """The steps; ``None`` once closed."""
        return self._tape

    @property
    def external_storages(self) -> tuple[Tensor, ...]:
        """One tensor over each storage that the tape uses and did not allocate."""
        return tuple(self._tape.external.values()) if self._tape is not None else ()

    @property
    def written_storages(self) -> tuple[Tensor, ...]:
        """Those of the external storages that a replay writes."""
        if self._tape is None:
            return ()
        return tuple(tensor for key, tensor in self._tape.external.items() if key in self._tape.written)

    def replay(self) -> None:
        """Run the steps again on the recorded storages.

        Raises:
            LifecycleError: the recording is closed, or a capture is under way in this thread.
        """
        if self._tape is None:
            raise LifecycleError("the recording is closed", fix="capture again before replaying")
        if is_capturing_here():
            raise LifecycleError(
                "a recording cannot be replayed inside a capture", fix="replay it before or after the captured function"
            )
        with torch_private.below_autograd(), default_dtype(self._tape.default_dtype):
            torch.set_grad_enabled(self._tape.starts_with_grad)
            for step in self._tape.steps:
                step()

    def launcher(self) -> Callable[[], object]:
        """The replay."""
        return self.replay

    def release_result(self) -> None:
        """Forget what the function returned."""
        self._result = None

    def close(self) -> None:
        """Free the steps and the storages that the recording allocated."""
        self._tape = None
        self._result = None


class TapeEngine:
    """Captures on the CPU. See :class:`graphstep.engine.protocol.Engine` for the contract."""

    def __init__(self) -> None:
        self._table = OperationTable()
        self._recordings: weakref.WeakSet[TapeRecording] = weakref.WeakSet()
        self._lanes: weakref.WeakKeyDictionary[TapeRecording, Hashable] = weakref.WeakKeyDictionary()
        self._capturing_thread: int | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """``tape``."""
        return "tape"

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def is_capturing(self) -> bool:
        """True in the thread whose operations are being recorded."""
        return self._capturing_thread == threading.get_ident()

    @property
    def pool_bytes(self) -> int:
        """Bytes held by recordings that are not closed."""
        return sum(recording.nbytes for recording in self._recordings)

    @property
    def lane_bytes(self) -> Mapping[Hashable, int]:
        """The same by the lane that was asked for, although tapes share no memory."""
        found: dict[Hashable, int] = {}
        for recording in self._recordings:
            if not recording.is_closed:
                lane = self._lanes.get(recording, 0)
                found[lane] = found.get(lane, 0) + recording.nbytes
        return found

    @property
    def workspace_bytes(self) -> int:
        """None are set aside on the CPU."""
        return 0

    def tapes(self) -> list[Tape]:
        """Those of all recordings that are not closed."""
        return [recording.tape for recording in self._recordings if recording.tape is not None]

    def capture(
        self,
        function: Callable[[], Any],
        *,
        generators: Sequence[torch.Generator] = (),
        lane: Hashable = 0,
        collect_first: bool = True,
    ) -> TapeRecording:
        """Run ``function`` once, recording its operations, then undo what it wrote into tensors that existed before.

        A tape never shares memory with another, so every ``lane`` is as good; reports show it.

        Raises:
            CaptureError: an operation cannot be captured.
            LifecycleError: the engine is closed, or a capture is under way: in this engine, or in this thread.
        """
        if self._is_closed:
            raise LifecycleError("the engine is closed", fix="use a new session")
        if self._capturing_thread is not None or is_capturing_here():
            raise LifecycleError("a capture is already under way", fix="capture one function at a time")
        with collection_held(collect_first=collect_first):
            tape, result = self._record(function, generators)
        recording = TapeRecording(self, tape, result)
        self._recordings.add(recording)
        self._lanes[recording] = lane
        return recording

    def _record(self, function: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Tape, Any]:
        undo, refusals, assignments = UndoLog(), Refusals(), DataAssignments()
        recorder = TapeRecorder(self._table, undo, refusals, generators)
        self._capturing_thread = threading.get_ident()
        try:
            with (
                answers_as_capturing(lambda: self.is_capturing),
                casts_forgotten(),
                compiled_code_off(),
            ):
                with HostReadGuard(refusals, assignments), recorder:
                    result = function()
                refusals.raise_swallowed()
                recorder.wait_for_collectives()
                if assignments.restore(recorder.tape.created):
                    refusals.refuse(
                        "the function assigned .data of a tensor that existed before; a replay does not repeat that",
                        "copy into the tensor (copy_), or assign before the captured call",
                        where=assignments.where,
                    )
                return recorder.finish(), result
        except BaseException as error:
            assignments.restore(recorder.tape.created)
            self._abandon(recorder)
            if isinstance(error, RuntimeError) and not isinstance(error, CaptureError):
                _explain(error)
            raise
        finally:
            self._capturing_thread = None
            undo.restore()
            recorder.restore_generators()

    @staticmethod
    def _abandon(recorder: TapeRecorder) -> None:
        # If a collective failed too nothing writes any more, and the first error is the one to report.
        with suppress(RuntimeError):
            recorder.wait_for_collectives()
        recorder.forget()

    def branch(self) -> None:
        """There is one order of operations."""
        return

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """There are no streams on the CPU. Compiled code runs as it was written, as it does when it is recorded."""
        with compiled_code_off():
            yield

    def run_on_pool(self, function: Callable[[], T], *, lane: Hashable, copied: Callable[[T], T]) -> T:
        """There are no pools on the CPU."""
        with self.capture_stream():
            return copied(function())

    def borrowed_view(self, tensor: Tensor) -> Tensor:
        """A detached alias: a tape never hands memory out twice, so nothing is gained by not owning it."""
        return tensor.detach()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Close all recordings.

        Raises:
            LifecycleError: a capture is under way.
        """
        if self._capturing_thread is not None:
            raise LifecycleError("the engine is capturing", fix="close it after the capture")
        self._is_closed = True
        for recording in list(self._recordings):
            recording.close()


def _explain(error: RuntimeError) -> None:
    """Raise a :class:`CaptureError` for what torch cannot do under a recorder. Other errors are the function's own."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, NotImplementedError):
        fix = "use operations on dense CPU tensors that torch implements"
    elif "torch.compile" in text:
        fix = "run compiled functions as they are while capturing: torch.compiler.set_stance('force_eager')"
    else:
        return
    raise CaptureError(f"the tape cannot record this: {text}", where=str(user_line_of(error) or ""), fix=fix) from error
