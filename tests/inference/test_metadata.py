from __future__ import annotations

import random
from dataclasses import fields as dataclass_fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphstep.engine import CudaEngine, TapeEngine
from graphstep.errors import InputMismatchError
from graphstep.inference.blocks import BlockPool
from graphstep.inference.fields import FIELDS
from graphstep.inference.metadata import StepMetadata, StepTensors
from graphstep.inference.requests import SamplingParams, draw_key
from graphstep.inference.scheduler import Scheduler
from graphstep.inference.shapes import BatchLimits, BatchShape
from graphstep.inference.step import Step, dummy_step

BLOCK = 4
LIMITS = BatchLimits(max_requests=6, max_tokens=24, max_sequence_length=40)


def scheduler() -> Scheduler:
    return Scheduler(LIMITS, BlockPool(64, BLOCK), chunked_prefill=True)


def metadata(limits: BatchLimits = LIMITS, device: str = "cpu") -> StepMetadata:
    return StepMetadata(limits, BLOCK, device)


def dirty(metadata: StepMetadata) -> None:
    """Fill all memory with what no step contains: what is not written shows."""
    for memory in [metadata._device[4:], *(host._bytes for host in metadata._hosts)]:
        memory.fill_(77)
    for host in metadata._hosts:
        # The tables are erased where they were used before; so this is no state that they can be in.
        host._fields["block_tables"][:] = 0


