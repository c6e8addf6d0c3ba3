"""The text that Prometheus reads."""

from __future__ import annotations

import re

from tests.inference.generation import build_engine, build_model, greedy, prompts
from tests.server.serving import NAME, RunningServer

from graphstep.server.metrics import Histogram, Metrics
from graphstep.server.model import EngineNumbers

LINE = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? -?[0-9.e+-]+')


def test_buckets_count_those_below_them() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.add(value)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="1.0"} 2',
        'x_bucket{le="2.0"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 10.0",
        "x_count 4",
    ]


def test_every_line_can_be_read_and_every_metric_has_a_type(server: RunningServer) -> None:
    server.complete(n=2)
    status, text = server.ask("GET", "/metrics")
    assert status == 200
    typed = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("#"):
            assert LINE.fullmatch(line), line
            name = re.sub(r"_(bucket|sum|count)$", "", re.split("[ {]", line)[0])
            assert name in typed
    assert text.endswith("\n")


def test_numbers_are_those_of_the_requests(server: RunningServer) -> None:
    names = ("generated_tokens_total", "prompt_tokens_total", "sequences_total", "request_seconds_count", "steps_total")
    before = {name: server.metric(name) for name in names}
    status, answer = server.complete("a prompt", n=2, max_tokens=6, ignore_eos=True)
    assert status == 200
    grown = {name: server.metric(name) - before[name] for name in names}
    assert grown["generated_tokens_total"] == answer["usage"]["completion_tokens"] == 12
    assert grown["prompt_tokens_total"] == 16
    assert grown["sequences_total"] == 2
    assert grown["request_seconds_count"] == 1
    assert grown["steps_total"] >= 6
    assert server.metric("cache_blocks_held") == 0


def test_steps_that_were_taken_back_are_not_counted() -> None:
    with build_engine(build_model("llama"), "block") as engine:
        engine.generate(prompts(3, 5), [greedy(3), greedy(6)])
        numbers = EngineNumbers.of(engine)
        assert numbers.num_steps < engine.counts.steps  # a shape that has to be captured waits for the step before it
        assert numbers.num_steps == numbers.num_graph_steps


def test_answers_are_counted_by_path_and_status(server: RunningServer) -> None:
    def counts() -> dict[str, int]:
        lines = server.ask("GET", "/metrics")[1].splitlines()
        found = (re.fullmatch(r"graphstep_http_requests_total\{(.*)\} (\d+)", line) for line in lines)
        return {each[1]: int(each[2]) for each in found if each is not None}

    before = counts()
    server.ask("GET", "/v1/models")
    server.ask("GET", f"/v1/models/{NAME}")
    server.ask("GET", "/v1/models/nothing")
    server.ask("GET", "/health")
    server.ask("DELETE", "/health")
    for number in range(3):
        server.ask("GET", f"/random/{number}")
    server.ask("POST", "/v1/completions", b"{")
    server.ask("POST", "/v1/chat/completions", b"{}", Content_Type="text/plain")
    server.complete(n=2)
    server.ask("GET", "/v1/completions")
    after = counts()
    assert {key: number - before.get(key, 0) for key, number in after.items() if number != before.get(key, 0)} == {
        'path="/v1/models",status="200"': 2,
        'path="/v1/models",status="404"': 1,
        'path="/health",status="200"': 1,
        'path="/health",status="405"': 1,
        'path="/metrics",status="200"': 1,
        'path="other",status="404"': 3,
        'path="/v1/completions",status="400"': 1,
        'path="/v1/completions",status="405"': 1,
        'path="/v1/completions",status="200"': 1,
        'path="/v1/chat/completions",status="415"': 1,
    }


def test_without_an_engine_its_numbers_are_missing() -> None:
    text = Metrics().render(None, is_healthy=False)
    assert "graphstep_healthy 0" in text
    assert "cache_blocks" not in text
