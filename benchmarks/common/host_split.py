"""Where the host's time goes in one step of the layers: first call, later calls, launches, and autograd around them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from common.case import Case
from common.clocks import synchronize
from common.host_arms import HostArm, Layers
from graphstep.engine import compiled_part

_NUM_STEPS, _NUM_FIRST = 60, 10


def measure_split(arm: HostArm, case: Case) -> dict[str, float]:
    """Build the arm once more and run some steps with clocks inside, which cost some time themselves.

    Returns:
        Medians over the steps, in microseconds: ``first_layer``, ``later_layers`` (one of them), ``launch`` (one),
        ``before_first_backward_launch``, ``backward_launches`` (all, from the first to the last), ``after_last_launch``
        and ``tiny_backward``, that of one linear layer without graphs. Launches are known on a GPU only.
    """
    launches: list[tuple[int, int]] = []
    steps: list[list[int]] = []
    backwards: list[tuple[float, float, float]] = []
    with ExitStack() as patches:
        patches.enter_context(patch.object(compiled_part, "graph_launcher", _timed(launches)))
        patches.enter_context(patch.object(Layers, "forward", _stamped(steps)))
        patches.enter_context(patch.object(torch.autograd, "backward", _around(launches, backwards)))
        with _built(arm, case):
            for _ in range(_NUM_FIRST):
                arm.step()
            launches.clear()
            steps.clear()
            backwards.clear()
            for _ in range(_NUM_STEPS):
                arm.step()
    layers = [[(b - a) / 1e3 for a, b in itertools.pairwise(step)] for step in steps]
    found = {
        "first_layer": statistics.median(step[0] for step in layers),
        "later_layers": statistics.median(statistics.mean(step[1:]) for step in layers),
    }
    if launches:
        found["launch"] = statistics.median((end - begin) / 1e3 for begin, end in launches)
    if backwards:
        names = ("before_first_backward_launch", "backward_launches", "after_last_launch")
        found |= dict(zip(names, map(statistics.median, zip(*backwards, strict=True)), strict=True))
    return {**found, "tiny_backward": _tiny_backward(case.device)}


@contextmanager
def _built(arm: HostArm, case: Case) -> Iterator[None]:
    try:
        arm.build(case)
        yield
    finally:
        arm.close()


def _timed(launches: list[tuple[int, int]]) -> Callable[[Any], Callable[[], None]]:
    real = compiled_part.graph_launcher

    def launcher(graph: Any) -> Callable[[], None]:
        launch = real(graph)

        def timed() -> None:
            begin = time.perf_counter_ns()
            launch()
            launches.append((begin, time.perf_counter_ns()))

        return timed

    return launcher


def _stamped(steps: list[list[int]]) -> Callable[..., Tensor]:
    def forward(self: Layers, hidden_BSH: Tensor, *context: Tensor) -> Tensor:
        stamps = [time.perf_counter_ns()]
        for layer in self.layers:
            hidden_BSH = layer(hidden_BSH, *context)
            stamps.append(time.perf_counter_ns())
        steps.append(stamps)
        return hidden_BSH

    return forward


def _around(launches: list[tuple[int, int]], backwards: list[tuple[float, float, float]]) -> Callable[..., None]:
    real = torch.autograd.backward

    def backward(*args: Any, **named: Any) -> None:
        number, begin = len(launches), time.perf_counter_ns()
        real(*args, **named)
        end = time.perf_counter_ns()
        own = launches[number:]
        if own:
            backwards.append(((own[0][0] - begin) / 1e3, (own[-1][1] - own[0][0]) / 1e3, (end - own[-1][1]) / 1e3))

    return backward


def _tiny_backward(device: torch.device) -> float:
    layer, x = torch.nn.Linear(4, 4, device=device), torch.randn(2, 4, device=device)
    times = []
    for _ in range(_NUM_STEPS):
        y = layer(x).sum()
        synchronize(device)
        begin = time.perf_counter_ns()
        y.backward()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)
