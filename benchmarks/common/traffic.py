"""Requests of mixed sizes and settings that arrive over time, against the same ones one after another."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from common.clocks import Spread, synchronize
from common.generation import cache_gigabytes
from graphstep.config import InferenceConfig, InferenceCudaGraphScope
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.requests import Request, SamplingParams
from graphstep.models import GPTModel


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it comes."""

    seconds: float
    prompt: list[int]
    sampling: SamplingParams


def arrivals(model: GPTModel, number: int, mean_gap_seconds: float, longest: int) -> list[Arrival]:
    """Draw requests: prompts and continuations of a few tokens up to half of ``longest``, half of them greedy."""
    dice = random.Random(0)
    seconds, found = 0.0, []
    for index in range(number):
        prompt = [dice.randrange(1, model.config.vocab_size) for _ in range(dice.randint(longest // 32, longest // 2))]
        num_new = dice.randint(longest // 32, longest // 2)
        settings: dict[str, float] = {"temperature": 0.0}
        if index % 4 == 2:
            settings = {"temperature": 1.0}
        elif index % 4 == 3:
            settings = {"temperature": 0.8, "top_p": 0.95}
        sampling = SamplingParams(max_new_tokens=num_new, seed=index, **settings)  # type: ignore[arg-type]
        found.append(Arrival(seconds, prompt, sampling))
        seconds += dice.expovariate(1 / mean_gap_seconds)
    return found


def measure_traffic(
    model: GPTModel, scope: str, *, number: int, mean_gap_seconds: float, longest: int
) -> dict[str, Any]:
    """Run the requests as they arrive, then one after another, in one engine with all of its graphs."""
    options = InferenceConfig(
        inference_dynamic_batching_max_requests=number,
        inference_dynamic_batching_max_tokens=max(number, 2 * longest),
        inference_dynamic_batching_buffer_size_gb=cache_gigabytes(model),
        inference_dynamic_batching_block_size=64,
        inference_cuda_graph_max_tokens=max(number, longest),
        enable_chunked_prefill=True,
    )
    config = EngineConfig(
        inference=options,
        scope=InferenceCudaGraphScope(scope),
        is_required=True,
        prefix_caching=False,
        show_progress=False,
        max_sequence_length=longest,
    )
    device = model.embedding.weight.device
    wanted = arrivals(model, number, mean_gap_seconds, longest)
    started = time.perf_counter()
    with DynamicEngine(model, config) as engine:
        ready = time.perf_counter() - started
        num_recordings = engine.report().num_recordings
        engine.generate([wanted[0].prompt, wanted[-1].prompt], SamplingParams(max_new_tokens=4))  # warm
        runner = engine.runner
        decode_before = runner.num_decode_steps, runner.num_decode_replays
        synchronize(device)
        begun = time.perf_counter()
        together, waits = _as_they_come(engine, wanted)
        synchronize(device)
        seconds = time.perf_counter() - begun
        num_decode = runner.num_decode_steps - decode_before[0]
        num_replays = runner.num_decode_replays - decode_before[1]
        begun = time.perf_counter()
        alone = [engine.generate([each.prompt], each.sampling)[0] for each in wanted]
        synchronize(device)
        alone_seconds = time.perf_counter() - begun
        num_tokens = sum(len(request.output_tokens) for request in together)
        report = engine.report()
        pairs = zip(together, alone, strict=True)
        return {
            "scope": scope,
            "num_requests": number,
            "mean_gap_ms": mean_gap_seconds * 1e3,
            "num_tokens": num_tokens,
            "last_arrival_seconds": wanted[-1].seconds,
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "one_after_another_seconds": alone_seconds,
            "one_after_another_tokens_per_second": num_tokens / alone_seconds,
            "over_one_after_another": alone_seconds / seconds,
            "first_token_ms": Spread.of([wait * 1e3 for wait in waits]).median,
            "num_decode_steps": num_decode,
            "decode_hit_rate": num_replays / max(1, num_decode),
            "steps": {"replays": runner.step_stats.num_replays, "eager": dict(runner.step_stats.eager_calls)},
            "num_captures_after_start": report.num_recordings - num_recordings,
            "num_recordings": num_recordings,
            "ready_seconds": ready,
            "preemptions": engine.counts.preemptions,
            "blocks_leaked": engine.blocks.capacity - engine.blocks.num_available,
            "requests_with_equal_tokens": sum(one.output_tokens == other.output_tokens for one, other in pairs),
        }


def _as_they_come(engine: DynamicEngine, wanted: list[Arrival]) -> tuple[list[Request], list[float]]:
    """The requests, and how long each waited for its first token."""
    requests: list[Request] = []
    came: dict[int, float] = {}
    first: dict[int, float] = {}
    begun = time.perf_counter()
    while len(requests) < len(wanted) or engine.has_work:
        now = time.perf_counter() - begun
        while len(requests) < len(wanted) and wanted[len(requests)].seconds <= now:
            each = wanted[len(requests)]
            requests.append(engine.add_request(each.prompt, each.sampling))
            came[requests[-1].number] = each.seconds
        if not engine.has_work:
            time.sleep(max(0.0, wanted[len(requests)].seconds - now))
            continue
        for output in engine.step():
            first.setdefault(output.request.number, time.perf_counter() - begun)
    return requests, [first[number] - seconds for number, seconds in came.items()]
