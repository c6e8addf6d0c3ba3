"""Counts of a server, in the text form of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from graphstep.server.model import EngineNumbers

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """How often values fell between bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Write it; each bucket counts the ones below it too."""
        total = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class Metrics:
    """What has happened since the start. Belongs to the event loop."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._ends: Counter[str] = Counter()
        self._num_tokens = 0
        self._request_seconds = Histogram(_SECONDS)
        self._first_token_seconds = Histogram(_SECONDS)
        self._token_seconds = Histogram(_TOKEN_SECONDS)
        self.num_open = 0
        """Requests that are being answered."""

    def count_answer(self, path: str, status: int, seconds: float) -> None:
        """Note that a request was answered; 499: its client had left."""
        self._answers[path, status] += 1
        self._request_seconds.add(seconds)

    def count_status(self, path: str, status: int) -> None:
        """Note an answer that is no generation, whose time says nothing."""
        self._answers[path, status] += 1

    def count_first_token(self, seconds: float) -> None:
        """Note how long a sequence waited for its first token."""
        self._first_token_seconds.add(seconds)
        self._num_tokens += 1

    def count_token(self, seconds: float) -> None:
        """Note how long a sequence waited for a later token."""
        self._token_seconds.add(seconds)
        self._num_tokens += 1

    def count_end(self, reason: str) -> None:
        """Note that a sequence has ended."""
        self._ends[reason] += 1

    def render(self, numbers: EngineNumbers | None, *, is_healthy: bool) -> str:
        """Return the text.

        Args:
            numbers: of the engine; left out if None.
            is_healthy: can the engine serve?
        """
        return (
            "\n".join([*self._lines(), *_gauge("healthy", "Can the engine serve?", int(is_healthy)), *_of(numbers)])
            + "\n"
        )

    def _lines(self) -> Iterator[str]:
        name = "graphstep_http_requests_total"
        yield from _head(name, "counter", "Requests by path and status; 499: the client had left.")
        for (path, status), count in sorted(self._answers.items()):
            yield f'{name}{{path="{path}",status="{status}"}} {count}'
        name = "graphstep_sequences_total"
        yield from _head(name, "counter", "Sequences that have ended, by reason.")
        for reason, count in sorted(self._ends.items()):
            yield f'{name}{{reason="{reason}"}} {count}'
        yield from _counter("generated_tokens_total", "Tokens generated for clients.", self._num_tokens)
        yield from _gauge("http_requests_open", "Requests that are being answered.", self.num_open)
        for name, text, histogram in (
            (
                "graphstep_request_seconds",
                "From the head of a request to the end of its answer.",
                self._request_seconds,
            ),
            ("graphstep_first_token_seconds", "From a sequence's start to its first token.", self._first_token_seconds),
            ("graphstep_token_seconds", "Between the tokens of a sequence.", self._token_seconds),
        ):
            yield from _head(name, "histogram", text)
            yield from histogram.lines(name)


def _of(numbers: EngineNumbers | None) -> Iterator[str]:
    if numbers is None:
        return
    yield from _gauge("sequences_running", "Sequences that hold blocks of the cache.", numbers.num_running)
    yield from _gauge("sequences_waiting", "Sequences that wait for blocks or room.", numbers.num_waiting)
    yield from _gauge("cache_blocks", "Blocks of the cache.", numbers.num_blocks)
    yield from _gauge("cache_blocks_held", "Blocks that sequences hold.", numbers.num_blocks_held)
    yield from _counter("steps_total", "Steps of the engine.", numbers.num_steps)
    yield from _counter("graph_steps_total", "Steps that ran as graphs.", numbers.num_graph_steps)
    yield from _counter("preemptions_total", "Sequences that had to give up their blocks.", numbers.num_preemptions)
    yield from _counter("prompt_tokens_total", "Tokens of prompts.", numbers.num_prompt_tokens)
    yield from _counter("cached_tokens_total", "Tokens of prompts found in the cache.", numbers.num_cached_tokens)


def _counter(name: str, text: str, value: int) -> Iterator[str]:
    yield from _head(f"graphstep_{name}", "counter", text)
    yield f"graphstep_{name} {value}"


def _gauge(name: str, text: str, value: int) -> Iterator[str]:
    yield from _head(f"graphstep_{name}", "gauge", text)
    yield f"graphstep_{name} {value}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
