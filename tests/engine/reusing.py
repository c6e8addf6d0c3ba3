"""A tape that hands memory out again as the pools of the GPU engine do, at its worst."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from graphstep.capture import graph_pair, session
from graphstep.engine import Engine, torch_private
from graphstep.engine.tape import TapeEngine, TapeRecording


class ReusingTapeEngine(TapeEngine):
    """Destroys, before each write, everything that a pool might have put at the same addresses.

    A recording may lie in whatever was free in its lane when it was captured, and what is captured later may lie in
    what it has freed by then. So before each replay, memory of both kinds is overwritten; whoever reads it afterwards
    reads NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[Hashable, dict[int, tuple[TapeRecording, Tensor]]] = {}
        """For each lane, all memory that was ever allocated in it, by storage: whose, and a tensor over it."""
        self._beneath: dict[TapeRecording, list[Tensor]] = {}
        """What a recording may lie in."""
        self._all: weakref.WeakSet[TapeRecording] = weakref.WeakSet()

    def capture(
        self,
        function: Callable[[], Any],
        *,
        generators: Sequence[torch.Generator] = (),
        lane: Hashable = 0,
        collect_first: bool = True,
    ) -> TapeRecording:
        blocks = self._blocks.setdefault(lane, {})
        gc.collect()
        free = self._free(blocks)
        recording = super().capture(function, generators=generators, lane=lane, collect_first=collect_first)
        tape = recording._tape
        assert tape is not None
        self._all.add(recording)
        free |= self._free(blocks)
        own = {key: torch_private.plain_alias(alias) for key, alias in tape.created.items()}
        beneath = self._beneath[recording] = [blocks[key][1] for key in free]
        tape.steps.insert(0, partial(_destroy, beneath))
        for earlier in {blocks[key][0] for key in free}:
            if earlier._tape is not None:
                earlier._tape.steps.insert(0, partial(_destroy, list(own.values())))
        blocks.update((key, (recording, alias)) for key, alias in own.items())
        return recording

    def borrowed_view(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(
            tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def written(self, tensor: Tensor) -> None:
        """Somebody is about to write to this tensor outside of a replay."""
        for blocks in self._blocks.values():
            if torch_private.storage_key(tensor) in blocks:
                recording, _ = blocks[torch_private.storage_key(tensor)]
                _destroy(self._beneath[recording])

    def close(self) -> None:
        super().close()
        self._blocks.clear()
        self._beneath.clear()

    def _free(self, blocks: dict[int, tuple[TapeRecording, Tensor]]) -> set[int]:
        """The memory that nobody holds but tapes and this object, for which pools have no counterpart."""
        tapes = [recording._tape for recording in self._all if recording._tape is not None]
        known = [alias for kept in self._blocks.values() for _, alias in kept.values()]
        holders: dict[int, set[int]] = {}
        for tensor in (*known, *_tensors([(tape.steps, tape.external, tape.created) for tape in tapes])):
            holders.setdefault(torch_private.storage_key(tensor), set()).add(id(tensor))
        alone = _count(torch.empty(1)) - 1  # What counting itself holds.
        return {key for key, (_, alias) in blocks.items() if _count(alias) - alone <= len(holders[key])}


@contextmanager
def memory_is_reused() -> Iterator[None]:
    """Sessions on the CPU get such an engine, and it hears of what is written into static inputs."""
    engines: weakref.WeakSet[ReusingTapeEngine] = weakref.WeakSet()
    engine_for, refresh = session.engine_for, graph_pair.refresh

    def make(device: torch.device | str) -> Engine:
        if torch.device(device).type != "cpu":
            return engine_for(device)
        engine = ReusingTapeEngine()
        engines.add(engine)
        return engine

    def write(target: Tensor, source: Tensor) -> None:
        for engine in engines:
            engine.written(target)
        refresh(target, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "engine_for", make)
        patch.setattr(graph_pair, "refresh", write)
        yield


def _count(tensor: Tensor) -> int:
    return torch_private.HolderCount([tensor]).now()[0]


def _destroy(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        content = torch_private.all_bytes(tensor)
        if tensor.is_floating_point() or tensor.is_complex():
            content.fill_(0xFF)  # NaN in every format.
        else:
            content.zero_()  # Indices stay valid.


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensor objects that steps, and what belongs to them, hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, partial):
        yield from _tensors((value.func, value.args, value.keywords))
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(getattr(value, "__self__", None), Tensor):
        yield value.__self__
