"""Steps that are launched before the tokens of the one before are read, against steps that wait for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.inference.generation import build_engine, build_model, greedy, prompts, reference, seeded

from graphstep.capture.session import GraphSession
from graphstep.engine import tape
from graphstep.inference.draws import DrawReader, PendingDraws
from graphstep.inference.engine import CacheMode, DynamicEngine
from graphstep.inference.host_buffer import HostBuffer
from graphstep.inference.requests import FinishReason, Output, SamplingParams
from graphstep.models import GPTModel

SCOPES = ("none", "layer", "block")
FEW_GRAPHS: dict[str, Any] = {"captures_at_start": True, "max_requests": 2, "max_tokens": 5}


def plain(outputs: list[Output]) -> list[tuple[Any, ...]]:
    return [(o.request.number, o.token, [token for token, _ in o.top_logprobs], o.finish_reason) for o in outputs]


def logprobs(outputs: list[Output]) -> list[float]:
    return [x for o in outputs if o.logprob is not None for x in (o.logprob, *(value for _, value in o.top_logprobs))]


def finish(engine: DynamicEngine) -> list[Output]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def stops(model: GPTModel, prompt: list[int], sampling: SamplingParams, place: int) -> tuple[int, ...]:
    """A token that ends the request early."""
    return (reference(model, prompt, sampling)[place],)


@pytest.mark.parametrize(
    ("kind", "scope"), [("llama", "none"), ("llama", "layer"), ("llama", "block"), ("hybrid", "block")]
)
def test_every_step_gives_the_same(kind: str, scope: str, device: torch.device) -> None:
    """Tokens, log-probabilities and ends, in the same calls."""
    model = build_model(kind, device)
    each = prompts(3, 7, 5, 2)
    settings = [
        greedy(9, stop_tokens=stops(model, each[0], greedy(9), 4)),
        seeded(8, 1, logprobs=2),
        SamplingParams(max_new_tokens=7, temperature=0.7, seed=2, logprobs=0),
        seeded(9, 3, stop_tokens=stops(model, each[3], seeded(9, 3), 2)),
    ]
    with (
        build_engine(model, scope, async_scheduling=True) as ahead,
        build_engine(model, scope, async_scheduling=False) as waiting,
    ):
        for engine in (ahead, waiting):
            for prompt, sampling in zip(each, settings, strict=True):
                engine.add_request(prompt, sampling)
        reasons: Counter[FinishReason | None] = Counter()
        while waiting.has_work:
            found, outputs = ahead.step(), waiting.step()
            assert plain(found) == plain(outputs)
            # A request that has ended is part of one more step, and sums may be rounded by the size of the batch.
            assert logprobs(found) == pytest.approx(logprobs(outputs), abs=1e-4)
            reasons.update(output.finish_reason for output in outputs)
        assert reasons[FinishReason.STOP] == 2
        assert not ahead.has_work
        assert ahead.blocks.num_available == ahead.blocks.capacity


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does, in order."""
    found: list[str] = []

    def noted(owner: type, name: str, event: str) -> None:
        method = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            found.append(event)
            return method(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    noted(HostBuffer, "copy_to", "copy in")
    noted(tape.TapeRecording, "replay", "graph")
    noted(DrawReader, "start", "copy out")
    noted(PendingDraws, "read", "read")
    noted(GraphSession, "capture", "capture")
    return found


class TestLaunches:
    def test_the_next_step_is_launched_before_tokens_are_read(self, events: list[str]) -> None:
        with build_engine(build_model("llama"), "block", **FEW_GRAPHS) as engine:
            engine.add_request(*prompts(3), greedy(4))
            events.clear()
            finish(engine)
        step = ["copy in", "graph", "copy out"]
        assert events == [*step, *step, "read", *step, "read", *step, "read", "read"]

    @pytest.mark.parametrize(
        ("sampling", "num_graphs"), [(greedy(9), 1), (seeded(9, 1), 2), (SamplingParams(max_new_tokens=9, seed=1), 2)]
    )
    def test_a_step_is_a_copy_a_graph_and_a_copy_back(
        self, sampling: SamplingParams, num_graphs: int, events: list[str]
    ) -> None:
        """One more graph where tokens are drawn at random."""
        with build_engine(build_model("llama"), "block", **FEW_GRAPHS) as engine:
            for prompt in prompts(3, 2):
                engine.add_request(prompt, sampling)
            engine.step()
            events.clear()
            engine.step()
            assert Counter(events) == {"copy in": 1, "graph": num_graphs, "copy out": 1, "read": 1}
            finish(engine)

    def test_in_layer_scope_drawing_is_a_part_of_the_last_graph(self, events: list[str]) -> None:
        model = build_model("llama")
        with build_engine(model, "layer", **FEW_GRAPHS) as engine:
            engine.add_request(*prompts(3), greedy(9))
            engine.step()
            events.clear()
            engine.step()
            assert events.count("graph") == len(model.layers) + 2
            finish(engine)

    def test_nothing_is_captured_while_tokens_are_drawn(self, events: list[str]) -> None:
        """A capture computes steps of its own, and would leave their tokens for the next one."""
        model = build_model("llama")
        with build_engine(model, "block", max_requests=4) as engine:
            requests = [engine.add_request(prompt, greedy(6)) for prompt in prompts(3, 5)]
            engine.step()
            requests += [engine.add_request(prompt, greedy(6)) for prompt in prompts(4, 2, seed=8)]
            finish(engine)
        in_flight = 0
        for event in events:
            in_flight += {"copy out": 1, "read": -1}.get(event, 0)
            assert event != "capture" or in_flight == 0
        assert events.count("capture") > 3
        for request in requests:
            prompt = request.tokens[: request.num_prompt_tokens].tolist()
            assert request.output_tokens == reference(model, prompt, request.sampling)


class TestWhatWasLaunchedTooMuch:
    def test_is_forgotten_with_the_last_request(self) -> None:
        model = build_model("llama")
        (prompt,) = prompts(5)
        stop = stops(model, prompt, greedy(12), 3)
        with build_engine(model, "block") as engine:
            engine.generate([prompt], greedy(12))  # captures
            before = engine.counts.steps
            (request,) = engine.generate([prompt], greedy(12, stop_tokens=stop))
            assert engine.counts.steps == before + len(request.output_tokens) + 1
            assert not engine._launched
            assert not engine.has_work
            assert engine.blocks.num_available == engine.blocks.capacity
            (again,) = engine.generate([prompt], greedy(12))
            assert again.output_tokens == reference(model, prompt, greedy(12))

    def test_is_forgotten_when_the_last_request_is_cancelled(self) -> None:
        with build_engine(build_model("llama")) as engine:
            request = engine.add_request(*prompts(5), greedy(9))
            engine.step()
            assert engine._launched
            engine.cancel(request)
            assert not engine._launched
            assert not engine.has_work
            assert len(request.output_tokens) == 1

    def test_does_not_reach_a_request_that_gets_its_blocks(self, device: torch.device) -> None:
        model = build_model("hybrid", device)
        with build_engine(model, "block", max_requests=2, num_blocks=8) as engine:
            first = engine.add_request(*prompts(4), greedy(20))
            other = engine.add_request(*prompts(6, seed=9), greedy(12))
            for _ in range(4):
                engine.step()
            engine.cancel(first)
            joined = engine.add_request(*prompts(5, seed=11), seeded(12, 4))
            finish(engine)
            for request in (other, joined):
                prompt = request.tokens[: request.num_prompt_tokens].tolist()
                assert request.output_tokens == reference(model, prompt, request.sampling)

    @pytest.mark.parametrize("mode", CacheMode)
    def test_is_returned_after_a_suspension(self, mode: CacheMode) -> None:
        model = build_model("llama")
        with build_engine(model, "block") as engine:
            engine.generate(prompts(4), greedy(3))
            stream = engine.stream(*prompts(3), greedy(6))
            request = engine.add_request(*prompts(5), greedy(6))
            outputs = engine.step() + engine.step()
            assert engine._launched
            engine.suspend(mode)
            assert not engine._launched
            engine.resume()
            outputs += finish(engine)
            for each in (request, stream.request):
                tokens = [output.token for output in outputs if output.request is each]
                assert tokens == each.output_tokens
                prompt = each.tokens[: each.num_prompt_tokens].tolist()
                assert each.output_tokens == reference(model, prompt, each.sampling)
            assert [output.token for output in stream] == stream.request.output_tokens

    @pytest.mark.parametrize("keeps_running", [False, True])
    @pytest.mark.parametrize("kind", ["llama", "hybrid"])
    def test_is_not_kept_when_weights_change(self, kind: str, keeps_running: bool) -> None:
        model = build_model(kind)
        other = build_model(kind, init_method_std=0.5).state_dict()
        with build_engine(model, "block") as engine:
            request = engine.add_request(*prompts(5), greedy(6))
            for _ in range(3):
                engine.step()
            assert engine._launched
            engine.update_weights(other, keeps_running=keeps_running)
            assert not engine._launched
            known = request.tokens.tolist()
            assert len(known) == 5 + 3 + (keeps_running and kind == "hybrid")
            outputs = finish(engine)
            assert len(outputs) == 3
            if not keeps_running:
                rest = greedy(5 + 6 - len(known))
                assert request.tokens.tolist()[len(known) :] == reference(model, known, rest)


def test_an_error_keeps_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    with build_engine(model) as engine:
        request = engine.add_request(*prompts(4), greedy(6))
        outputs = engine.step()
        with monkeypatch.context() as patched:
            patched.setattr("graphstep.inference.draws.sample", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
            outputs += engine.step()
            assert len(outputs) == 2
            with pytest.raises(ZeroDivisionError):
                engine.step()
        outputs += finish(engine)
        assert [output.token for output in outputs] == reference(model, [*request.tokens[:4]], greedy(6))


@pytest.mark.parametrize("scope", ["none", "block"])
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_a_step_that_fails_once_it_has_drawn_feeds_nobody(
    kind: str, scope: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Its tokens lie where the next step looks for those of the step before it."""
    model = build_model(kind, device)
    with build_engine(model, scope) as engine:
        requests = [engine.add_request(prompt, greedy(8)) for prompt in prompts(4, 3)]
        outputs = engine.step() + engine.step()
        with monkeypatch.context() as patched:
            patched.setattr(engine._reader, "start", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        outputs += finish(engine)
        for request in requests:
            prompt = request.tokens[: request.num_prompt_tokens].tolist()
            assert request.output_tokens == reference(model, prompt, request.sampling)
            assert [output.token for output in outputs if output.request is request] == request.output_tokens


def test_tokens_are_found_after_an_error_although_rows_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    with build_engine(model) as engine:
        first, second, third = (engine.add_request(prompt, greedy(8)) for prompt in prompts(4, 3, 5))
        engine.step()
        engine.cancel(first)
        with monkeypatch.context() as patched:
            patched.setattr("graphstep.inference.draws.sample", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        finish(engine)
        for request in (second, third):
            prompt = request.tokens[: request.num_prompt_tokens].tolist()
            assert request.output_tokens == reference(model, prompt, request.sampling)


def test_an_error_of_the_device_takes_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it can be told on the CPU: reading fails, once."""
    for kind in ("llama", "hybrid"):
        model = build_model(kind)
        with build_engine(model) as engine:
            request = engine.add_request(*prompts(4), greedy(6))
            outputs = engine.step()
            with monkeypatch.context() as patched:
                patched.setattr("graphstep.inference.draws.unpack", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.step()
            assert not engine._launched
            outputs += finish(engine)
            assert [output.token for output in outputs] == reference(model, [*request.tokens[:4]], greedy(6))


def test_engines_may_be_told_to_wait(events: list[str]) -> None:
    with build_engine(build_model("llama"), "block", async_scheduling=False, **FEW_GRAPHS) as engine:
        engine.add_request(*prompts(3), greedy(3))
        events.clear()
        finish(engine)
    assert events == ["copy in", "graph", "copy out", "read"] * 3
