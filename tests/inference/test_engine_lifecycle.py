"""Engines that are interrupted: cancelled requests, streams, suspension, new weights, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.inference.generation import build_engine, build_model, greedy, prompts, reference, seeded

from graphstep.errors import InputMismatchError, LifecycleError, RequestError
from graphstep.inference.draws import PendingDraws
from graphstep.inference.engine import CacheMode, DynamicEngine, EngineState
from graphstep.inference.requests import FinishReason, Request, SamplingParams
from graphstep.models import GPTModel

SCOPES = ("none", "layer", "block")


def finish(engine: DynamicEngine) -> None:
    while engine.has_work:
        engine.step()


def is_right(model: GPTModel, request: Request) -> bool:
    prompt = request.tokens[: request.num_prompt_tokens].tolist()
    return request.output_tokens == reference(model, prompt, request.sampling)


def started(engine: DynamicEngine, num_steps: int = 3) -> list[Request]:
    requests = [engine.add_request(p, s) for p, s in zip(prompts(4, 9), [greedy(8), seeded(9, seed=1)], strict=True)]
    for _ in range(num_steps):
        engine.step()
    return requests


class TestRequests:
    def test_cancelled_ones_leave_at_once(self) -> None:
        with build_engine(build_model("llama")) as engine:
            first, second = started(engine)
            engine.cancel(first)
            assert first.finish_reason is FinishReason.CANCELLED
            finish(engine)
            assert is_right(engine.model, second)
            assert engine.blocks.num_available == engine.blocks.capacity
            engine.cancel(first)

    def test_one_that_does_not_fit_takes_the_others_of_its_call_with_it(self) -> None:
        with build_engine(build_model("llama")) as engine:
            with pytest.raises(RequestError, match="prompt has no tokens"):
                engine.generate([[1, 2], []], greedy(3))
            assert not engine.has_work

    def test_of_another_engine_are_not_cancelled(self) -> None:
        with build_engine(build_model("llama")) as one, build_engine(build_model("llama")) as other:
            running, waiting = *started(one)[:1], one.add_request([1], greedy(2))
            for request in (running, waiting):
                with pytest.raises(LifecycleError, match="belongs to another engine"):
                    other.cancel(request)
            finish(one)
            assert running.finish_reason is FinishReason.LENGTH

    def test_settings_are_one_or_as_many_as_prompts(self) -> None:
        with build_engine(build_model("llama")) as engine, pytest.raises(InputMismatchError, match="2 prompts and 1"):
            engine.generate([[1], [2]], [greedy(1)])

    def test_tokens_come_with_their_logprobs(self) -> None:
        model = build_model("gpt")
        with build_engine(model, vocabulary=37) as engine:
            (prompt,) = prompts(4)
            outputs = list(engine.stream(prompt, greedy(3, logprobs=2)))
        tokens = prompt + [output.token for output in outputs if output.token is not None]
        with torch.no_grad():
            expected = model(torch.tensor([tokens]))[0, 3:-1, :37].log_softmax(-1)
        for row, output in zip(expected, outputs, strict=True):
            best = row.topk(2)
            assert output.token == int(best.indices[0])
            assert output.logprob == pytest.approx(float(best.values[0]), abs=1e-5)
            assert [token for token, _ in output.top_logprobs] == best.indices.tolist()


class TestStreams:
    def test_yield_every_token(self) -> None:
        model = build_model("llama")
        with build_engine(model) as engine:
            streams = [engine.stream(p, greedy(5)) for p in prompts(3, 6)]
            taken = [[output.token for output in stream] for stream in streams]
            assert taken == [stream.request.output_tokens for stream in streams]
            assert all(is_right(model, stream.request) for stream in streams)

    def test_that_are_left_cancel_their_request(self) -> None:
        with build_engine(build_model("llama")) as engine:
            with engine.stream(*prompts(3), greedy(9)) as stream:
                next(stream)
            assert stream.request.finish_reason is FinishReason.CANCELLED
            assert list(stream) == []
            assert engine.blocks.num_available == engine.blocks.capacity

    def test_end_when_their_request_is_cancelled(self) -> None:
        with build_engine(build_model("llama")) as engine:
            stream = engine.stream(*prompts(3), greedy(9))
            next(stream)
            engine.cancel(stream.request)
            assert [output.finish_reason for output in stream] == [FinishReason.CANCELLED]


@pytest.mark.parametrize("mode", CacheMode)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_requests_go_on_after_a_suspension(kind: str, scope: str, mode: CacheMode, device: torch.device) -> None:
    model = build_model(kind, device)
    with build_engine(model, scope) as engine:
        requests = started(engine)
        num_graphs, nbytes = len(engine.runner.graphs), engine.cache.nbytes
        engine.suspend(mode)
        assert engine.state is EngineState.SUSPENDED
        is_kept = mode is CacheMode.PERSIST
        assert engine.cache.nbytes == (nbytes if is_kept else 0)
        assert len(engine.runner.graphs) == (num_graphs if is_kept else 0)
        with pytest.raises(LifecycleError, match="resume"):
            engine.step()
        requests.append(engine.add_request(prompts(5)[0], greedy(3)))
        engine.resume()
        finish(engine)
        assert all(is_right(model, request) for request in requests)
        assert requests[0].num_preemptions == (1 if mode is CacheMode.RECOMPUTE else 0)


def test_prefixes_outlive_an_offload() -> None:
    model = build_model("llama")
    (prompt,) = prompts(9)
    with build_engine(model) as engine:
        engine.generate([prompt], greedy(3))
        engine.suspend(CacheMode.OFFLOAD)
        engine.resume()
        (request,) = engine.generate([[*prompt, 7]], greedy(4))
        assert request.num_cached_tokens == 8
        assert is_right(model, request)


def doubled(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: value.detach() * 1.5 for name, value in model.state_dict().items() if name.endswith("out.weight")}


def replaced(engine: DynamicEngine) -> list[str]:
    with engine.weight_update() as update:
        engine.model.load_state_dict(engine.model.state_dict() | doubled(engine.model), assign=True)
    return update.moved


class TestNewWeights:
    @pytest.mark.parametrize("scope", SCOPES)
    @pytest.mark.parametrize("change", [lambda e: e.update_weights(doubled(e.model)).moved, replaced])
    def test_count_from_the_next_token_on(
        self, scope: str, change: Callable[[DynamicEngine], list[str]], device: torch.device
    ) -> None:
        model = build_model("llama", device)
        with build_engine(model, scope) as engine:
            requests = started(engine)
            before = [request.output_tokens for request in requests]
            num_graphs = len(engine.runner.graphs)
            moved = change(engine)
            if change is replaced:
                assert any("layers.0.attention.out.weight" in name for name in moved)
                assert not engine.runner.graphs
            else:
                assert moved == []
                assert len(engine.runner.graphs) == num_graphs
            finish(engine)
            for request, old in zip(requests, before, strict=True):
                whole = request.tokens.tolist()
                length = request.num_prompt_tokens + len(old)
                rest = SamplingParams(
                    max_new_tokens=len(whole) - length,
                    temperature=request.sampling.temperature,
                    top_k=request.sampling.top_k,
                    top_p=request.sampling.top_p,
                    seed=request.sampling.seed,
                )
                assert whole[length:] == reference(model, whole[:length], rest)

    def test_forget_known_prefixes(self) -> None:
        model = build_model("llama")
        (prompt,) = prompts(9)
        with build_engine(model) as engine:
            engine.generate([prompt], greedy(3))
            engine.update_weights(doubled(model), keeps_running=True)
            (request,) = engine.generate([prompt], greedy(3))
            assert request.num_cached_tokens == 0
            assert is_right(model, request)

    def test_let_running_requests_go_on_if_wanted(self) -> None:
        model = build_model("llama")
        with build_engine(model) as engine:
            requests = started(engine)
            update = engine.update_weights(doubled(model), keeps_running=True)
            finish(engine)
            assert update.num_recomputed == 0
            assert [request.num_preemptions for request in requests] == [0, 0]

    def test_let_requests_whose_cache_is_offloaded_go_on_if_wanted(self) -> None:
        with build_engine(build_model("llama")) as engine:
            requests = started(engine)
            engine.suspend(CacheMode.OFFLOAD)
            update = engine.update_weights({}, keeps_running=True)
            engine.resume()
            finish(engine)
            assert update.num_recomputed == 0
            assert [request.num_preemptions for request in requests] == [0, 0]
            assert all(is_right(engine.model, request) for request in requests)

    def test_that_do_not_fit_are_all_named_and_none_is_written(self) -> None:
        model = build_model("llama")
        with build_engine(model) as engine:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            weights: dict[str, Any] = {
                "embedding.weight": torch.ones(40, 32),
                "nothing": torch.ones(1),
                "head.weight": torch.ones(2),
                "head.norm.weight": torch.ones(32, dtype=torch.int64),
                "layers.0.mlp_norm.weight": [1.0] * 32,
            }
            with pytest.raises(InputMismatchError) as caught:
                engine.update_weights(weights)
            for what in (
                "nothing: unknown",
                "head.weight: expected (40, 32), got (2,)",
                "head.norm.weight: expected torch.float32 or another floating type, got torch.int64",
                "layers.0.mlp_norm.weight: expected a tensor, got list",
            ):
                assert what in str(caught.value)
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    @pytest.mark.parametrize("mode", CacheMode)
    @pytest.mark.parametrize("change", [lambda e: e.update_weights(doubled(e.model)).moved, replaced])
    def test_come_while_the_engine_is_suspended(
        self, mode: CacheMode, change: Callable[[DynamicEngine], list[str]], device: torch.device
    ) -> None:
        """As in reinforcement learning: generate, train, generate."""
        model = build_model("llama", device)
        with build_engine(model, "block") as engine:
            engine.generate(prompts(4, 5), greedy(3))
            engine.suspend(mode)
            moved = change(engine)
            assert bool(moved) is (change is replaced)
            engine.resume()
            requests = engine.generate(prompts(4, 5), greedy(5))
            assert all(is_right(model, request) for request in requests)

    def test_that_failed_are_taken_as_new(self) -> None:
        model = build_model("llama")
        with build_engine(model, "block") as engine:
            requests = started(engine)
            with pytest.raises(ZeroDivisionError), engine.weight_update() as update:
                model.layers[0].attention.out.weight.data.mul_(1 / 0)
            assert update.num_recomputed == 2
            finish(engine)
            assert [request.num_preemptions for request in requests] == [1, 1]

    @pytest.mark.parametrize("keeps_running", [False, True])
    def test_count_though_a_step_of_the_update_fails(
        self, keeps_running: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = build_model("llama")
        (prompt,) = prompts(9)

        def update(engine: DynamicEngine) -> None:
            with monkeypatch.context() as patched, engine.weight_update(keeps_running=keeps_running):
                engine.add_request([5], greedy(4))
                engine.step()
                model.load_state_dict(doubled(model), strict=False)
                patched.setattr(PendingDraws, "read", lambda _: 1 / 0)

        with build_engine(model) as engine:
            engine.generate([prompt], greedy(3))
            with pytest.raises(ZeroDivisionError):
                update(engine)
            finish(engine)
            (request,) = engine.generate([prompt], greedy(3))
            assert request.num_cached_tokens == 0
            assert is_right(model, request)


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_step_that_fails_is_repeated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(kind)
    with build_engine(model) as engine:
        requests = started(engine)
        with monkeypatch.context() as patched:
            patched.setattr("graphstep.inference.draws.sample", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        finish(engine)
        assert all(is_right(model, request) for request in requests)


class TestLife:
    def test_a_model_in_training_mode_is_refused(self) -> None:
        with build_engine(build_model("moe")) as engine:
            engine.add_request([1], greedy(1))
            engine.model.train()
            with pytest.raises(LifecycleError, match="training mode"):
                engine.step()
            engine.model.eval()
            finish(engine)

    def test_an_engine_without_graphs_is_made_whatever_the_mode_of_its_model(self) -> None:
        model = build_model("moe").train()
        with build_engine(model, captures_at_start=True) as engine:
            engine.suspend(CacheMode.RECOMPUTE)
            engine.resume()
            model.eval()
            (request,) = engine.generate([[1]], greedy(2))
            assert is_right(model, request)

    def test_graphs_of_a_model_in_training_mode_are_not_captured(self) -> None:
        model = build_model("llama")
        with build_engine(model, "block", captures_at_start=True) as engine:
            requests = started(engine)
            engine.suspend(CacheMode.OFFLOAD)
            model.train()
            with pytest.raises(LifecycleError, match="training mode"):
                engine.resume()
            assert engine.state is EngineState.SUSPENDED
            model.eval()
            engine.resume()
            assert len(engine.runner.graphs) == len(engine.runner.ladder.buckets)
            finish(engine)
            assert all(is_right(model, request) for request in requests)

    def test_closing_frees_everything(self) -> None:
        engine = build_engine(build_model("llama"), "block")
        started(engine)
        engine.close()
        engine.close()
        assert engine.cache.nbytes == 0
        assert engine.report().pool_bytes == 0
        for use in (engine.step, engine.suspend, engine.resume, lambda: engine.add_request([1])):
            with pytest.raises(LifecycleError):
                use()

    @pytest.mark.parametrize("is_suspended", [False, True])
    def test_closing_ends_what_is_not_finished(self, is_suspended: bool) -> None:
        engine = build_engine(build_model("llama"), max_requests=2)
        requests = [*started(engine), engine.add_request([1, 2], greedy(3))]
        stream = engine.stream([5], greedy(3))
        if is_suspended:
            engine.suspend(CacheMode.OFFLOAD)
        engine.close()
        assert {request.finish_reason for request in requests} == {FinishReason.CANCELLED}
        assert [output.finish_reason for output in stream] == [FinishReason.CANCELLED]
        assert engine.blocks.num_available == engine.blocks.capacity
        assert not engine.has_work

    def test_training_goes_on_beside_an_engine(self, device: torch.device) -> None:
        """Generating leaves no gradient, no random number and no buffer behind."""
        model = build_model("moe", device)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = torch.get_rng_state()
        with build_engine(model, "block") as engine:
            started(engine)
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
