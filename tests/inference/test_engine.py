"""Tokens of the engine against those of the plain forward over whole sequences."""

from __future__ import annotations

import pytest
import torch
from tests.inference.generation import MODELS, build_engine, build_model, greedy, prompts, reference, seeded

from graphstep.inference.engine import DynamicEngine
from graphstep.inference.requests import Request, SamplingParams
from graphstep.models import GPTModel

KINDS = ("gpt", "moe", "hybrid")
"""Models of Hugging Face, Llama among them, take part in test_hugging_face_tokens.py."""
SCOPES = ("none", "layer", "block")


def settings(how: str, *numbers: int) -> list[SamplingParams]:
    """Of requests that want so many tokens."""
    return [greedy(n) if how == "greedy" else seeded(n, seed=100 + i) for i, n in enumerate(numbers)]


def check(model: GPTModel, engine: DynamicEngine, requests: list[Request]) -> None:
    """All as in the plain way, nothing left behind, and graphs used where there are some."""
    for request in requests:
        prompt = request.tokens[: request.num_prompt_tokens].tolist()
        assert request.output_tokens == reference(model, prompt, request.sampling), f"request {request.number}"
    assert not engine.has_work
    assert engine.blocks.num_available == engine.blocks.capacity
    stats = engine.runner.step_stats
    if engine.runner.ladder.buckets:
        assert stats.num_replays > 0
        assert set(stats.eager_calls) <= (
            {"only decode steps have graphs"} if engine.runner.steps.has_states else set()
        )
    else:
        assert stats.num_replays == 0


@pytest.mark.parametrize("how", ["greedy", "seeded"])
@pytest.mark.parametrize("scope", SCOPES)
class TestTokens:
    @pytest.mark.parametrize("kind", MODELS)
    def test_of_requests_that_join_and_leave(self, kind: str, scope: str, how: str, device: torch.device) -> None:
        model = build_model(kind, device)
        with build_engine(model, scope) as engine:
            first = [engine.add_request(p, s) for p, s in zip(prompts(3, 7), settings(how, 9, 4), strict=True)]
            for _ in range(3):
                engine.step()
            late = prompts(1, 5, 8, seed=4)
            then = [engine.add_request(p, s) for p, s in zip(late, settings(how, 3, 6, 1), strict=True)]
            while engine.has_work:
                engine.step()
            check(model, engine, first + then)

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_requests_that_give_way(self, kind: str, scope: str, how: str, device: torch.device) -> None:
        model = build_model(kind, device)
        with build_engine(model, scope, num_blocks=9, prefix_caching=False) as engine:
            requests = engine.generate(prompts(4, 6, 7), settings(how, 16, 14, 12))
            assert engine.counts.preemptions > 0
            check(model, engine, requests)

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_prompts_in_chunks(self, kind: str, scope: str, how: str, device: torch.device) -> None:
        model = build_model(kind, device)
        with build_engine(model, scope, max_tokens=6, options={"enable_chunked_prefill": True}) as engine:
            requests = engine.generate(prompts(17, 2, 20, 5), settings(how, 4, 8, 3, 5))
            check(model, engine, requests)


@pytest.mark.parametrize("how", ["greedy", "seeded"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_requests_with_known_prefixes(kind: str, scope: str, how: str, device: torch.device) -> None:
    model = build_model(kind, device)
    with build_engine(model, scope, max_tokens=32) as engine:
        (shared,) = prompts(9)
        each = [shared + tail for tail in prompts(1, 4, 6, seed=5)]
        requests = engine.generate(each[:1], settings(how, 4)) + engine.generate(each, settings(how, 5, 4, 6))
        # Blocks do not hold recurrent states: there, every prompt is computed as a whole.
        assert engine.counts.cached_tokens >= 3 * 8 or kind == "hybrid"
        assert engine.counts.cached_tokens == 0 or kind != "hybrid"
        check(model, engine, requests)
