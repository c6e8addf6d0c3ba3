"""Tokens of loaded models against transformers computing the whole sequence again for every token."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.inference.generation import build_engine, greedy, prompts, reference, seeded
from tests.inference.hugging_face import build, save

from graphstep.inference.engine import DynamicEngine
from graphstep.inference.load import load_model
from graphstep.inference.requests import Request, SamplingParams
from graphstep.models import GPTModel

Twins = Callable[[str, torch.device], tuple[GPTModel, Callable[[tuple[int, ...], SamplingParams], list[int]]]]
KINDS = ("llama", "qwen3", "mixtral")


class _Whole:
    """A model of transformers, called as the reference is."""

    def __init__(self, theirs: Any, model: GPTModel) -> None:
        self.theirs = theirs
        self.embedding = model.embedding

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.theirs(tokens, use_cache=False).logits
        return logits


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """A loaded model, and the tokens that its original gives."""

    @cache
    def of(kind: str, device: torch.device) -> Any:
        theirs = build(kind).to(device)
        folder = save(theirs, tmp_path_factory.mktemp("model"))
        model = load_model(Path(folder), device=device).model
        gc.collect()
        gc.freeze()  # every capture collects garbage first: not all that transformers keeps
        whole: Any = _Whole(theirs, model)
        return model, cache(lambda prompt, sampling: reference(whole, prompt, sampling))

    return of


def settings(how: str, *numbers: int) -> list[SamplingParams]:
    return [greedy(n) if how == "greedy" else seeded(n, seed=200 + i) for i, n in enumerate(numbers)]


def join_and_leave(engine: DynamicEngine, how: str) -> list[Request]:
    requests = [engine.add_request(p, s) for p, s in zip(prompts(3, 7), settings(how, 9, 4), strict=True)]
    for _ in range(3):
        engine.step()
    late = zip(prompts(1, 5, 8, seed=4), settings(how, 3, 6, 1), strict=True)
    requests += [engine.add_request(p, s) for p, s in late]
    while engine.has_work:
        engine.step()
    return requests


def give_way(engine: DynamicEngine, how: str) -> list[Request]:
    before = engine.counts.preemptions
    requests = engine.generate(prompts(4, 6, 7), settings(how, 16, 14, 12))
    assert engine.counts.preemptions > before
    return requests


def come_in_chunks(engine: DynamicEngine, how: str) -> list[Request]:
    return engine.generate(prompts(17, 2, 20, 5), settings(how, 4, 8, 3, 5))


def share_prefixes(engine: DynamicEngine, how: str) -> list[Request]:
    before = engine.counts.cached_tokens
    (shared,) = prompts(9)
    each = [shared + tail for tail in prompts(1, 4, 6, seed=5)]
    requests = engine.generate(each[:1], settings(how, 4)) + engine.generate(each, settings(how, 5, 4, 6))
    assert engine.counts.cached_tokens >= before + 3 * 8
    return requests


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("traffic", "sizes"),
    [
        (join_and_leave, {}),
        (give_way, {"num_blocks": 9, "prefix_caching": False}),
        (come_in_chunks, {"max_tokens": 6, "options": {"enable_chunked_prefill": True}}),
        (share_prefixes, {"max_tokens": 32}),
    ],
)
def test_tokens_are_those_of_transformers(
    traffic: Callable[[DynamicEngine, str], list[Request]],
    sizes: dict[str, Any],
    kind: str,
    scope: str,
    twins: Twins,
    device: torch.device,
) -> None:
    model, tokens_of = twins(kind, device)
    with build_engine(model, scope, max_sequence_length=32, **sizes) as engine:
        for how in ("greedy", "seeded"):
            for request in traffic(engine, how):
                prompt = tuple(request.tokens[: request.num_prompt_tokens])
                assert request.output_tokens == tokens_of(prompt, request.sampling), f"{how}, request {request.number}"
        assert engine.blocks.num_available == engine.blocks.capacity
        stats = engine.runner.step_stats
        assert (stats.num_replays > 0) is (scope != "none")
        assert not stats.eager_calls or scope == "none"
