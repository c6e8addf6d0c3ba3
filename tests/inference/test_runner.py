"""Graphs of the engine: which there are, what they share, what padding cannot do, and what stops them."""

from __future__ import annotations

import logging
from array import array

import pytest
import torch
from tests.inference.generation import build_engine, build_model, greedy, prompts, reference, seeded

from graphstep.errors import CaptureError, StaleAddressError
from graphstep.inference import draws
from graphstep.inference.blocks import RESERVED_BLOCK
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.requests import DrawNeeds, Request, SamplingParams
from graphstep.inference.sampling import Drawn, DrawSettings
from graphstep.models import GPTModel

KINDS = ("llama", "moe", "moe one by one", "hybrid")


def poison(model: GPTModel, engine: DynamicEngine) -> None:
    """Make all that padding reads and writes not a number: its token, its block, its states."""
    with torch.no_grad():
        model.embedding.weight[0] = torch.nan
    engine.cache.pages[:, :, RESERVED_BLOCK] = torch.nan
    for states in engine.cache.states:
        for state in states:
            state[0] = torch.nan


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [False, True], ids=["", "rounded up"])
def test_padding_reaches_no_real_row(kind: str, scope: str, rounds: bool, device: torch.device) -> None:
    model = build_model(kind, device)
    sampling = [greedy(6), seeded(8, seed=5), greedy(3)]
    each = prompts(3, 9, 5, seed=10)
    wanted = [reference(model, p, s) for p, s in zip(each, sampling, strict=True)]
    assert all(0 not in tokens for tokens in wanted), "choose prompts that do not lead to the token of padding"
    options = {"batch_invariant_mode": rounds}
    with build_engine(model, scope, max_tokens=64 if rounds else 20, options=options) as engine:
        poison(model, engine)
        requests = engine.generate(each, sampling)
        assert [request.output_tokens for request in requests] == wanted
        assert engine.runner.step_stats.num_replays > 0 or scope == "none"


def test_poison_would_be_seen() -> None:
    """The tokens above are not right because nobody looks at what is not a number."""
    model = build_model("llama")
    with build_engine(model) as engine:
        engine.generate(prompts(5), greedy(1))
        engine.cache.pages.fill_(torch.nan)
        poison(model, engine)
        (request,) = engine.generate([[0, 1, 2]], greedy(4))
        assert request.output_tokens == []


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_all_shapes_are_captured_at_the_start_largest_first(scope: str, device: torch.device) -> None:
    model = build_model("llama", device)
    with build_engine(model, scope, captures_at_start=True) as engine:
        buckets = [graphs.bucket for graphs in engine.runner.graphs]
        assert buckets == sorted(engine.runner.ladder.buckets, reverse=True)
        assert len(buckets) > 5
        num = engine.report().num_recordings
        # Beside the forward, which takes the most likely tokens: drawing at random, from all and from a part.
        assert num == len(buckets) * (2 + (1 if scope == "block" else 2 + len(model.layers)))
        engine.generate(prompts(3, 4, 5), [greedy(4), seeded(5, seed=1), greedy(3, logprobs=1)])
        assert engine.report().num_recordings == num, "nothing is captured after the start"
        assert not engine.runner.step_stats.eager_calls


def test_a_hybrid_has_graphs_for_decode_steps_alone() -> None:
    with build_engine(build_model("hybrid"), "block", captures_at_start=True) as engine:
        assert engine.runner.graphs
        assert all(graphs.bucket.is_decode_only for graphs in engine.runner.graphs)
        assert engine.coverage() == [
            "decode steps of 1 to 4 requests have graphs",
            "steps with prefill have no graphs: they change recurrent states by their lengths",
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["layer", "block"])
def test_later_graphs_find_their_memory_in_the_pool_of_the_first(scope: str) -> None:
    model = build_model("llama", "cuda")
    with build_engine(model, scope, captures_at_start=True) as engine:
        first, *others = engine.runner.graphs
        assert sum(graphs.pool_bytes for graphs in others) <= first.pool_bytes


