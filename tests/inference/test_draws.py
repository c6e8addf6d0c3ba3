"""Tokens left on the device for the next step, and their way to the host."""

from __future__ import annotations

import pytest
import torch

from graphstep.inference.draws import GREEDY, DrawReader, Draws
from graphstep.inference.metadata import StepMetadata, StepTensors
from graphstep.inference.requests import NOT_FINITE, DrawNeeds
from graphstep.inference.shapes import BatchLimits, BatchShape

LIMITS = BatchLimits(max_requests=6, max_tokens=24, max_sequence_length=40)
ALL = DrawNeeds(is_random=True, is_filtered=True, has_logprobs=True, num_top=3)


def tensors_on(device: torch.device) -> StepTensors:
    return StepMetadata(LIMITS, 4, device).tensors(BatchShape(6, 0, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [40, 2048, 12825, 2**17])
def test_the_most_likely_tokens(size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
    logits[1] = 1.0
    logits[2, size // 2] = torch.nan
    logits[3, 5] = torch.inf
    logits[4] = -torch.inf
    logits[5, [7, 9, size - 1]] = 50.0
    best = logits[0].float().argmax().item()
    tensors = tensors_on(device)
    for of_rows in (logits, torch.cat([logits, logits + 100], 1)[:, :size]):  # the second: columns that pad
        tensors.drawn.fill_(77)
        packed = Draws(device).draw(of_rows, tensors, GREEDY)
        assert packed.tolist() == [[best], [0], [NOT_FINITE], [NOT_FINITE], [NOT_FINITE], [7]]
        assert tensors.drawn.tolist() == [best, 0, 0, 0, 0, 7]


@pytest.mark.parametrize("needs", [DrawNeeds(is_random=True), DrawNeeds(has_logprobs=True), ALL])
def test_the_next_step_finds_what_the_host_is_told(needs: DrawNeeds, device: torch.device) -> None:
    tensors = tensors_on(device)
    tensors.temperatures.fill_(1.0)
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).to(device)
    logits[4] = torch.nan
    packed = Draws(device).draw(logits, tensors, needs)
    tokens = DrawReader(6, device).start(packed, 6, needs).read().tokens
    assert tokens[4] == NOT_FINITE
    tokens[4] = 0
    assert tensors.drawn.tolist() == tokens


def test_two_results_are_on_their_way_at_once(device: torch.device) -> None:
    reader = DrawReader(4, device)
    packed = torch.empty(4, 1, dtype=torch.int32, device=device)
    pending = [reader.start(packed.fill_(1), 3, GREEDY)]
    for value in range(2, 6):
        pending.append(reader.start(packed.fill_(value), 2, GREEDY))
        assert pending.pop(0).read().tokens == [value - 1] * (3 if value == 2 else 2)


def test_a_step_without_draws_is_waited_for_and_not_read(device: torch.device) -> None:
    draws = DrawReader(4, device).start(None, 3, None)
    draws.wait()
    assert draws.read().tokens == [0, 0, 0]


@pytest.mark.gpu
def test_what_is_launched_on_another_stream_comes_later() -> None:
    device = torch.device("cuda")
    reader, packed = DrawReader(4, device), torch.zeros(4, 1, dtype=torch.int32, device=device)
    torch.cuda._sleep(10**8)
    packed.fill_(5)
    draws = reader.start(packed, 4, GREEDY)
    with torch.cuda.stream(torch.cuda.Stream()):
        draws.keep_order()
        copy = packed.clone()
        torch.cuda.current_stream().synchronize()
    assert copy.tolist() == [[5]] * 4
