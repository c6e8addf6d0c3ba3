"""Workspaces of the math libraries, which graphs write and which torch may free at any time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from graphstep.engine.cuda import CudaEngine

pytestmark = pytest.mark.gpu
NUM_CHUNKS = 6
CHUNK = 8 * 2**20  # fp32 numbers: 32 MiB, the size of a workspace


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    gc.collect()
    made = CudaEngine()
    yield made
    made.close()


def product_of(engine: CudaEngine) -> tuple[Tensor, Tensor]:
    """Factors whose product is summed up in several parts, in a workspace."""
    generator = torch.Generator(engine.device).manual_seed(5)
    left = torch.randn(64, 16384, device=engine.device, dtype=torch.bfloat16, generator=generator)
    return left.requires_grad_(), torch.randn(
        16384, 64, device=engine.device, dtype=torch.bfloat16, generator=generator
    )


def test_graphs_write_into_nothing_else_after_workspaces_were_freed(engine: CudaEngine) -> None:
    left, right = product_of(engine)

    def both_ways() -> tuple[Tensor, Tensor]:
        leaf = left.detach().requires_grad_()
        result = leaf @ right
        return result.detach(), torch.autograd.grad(result.sum(), leaf)[0]

    expected = [tensor.clone() for tensor in both_ways()]
    with engine.capture_stream():
        both_ways()
    recording = engine.capture(both_ways)
    recording.replay()
    assert all(map(torch.equal, recording.result, expected))
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    with engine.capture_stream():
        chunks = [torch.full((CHUNK,), 7.0, device=engine.device) for _ in range(NUM_CHUNKS)]
    chunks += [torch.full((CHUNK,), 7.0, device=engine.device) for _ in range(NUM_CHUNKS)]
    for _ in range(3):
        recording.replay()
    assert all(map(torch.equal, recording.result, expected))
    assert all(bool((chunk == 7.0).all()) for chunk in chunks)


@pytest.mark.parametrize("has_backward", [False, True], ids=["forward", "both"])
def test_streams_on_which_others_have_multiplied_are_left_to_them(engine: CudaEngine, has_backward: bool) -> None:
    left, right = product_of(engine)
    torch._C._cuda_clearCublasWorkspaces()
    stream = engine._stream
    with torch.cuda.stream(stream):
        product = left @ right
        if has_backward:
            product.sum().backward()
    del product
    recording = engine.capture(lambda: left @ right)
    assert engine._stream != stream
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    chunks = [torch.full((CHUNK,), 7.0, device=engine.device) for _ in range(NUM_CHUNKS)]
    recording.replay()
    assert torch.equal(recording.result, left @ right)
    assert all(bool((chunk == 7.0).all()) for chunk in chunks)


def test_a_capture_after_that_has_workspaces_outside_of_its_pool(engine: CudaEngine) -> None:
    left, right = product_of(engine)
    engine.capture(lambda: left @ right)
    torch._C._cuda_clearCublasWorkspaces()
    before = engine.pool_bytes
    recordings = [engine.capture(lambda: left @ right) for _ in range(3)]
    assert engine.pool_bytes - before < 2**25
    for recording in recordings:
        recording.replay()
        assert torch.equal(recording.result, left @ right)


def test_sessions_leave_nothing_behind_but_workspaces(engine: CudaEngine) -> None:
    left, right = product_of(engine)
    engine.capture(lambda: left @ right)
    sizes = []
    for _ in range(3):
        other = CudaEngine()
        other.capture(lambda: left @ right)
        other.close()
        torch.cuda.empty_cache()
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == other.workspace_pool]
        assert all(
            block["state"] == "active_allocated" for s in segments for block in s["blocks"] if block["size"] > 2**21
        )
        sizes.append(sum(s["total_size"] for s in segments))
    assert 0 < min(sizes) <= max(sizes) < 2**27


def test_workspaces_are_counted_without_what_the_user_holds(engine: CudaEngine) -> None:
    with engine.capture_stream():
        held = torch.zeros(2**26, device=engine.device)
    left, right = product_of(engine)
    engine.capture(lambda: left @ right)
    assert engine.workspace_bytes < held.nbytes
