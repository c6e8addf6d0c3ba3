"""The CPU engine: records ATen operations once and replays them on the same storages, without the user's Python.

It is the reference for what a captured graph means, for laptops and tests. It is no faster than eager execution.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.ambient import casts_forgotten, collection_held
from graphstep.engine.host_reads import HostReadGuard, answers_as_capturing
from graphstep.engine.tape_ops import OperationTable
from graphstep.engine.tape_recorder import Tape, TapeRecorder
from graphstep.engine.undo import UndoLog
from graphstep.errors import LifecycleError


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
        if self._engine.is_capturing:
            raise LifecycleError(
                "a recording cannot be replayed inside a capture", fix="replay it before or after the captured function"
            )
        with torch_private.below_autograd():
            for step in self._tape.steps:
                step()

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

    def capture(self, function: Callable[[], Any], *, generators: Sequence[torch.Generator] = ()) -> TapeRecording:
        """Run ``function`` once, recording its operations, then undo what it wrote into tensors that existed before.

        ``generators`` is not needed here: every generator is known from the operations that use it.

        Raises:
            CaptureError: an operation cannot be captured.
            LifecycleError: the engine is closed or already capturing.
        """
        del generators
        if self._is_closed:
            raise LifecycleError("the engine is closed", fix="use a new session")
        if self._capturing_thread is not None:
            raise LifecycleError("a capture is already under way", fix="capture one function at a time")
        undo = UndoLog()
        recorder = TapeRecorder(self._table, undo)
        self._capturing_thread = threading.get_ident()
        try:
            with collection_held(), answers_as_capturing(lambda: self.is_capturing), casts_forgotten():
                with HostReadGuard(), recorder:
                    result = function()
                tape = recorder.finish()
        finally:
            self._capturing_thread = None
            undo.restore()
            recorder.restore_generators()
        recording = TapeRecording(self, tape, result)
        self._recordings.add(recording)
        return recording

    @contextmanager
    def capture_stream(self) -> Iterator[None]:
        """There are no streams on the CPU: the body runs as it is."""
        yield

    def borrowed_view(self, tensor: Tensor) -> Tensor:
        """A detached alias: a tape never hands memory out twice, so nothing is gained by not owning it."""
        return tensor.detach()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Close all recordings."""
        self._is_closed = True
        for recording in list(self._recordings):
            recording.close()
