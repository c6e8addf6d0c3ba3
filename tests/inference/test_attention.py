"""Attention over blocks against the plain formula over each request's own sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from tests.inference.generation import LLAMA
from torch import Tensor
from torch.nn import functional

from graphstep.inference.attention import AttentionKernels, TorchAttention, attention_for
from graphstep.inference.metadata import StepMetadata, StepTensors
from graphstep.inference.requests import Request, SamplingParams
from graphstep.inference.shapes import BatchLimits, BatchShape
from graphstep.inference.step import Step
from graphstep.models import RotaryTables, WeightInitializer, apply_rotary

BLOCK = 16
LIMITS = BatchLimits(max_requests=8, max_tokens=256, max_sequence_length=400)
GREEDY = SamplingParams(temperature=0)


def step_of(*parts: tuple[int, int]) -> Step:
    """Requests with so many tokens computed before, and so many in this step; those of one token decode."""
    step, block = Step(0), 1
    for number, (start, length) in enumerate(parts):
        total = start + length
        request = Request(number, array("i", [1] * total), total, GREEDY, total + 1, GREEDY.packed(0))
        request.num_computed, request.is_prefilling = start, length > 1
        needed = -(-total // BLOCK)
        request.block_table.extend(range(block, block + needed))
        block += needed
        step.append(request, length)
    return step


def filled(step: Step, bucket: BatchShape | None, device: torch.device) -> StepTensors:
    return StepMetadata(LIMITS, BLOCK, device).fill(step, bucket)


def expected(q_TND: Tensor, pages: Tensor, step: Step) -> list[Tensor]:
    """Of each request, by PyTorch's attention over keys put side by side."""
    results, row = [], 0
    for start, length, table in zip(step.starts, step.lengths, step.block_tables, strict=True):
        k, v = pages[:, table.tolist()].flatten(1, 2)[:, : start + length].transpose(1, 2)
        mask = torch.ones(length, start + length, dtype=torch.bool, device=q_TND.device).tril(start)
        repeats = q_TND.shape[1] // k.shape[0]
        q = q_TND[row : row + length].transpose(0, 1)
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        results.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1))
        row += length
    return results


STEPS: dict[str, tuple[Sequence[tuple[int, int]], BatchShape | None]] = {
    "one": ([(0, 1)], None),
    "decode": ([(40, 1), (0, 1), (15, 1), (16, 1), (399, 1)], None),
    "decode, padded": ([(40, 1), (17, 1), (100, 1)], BatchShape(8, 0, 8)),
    "decode, rounded up": ([(40, 1), (17, 1), (100, 1)], BatchShape(64, 0, 4)),
    "prompt": ([(0, 37)], None),
    "chunk": ([(100, 37)], None),
    "mixed": ([(40, 1), (16, 1), (0, 70), (31, 33), (0, 2)], None),
    "mixed, padded": ([(40, 1), (0, 70), (31, 33)], BatchShape(128, 4, 4)),
    "short": ([(3, 1), (0, 1), (5, 2), (0, 3), (9, 2)], BatchShape(16, 4, 2)),
}


def compare(
    kernels: AttentionKernels, name: str, device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int
) -> None:
    parts, bucket = STEPS[name]
    step = step_of(*parts)
    tensors = filled(step, bucket, device)
    generator = torch.Generator().manual_seed(3)
    num_tokens = tensors.bucket.tokens
    drawn = torch.randn(num_tokens, heads + 2 * groups, size, generator=generator).to(device, dtype)
    pages = torch.randn(2, 64, BLOCK, groups, size, generator=generator).to(device, dtype)
    # What nobody may see: the reserved block, blocks of others, and places beyond a context.
    held = {block for table in step.block_tables for block in table}
    pages[:, [block for block in range(64) if block not in held]] = torch.nan
    for start, length, table in zip(step.starts, step.lengths, step.block_tables, strict=True):
        pages[:, table[-1], (start + length - 1) % BLOCK + 1 :] = torch.nan
    drawn[len(step.token_ids) :] = torch.nan
    cos, sin = rotary_tables(size, device).table.index_select(1, tensors.positions).to(dtype).unbind()
    before = pages.clone()
    q = kernels.rotate_and_write(drawn, (cos, sin), size, pages, tensors.slots)
    y = kernels.attend(q, pages, tensors, None)

    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    number = len(step.token_ids)
    turned = apply_rotary(drawn[None, :, : heads + groups], cos, sin, channels=size)[0, :number]
    torch.testing.assert_close(q[:number], turned[:, :heads], atol=tolerance, rtol=tolerance)
    slots = tensors.slots[:number]
    of_slots = pages.flatten(1, 2)[:, slots]
    torch.testing.assert_close(of_slots[0], turned[:, heads:], atol=tolerance, rtol=tolerance)
    assert torch.equal(of_slots[1], drawn[:number, heads + groups :])
    untouched = torch.ones(64 * BLOCK, dtype=torch.bool, device=device)
    untouched[slots] = untouched[0] = False
    after, before = (t.flatten(1, 2)[:, untouched].nan_to_num(7) for t in (pages, before))
    assert torch.equal(after, before)
    wanted = torch.cat(expected(q[:number].float(), pages.float(), step))
    torch.testing.assert_close(y[:number].float(), wanted, atol=tolerance, rtol=tolerance)


def rotary_tables(size: int, device: torch.device) -> RotaryTables:
    from dataclasses import replace

    config = replace(LLAMA, kv_channels=size, max_position_embeddings=512)
    tables = RotaryTables(config, device=device)
    tables.init_weights(WeightInitializer(std=0.02, num_layers=1, generator=None))
    return tables


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 8), (3, 3, 24), (8, 1, 16)])
@pytest.mark.parametrize("name", STEPS)
def test_torch_operations_follow_the_formula(name: str, heads: int, groups: int, size: int) -> None:
    compare(TorchAttention(), name, torch.device("cpu"), torch.float32, heads, groups, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 64), (3, 3, 80), (32, 8, 64), (8, 1, 128)])
@pytest.mark.parametrize("name", STEPS)
def test_kernels_follow_the_formula(name: str, heads: int, groups: int, size: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    compare(attention_for(device, dtype), name, device, dtype, heads, groups, size)


@pytest.mark.parametrize(
    "kernels",
    [
        TorchAttention(is_batch_invariant=True),
        pytest.param(None, marks=pytest.mark.gpu),
    ],
    ids=["torch", "triton"],
)
def test_invariant_results_do_not_depend_on_the_step(kernels: AttentionKernels | None) -> None:
    """Bit for bit: the same request decodes alone, among others, and beside prompts."""
    device = torch.device("cpu" if kernels is not None else "cuda")
    kernels = kernels or attention_for(device, torch.float32, is_batch_invariant=True)
    pages = torch.randn(2, 64, BLOCK, 2, 64, generator=torch.Generator().manual_seed(3)).to(device)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(4)).to(device)
    results = []
    for others in ([], [(399, 1), (5, 1)], [(60, 1), (0, 30)]):
        tensors = filled(step_of((140, 1), *others), None, device)
        queries = q.repeat(tensors.bucket.tokens, 1, 1)
        results.append(kernels.attend(queries, pages, tensors, 9 if not others else 26)[:1])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_long_steps_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphstep.inference.attention._MOST_KEYS_AT_ONCE", 1)
    compare(TorchAttention(), "mixed", torch.device("cpu"), torch.float32, 4, 2, 8)
