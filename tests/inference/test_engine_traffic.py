"""Mixed traffic over time: everything at once, and nothing lost, leaked or different."""

from __future__ import annotations

import random

import pytest
import torch
from tests.inference.generation import VOCABULARY, build_engine, build_model, greedy, reference, seeded

from graphstep.inference.engine import CacheMode, DynamicEngine
from graphstep.inference.requests import FinishReason, Output, Request

KINDS = ("llama", "moe one by one", "hybrid")


def drive(engine: DynamicEngine, dice: random.Random, num_requests: int) -> list[Request]:
    """Requests that arrive at random, some with a common beginning; some are cancelled, and the engine pauses."""
    common = [dice.randrange(1, VOCABULARY) for _ in range(9)]
    requests: list[Request] = []
    given: dict[int, list[int]] = {}

    def note(outputs: list[Output]) -> None:
        for output in outputs:
            if output.token is not None:
                given.setdefault(output.request.number, []).append(output.token)

    while len(requests) < num_requests or engine.has_work:
        for _ in range(dice.choice((0, 0, 1, 3)) if len(requests) < num_requests else 0):
            own = [dice.randrange(1, VOCABULARY) for _ in range(dice.randint(1, 12))]
            prompt = common[: dice.choice((0, 0, 9))] + own
            number = dice.randint(1, 10)
            stop = (dice.randrange(VOCABULARY),)
            sampling = greedy(number, stop_tokens=stop) if dice.random() < 0.5 else seeded(number, dice.randrange(99))
            requests.append(engine.add_request(prompt, sampling))
        note(engine.step())
        if requests and dice.random() < 0.05:
            engine.cancel(dice.choice(requests))
        if dice.random() < 0.05:
            engine.suspend(dice.choice(list(CacheMode)))
            engine.resume()
    assert all(given.get(request.number, []) == request.output_tokens for request in requests), "streams miss nothing"
    return requests


@pytest.mark.parametrize(
    ("kind", "scope", "waits"),
    [
        *(
            (kind, scope, False)
            for kind in ("llama", "moe one by one", "hybrid")
            for scope in ("none", "layer", "block")
        ),
        ("llama", "none", True),
        ("hybrid", "block", True),
    ],
)
def test_traffic(kind: str, scope: str, waits: bool, device: torch.device) -> None:
    model = build_model(kind, device)
    options = {"enable_chunked_prefill": True}
    with build_engine(
        model, scope, max_tokens=10, num_blocks=18, options=options, async_scheduling=not waits
    ) as engine:
        requests = drive(engine, random.Random(kind), 40)
        for request in requests:
            wanted = reference(model, request.tokens[: request.num_prompt_tokens].tolist(), request.sampling)
            is_cut = request.finish_reason is FinishReason.CANCELLED
            assert request.output_tokens == (wanted[: len(request.output_tokens)] if is_cut else wanted)
        assert engine.counts.finished == len(requests)
        assert engine.counts.preemptions > 0
        assert engine.blocks.num_available == engine.blocks.capacity
        stats = engine.runner.step_stats
        if scope != "none":
            assert stats.num_signatures == len(engine.runner.graphs)
            assert set(stats.eager_calls) <= ({"only decode steps have graphs"} if kind == "hybrid" else set())


def test_requests_do_not_depend_on_what_else_runs() -> None:
    """The same request alone and in a crowd, with a seed: the engine's own seed has no part in it."""
    model = build_model("llama")
    prompt, sampling = [5, 6, 7], seeded(8, 3)
    with build_engine(model, seed=1) as engine:
        (alone,) = engine.generate([prompt], sampling)
    with build_engine(model, "block", seed=2) as engine:
        crowd = engine.generate([[1, 2], prompt, [9] * 5], [greedy(9), sampling, seeded(4, 4)])
    assert alone.output_tokens == crowd[1].output_tokens