def test_graphs_are_made_when_they_are_first_needed(device: torch.device) -> None:
    with build_engine(build_model("llama", device), "block") as engine:
        assert not engine.runner.graphs
        engine.generate(prompts(3), greedy(3))
        assert 0 < len(engine.runner.graphs) < len(engine.runner.ladder.buckets)


def test_engines_do_not_notice_each_other(device: torch.device) -> None:
    models = [build_model("llama", device), build_model("moe", device)]
    each = prompts(4, 6)
    with build_engine(models[0], "block") as one, build_engine(models[1], "layer") as other:
        requests = [(engine, engine.add_request(p, greedy(5))) for engine in (one, other) for p in each]
        while one.has_work or other.has_work:
            one.step()
            other.step()
        for engine, request in requests:
            assert request.output_tokens == reference(engine.model, prompt_of(request), request.sampling)


def test_a_weight_that_moved_is_named_and_no_request_is_lost(device: torch.device) -> None:
    model = build_model("llama", device)
    with build_engine(model, "block") as engine:
        request = engine.add_request(prompts(4)[0], greedy(6))
        engine.step()
        weight = model.layers[1].attention.out.weight
        old = weight.data
        weight.data = old.clone()
        with pytest.raises(StaleAddressError, match=r"layers\.1\.attention\.out\.weight"):
            engine.step()
        weight.data = old
        while engine.has_work:
            engine.step()
        assert request.output_tokens == reference(model, prompt_of(request), request.sampling)


class _Reads(torch.nn.Module):
    """A norm that waits for the device."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result * (1.0 if float(result.sum()) > -1e9 else 2.0)


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_what_cannot_be_captured_is_an_error_or_runs_eagerly(
    scope: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model("llama", device)
    model.layers[1].mlp_norm = _Reads(model.layers[1].mlp_norm)
    with build_engine(model, scope) as engine:
        engine.add_request(prompts(4)[0], greedy(3))
        with pytest.raises(CaptureError, match=r"float|item|read|captur"):
            engine.step()
        assert engine.report().num_recordings == 0
    with build_engine(model, scope, is_required=False) as engine, caplog.at_level(logging.WARNING):
        (request,) = engine.generate(prompts(4), greedy(3))
        assert request.output_tokens == reference(model, prompt_of(request), request.sampling)
        stats = engine.runner.step_stats
        assert stats.eager_calls == {"its graph could not be captured": 3}
        assert len(caplog.records) == 2, "once a bucket"
        assert engine.report().num_recordings == 0


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_drawing_that_cannot_be_captured_runs_eagerly(
    scope: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = draws.sample

    def reads(logits: torch.Tensor, settings: DrawSettings, needs: DrawNeeds) -> Drawn:
        return plain(logits if not needs.is_filtered or float(logits.sum()) < 1e9 else logits * 2, settings, needs)

    monkeypatch.setattr(draws, "sample", reads)
    model = build_model("llama", device)
    with build_engine(model, scope) as engine, caplog.at_level(logging.WARNING):
        each = [greedy(5), seeded(6, 1), SamplingParams(max_new_tokens=4, seed=5)]
        requests = engine.generate(prompts(3, 4, 5), each)
        requests += engine.generate(prompts(6, 2, seed=4), each[1:])
        for request in requests:
            assert request.output_tokens == reference(model, prompt_of(request), request.sampling)
        assert [record.levelname for record in caplog.records] == ["WARNING"], "once"
        assert not engine.runner.step_stats.eager_calls
        assert all(len(graphs.draws) == 1 for graphs in engine.runner.graphs)


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_steps_without_a_graph_are_counted_with_the_reason(scope: str) -> None:
    options = {"decode_only_cuda_graphs": True}
    with build_engine(build_model("llama"), scope, options=options) as engine:
        engine.generate(prompts(4), greedy(5))
        stats = engine.runner.step_stats
        assert stats.eager_calls == {"only decode steps have graphs": 1}
        assert stats.num_replays == 4


def prompt_of(request: Request) -> list[int]:
    tokens: array[int] = request.tokens[: request.num_prompt_tokens]
    return tokens.tolist()