def check(tensors: StepTensors, step: Step, bucket: BatchShape) -> None:
    """Compare with the plain meaning of each field, request by request and token by token."""
    requests, tokens = len(step.requests), len(step.token_ids)
    assert tensors.counts.tolist() == [tokens, requests, step.shape.decode, step.shape.prefill]
    assert tensors.token_ids.tolist() == [*step.token_ids, *[0] * (bucket.tokens - tokens)]
    assert tensors.words.index_select(0, tensors.token_sources).tolist() == tensors.token_ids.tolist()
    row = 0
    for index in range(requests):
        request, start, length = step.requests[index], step.starts[index], step.lengths[index]
        assert tensors.query_starts[index] == row
        assert tensors.starts[index] == start
        assert tensors.context_lengths[index] == start + length
        assert tensors.last_tokens[index] == row + length - 1
        assert tensors.state_slots[index] == request.state_slot
        table = step.block_tables[index].tolist()
        assert tensors.block_tables[index].tolist() == table + [0] * (tensors.block_tables.shape[1] - len(table))
        for position in range(start, start + length):
            assert tensors.positions[row] == position
            assert tensors.token_requests[row] == index
            known = table[position // BLOCK] if position // BLOCK < len(table) else 0
            assert tensors.slots[row] == known * BLOCK + position % BLOCK
            row += 1
    assert row == tokens
    assert tensors.query_starts[requests:].tolist() == [tokens] * (bucket.requests + 1 - requests)
    for name, field in FIELDS.items():
        section = getattr(tensors, name)
        assert section.dtype == field.dtype
        if field.per == "token":
            assert section.shape[0] == bucket.tokens
            assert (section[tokens:] == field.fill).all(), name
        elif field.per == "request" and name != "query_starts":
            assert section.shape[0] == bucket.requests
            assert (section[requests:] == field.fill).all(), name


def test_every_field_has_a_view() -> None:
    assert [field.name for field in dataclass_fields(StepTensors)][1:] == [*FIELDS, "words", "drawn"]


@given(st.randoms(use_true_random=False))
def test_steps_of_a_scheduler(rng: random.Random) -> None:
    run, filled = scheduler(), metadata()
    dirty(filled)
    for _ in range(15):
        for _ in range(rng.choice([0, 0, 1, 3])):
            prompt = [rng.randrange(100) for _ in range(rng.randint(1, 30))]
            run.add(prompt, SamplingParams(max_new_tokens=rng.randint(1, 9), seed=rng.randrange(5)))
        step = run.schedule()
        if step is None:
            continue
        shape = step.shape
        more = rng.randint(0, LIMITS.max_requests - shape.requests)
        bucket = BatchShape(rng.randint(shape.tokens, LIMITS.max_tokens), shape.prefill, shape.decode + more)
        tensors = filled.fill(step, rng.choice([None, bucket]))
        check(tensors, step, tensors.bucket)
        run.commit(step, [rng.randrange(100) for _ in step.requests])


def test_settings_of_requests() -> None:
    run, filled = scheduler(), metadata()
    run.add([1, 2, 3], SamplingParams(temperature=0.5, top_p=0.25, top_k=7, seed=11))
    run.add([4, 5], SamplingParams(temperature=0, seed=-1))
    step = run.schedule()
    assert step is not None
    settings = filled.fill(step, BatchShape(8, 3, 0)).draw_settings
    assert settings.keys.tolist() == [draw_key(11), draw_key(-1), 0]
    assert settings.temperatures.tolist() == [0.5, 0, 0]
    assert settings.top_ps.tolist() == [0.25, 1, 1]
    assert settings.top_ks.tolist() == [7, 0, 0]
    assert settings.positions.tolist() == [3, 2, 0]


def test_tokens_of_the_step_before_are_found_where_they_were_drawn() -> None:
    run, filled = Scheduler(LIMITS, BlockPool(64, BLOCK), most_in_flight=2), metadata()
    requests = [run.add([7] * length, SamplingParams(max_new_tokens=9)) for length in (3, 1, 2)]
    before = run.schedule()
    assert before is not None
    filled.fill(before, BatchShape(8, 6, 0)).drawn.copy_(torch.tensor([31, 32, 33, 34, 35, 36]))
    run.end(requests[0])
    new = run.add([8, 9], SamplingParams())
    step = run.schedule()
    assert step is not None
    assert step.requests == [requests[1], requests[2], new]
    tensors = filled.fill(step, BatchShape(8, 4, 2))
    assert tensors.words.index_select(0, tensors.token_sources).tolist() == [32, 33, 8, 9, 0, 0, 0, 0]
    assert tensors.drawn.tolist() == [31, 32, 33, 34, 35, 36]


def test_what_a_step_contained_does_not_show_in_the_next() -> None:
    """A long block table in a row, then a shorter one; with more than one host buffer, then the first again."""
    filled = metadata()
    bucket = BatchShape(24, 6, 0)
    for length in (24, 3, 9, 1, 24, 2):
        run = scheduler()
        for _ in range(24 // length):
            run.add([7] * length, SamplingParams())
        step = run.schedule()
        assert step is not None
        check(filled.fill(step, bucket), step, bucket)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_addresses_are_fixed(device: str) -> None:
    filled = metadata(device=device)
    run = scheduler()
    run.add([1, 2, 3], SamplingParams(max_new_tokens=9))
    bucket = BatchShape(4, 0, 4)
    before = {name: getattr(filled.tensors(bucket), name).data_ptr() for name in FIELDS}
    for _ in range(3):
        step = run.schedule()
        assert step is not None
        tensors = filled.fill(step)
        assert {name: getattr(tensors, name).data_ptr() for name in FIELDS} == before
        assert tensors.token_ids.tolist() == step.token_ids.tolist()
        run.commit(step, [5])
    assert all((address - before["counts"]) % 128 == 0 for address in before.values())


@pytest.mark.parametrize("kind", ["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_recording_reads_what_was_filled_in_last(kind: str) -> None:
    engine = CudaEngine() if kind == "cuda" else TapeEngine()
    filled = metadata(device="cpu" if kind == "tape" else "cuda")
    tensors = filled.tensors(BatchShape(4, 0, 4))
    recording = engine.capture(lambda: tensors.slots * 100 + tensors.token_ids)
    run = scheduler()
    for token in range(3):
        run.add([token], SamplingParams(max_new_tokens=9))
    for _ in range(6):
        step = run.schedule()
        assert step is not None
        padded = filled.fill(step, BatchShape(step.shape.tokens + 1, step.shape.prefill + 1, step.shape.decode))
        recording.replay()
        expected = padded.slots * 100 + padded.token_ids
        assert recording.result.equal(expected)
        run.commit(step, [9, 8, 7])
    engine.close()


def test_before_the_first_step_all_is_padding() -> None:
    tensors = metadata().tensors(BatchShape(24, 2, 4))
    for name, field in FIELDS.items():
        assert (getattr(tensors, name) == field.fill).all()


@pytest.mark.parametrize("shape", [(1, 0, 1), (6, 0, 6), (24, 1, 5), (24, 6, 0), (24, 3, 2), (10, 4, 2), (24, 0, 6)])
def test_dummy_steps_write_to_the_reserved_block_alone(shape: tuple[int, int, int]) -> None:
    bucket = BatchShape(*shape)
    step = dummy_step(bucket, LIMITS.max_sequence_length)
    assert (step.shape.prefill, step.shape.decode) == (bucket.prefill, bucket.decode)
    assert step.shape.tokens == (bucket.tokens if bucket.prefill else bucket.decode)
    tensors = metadata().fill(step, bucket)
    check(tensors, step, bucket)
    assert (tensors.slots < BLOCK).all()
    assert (tensors.block_tables == 0).all()
    assert (tensors.state_slots == 0).all()


def test_dummy_prompts_are_no_longer_than_sequences() -> None:
    step = dummy_step(BatchShape(100, 2, 0), 40)
    assert step.lengths.tolist() == [40, 40]


def test_batch_invariant_buckets_are_larger_than_the_limits() -> None:
    limits = BatchLimits(max_requests=6, max_tokens=24, max_sequence_length=40, batch_invariant=True)
    assert metadata(limits).tensors(BatchShape(64, 1, 5)).token_ids.shape == (64,)


def test_what_does_not_fit_is_refused() -> None:
    filled = metadata()
    step = dummy_step(BatchShape(4, 0, 4), 40)
    with pytest.raises(InputMismatchError, match=r"a step of 4 tokens .* does not fit a bucket of 3 tokens"):
        filled.fill(step, BatchShape(3, 0, 4))
    with pytest.raises(InputMismatchError, match="does not fit"):
        filled.fill(step, BatchShape(4, 0, 3))
    with pytest.raises(InputMismatchError, match="larger than 24 tokens and 6 requests"):
        filled.tensors(BatchShape(25, 0, 4))
    step.block_tables[0].extend([0] * 10)
    with pytest.raises(InputMismatchError, match="11 blocks is longer than the 10"):
        filled.fill(step)


def test_size_on_the_device() -> None:
    small, large = metadata(), metadata(BatchLimits(max_requests=6, max_tokens=24, max_sequence_length=80))
    assert large.nbytes - small.nbytes == 6 * 10 * np.dtype(np.int32).itemsize
