"""Memory that a replay has to write before it reads it, overwritten: whoever reads it first shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.cuda import CudaEngine
from graphstep.engine.protocol import Engine
from graphstep.engine.tape import TapeEngine

_NAN_BYTE: Final = 0xFF
"""Not a number in every format of floating point."""
_SIZES: Final = tuple(1 << n for n in range(9, 25))
"""Bytes of blocks that are left dirty: those of small tensors up to those of a layer."""
_NUM_BLOCKS: Final = 4
"""Of each size."""


def poison_free_memory(engine: Engine) -> int:
    """Overwrite what recordings have made and nobody holds, when nothing of them is in flight; tells how many bytes.

    Results that somebody holds, gradients among them, stay as they are. A tape tells the types of its tensors: numbers
    become NaN, and integers 0, which is a valid index. Of a pool of the GPU only the bytes are known, and all are 0xFF.
    On an engine of another kind nothing happens.
    """
    if isinstance(engine, TapeEngine):
        return poison(_unheld_of_tapes(engine))
    if isinstance(engine, CudaEngine):
        blocks = [torch.as_tensor(_Bytes(*block), device=engine.device) for block in _free_blocks(engine)]
        for block in blocks:
            block.fill_(_NAN_BYTE)
        return sum(block.nbytes for block in blocks)
    return 0


def poison(tensors: Iterable[Tensor]) -> int:
    """Overwrite the whole storage of each tensor by NaN, or by zeros where it holds no numbers; tells the bytes."""
    nbytes = 0
    for tensor in tensors:
        content = torch_private.all_bytes(tensor)
        content.fill_(_NAN_BYTE if tensor.is_floating_point() or tensor.is_complex() else 0)
        nbytes += content.nbytes
    return nbytes


def leave_dirty_memory(engine: Engine) -> None:
    """Leave NaN in memory that the allocator hands out next, and in the workspaces of matrix products.

    A graph that reads memory which is free by now, or a kernel that counts on a clean workspace, then shows it.
    """
    with torch.no_grad():
        _leave_dirty(engine.device)
        with engine.capture_stream():
            _leave_dirty(engine.device)


def _leave_dirty(device: torch.device) -> None:
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in _SIZES for _ in range(_NUM_BLOCKS)]
    for block in blocks:
        block.fill_(_NAN_BYTE)
    if device.type == "cuda":
        for dtype in (torch.float32, torch.bfloat16):
            # Long sums of small products are split, and their parts meet in a workspace.
            rows = torch.full((64, 1 << 15), float("nan"), dtype=dtype, device=device)
            torch.mm(rows, rows.t())


class _Bytes:
    """Memory of a GPU, described by the CUDA array interface: a tensor over it does not own it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _free_blocks(engine: CudaEngine) -> Iterator[tuple[int, int]]:
    """Address and size of what is free in the engine's pools, as the allocator sees it: what graphs use in passing."""
    names = {tuple(pool) for pool in engine.pools()}
    torch.cuda.synchronize(engine.device)
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) not in names:
            continue
        address = int(segment["address"])
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                yield int(block.get("address", address)), int(block["size"])
            address += int(block["size"])


def _unheld_of_tapes(engine: TapeEngine) -> list[Tensor]:
    """What tapes have allocated and hold alone."""
    tapes = engine.tapes()
    probe = torch.empty(1)
    alone = torch_private.HolderCount([probe]).now()[0]
    if not alone:
        return []  # This torch does not tell who holds what.
    made = {key: alias for tape in tapes for key, alias in tape.created.items()}
    known: dict[int, set[int]] = {key: set() for key in made}
    for tensor in _tensors([(tape.steps, tape.external, tape.created) for tape in tapes]):
        if (key := torch_private.storage_key(tensor)) in known:
            known[key].add(id(tensor))
    counts = torch_private.HolderCount(list(made.values())).now()
    # Counting holds each storage itself.
    return [alias for (key, alias), count in zip(made.items(), counts, strict=True) if count < len(known[key]) + alone]


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensor objects that steps hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, partial):
        yield from _tensors((value.func, value.args, value.keywords))
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(getattr(value, "__self__", None), Tensor):
        yield value.__self__
