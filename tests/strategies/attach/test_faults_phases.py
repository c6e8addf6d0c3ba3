"""Known faults, groups F, G and H: shapes, evaluation and phases of a job, memory."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Loop, schedule, twins
from tests.strategies.attach.plain import (
    HIDDEN,
    LAYERS,
    Block,
    DecoderLayer,
    Stack,
    attached,
    built,
    inputs,
    num_replays,
    reasons,
    train,
)
from tests.strategies.models import Decoder, Layer, Wrapped
from tests.strategies.runs import differences, steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.errors import ConfigError, LifecycleError


class AbsoluteMaximum(Block):
    """Scales by the largest value of the whole batch, as low-precision layers do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.detach().abs().amax())


def test_b68_rows_are_never_padded_behind_the_back(device: torch.device) -> None:
    build = partial(Stack, block=AbsoluteMaximum)
    models = [built(build, device) for _ in range(2)]
    sizes = (4, 4, 4, 1, 4, 2, 1, 1)
    feed = lambda number: inputs(device, number, size=sizes[number])  # noqa: E731
    expected = train(models[0], device, len(sizes), feed=feed)
    with attached(models[1], LAYERS) as manager:
        assert differences(expected, train(models[1], device, len(sizes), feed=feed)) == []
        assert num_replays(manager) > 0


class Workspace(nn.Module):
    """Writes a part of a workspace that it does not clear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        work = torch.empty_like(y)
        work[:, :3] = y[:, :3] * 2
        return y + torch.cat([work[:, :3], y[:, 3:]], 1)


@pytest.mark.parametrize("debug", [False, True])
def test_b70_workspaces_are_dirty(device: torch.device, debug: bool) -> None:
    build = partial(Stack, 3, Workspace)
    models = [built(build, device) for _ in range(2)]
    expected = train(models[0], device, 5, 2)
    with attached(models[1], LAYERS, debug=debug) as manager:
        assert differences(expected, train(models[1], device, 5, 2)) == []
        assert num_replays(manager) == 3 * 4 * 2


class Splits(Block):
    """Chooses in Python, by the length."""

    def forward(self, x: Tensor) -> Tensor:
        num_splits = x.shape[1] // 4 + 1
        return torch.cat([super(Splits, self).forward(part) for part in x.tensor_split(num_splits, 1)], 1)


@pytest.mark.parametrize("on_mismatch", ["eager", "recapture"])
def test_b72_a_choice_that_depends_on_the_length(device: torch.device, on_mismatch: str) -> None:
    build = partial(Stack, block=Splits)
    models = [built(build, device) for _ in range(2)]
    feed = lambda number: inputs(device, number, length=(3, 3, 9, 9, 9, 3, 9)[number])  # noqa: E731
    expected = train(models[0], device, 7, feed=feed)
    with attached(models[1], LAYERS, on_mismatch=on_mismatch) as manager:
        assert differences(expected, train(models[1], device, 7, feed=feed)) == []
        assert num_replays(manager) == 2 * (2 if on_mismatch == "eager" else 4)


def test_b74_random_lengths_have_a_cap(device: torch.device) -> None:
    dice = random.Random(1)
    lengths = [dice.choice([4, 5, 6, 7, 8, 9]) for _ in range(24)]
    loop = twins(
        device,
        lambda loop: [loop.step(1, length=length) for length in lengths],
        build=partial(WITH_DROPOUT, num_layers=1),
        config={"max_signatures": 2},
    )
    assert loop.num_recordings <= 2 * 2
    assert loop.num_replays > 0


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.a, self.b = (nn.Parameter(torch.randn(HIDDEN, 2)) for _ in range(2))
        self.num_adapters = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        for _ in range(self.num_adapters):
            y = y + x @ self.a @ self.b.t()
        return y


def test_b76_with_and_without_adapters(device: torch.device) -> None:
    """Never the graph of another number of adapters."""

    def switch(model: nn.Module, step: int) -> None:
        for layer in model.layers:
            layer.num_adapters = (0, 0, 1, 1, 1, 2, 0, 1, 0)[step]

    models = [built(partial(Stack, block=Adapted), device) for _ in range(2)]
    expected = train(models[0], device, 9, before=partial(switch, models[0]))
    with attached(models[1], LAYERS) as manager:
        assert differences(expected, train(models[1], device, 9, before=partial(switch, models[1]))) == []
        assert num_replays(manager) >= 2 * 2
        assert all(reasons(manager))


def test_b77_two_shapes_with_room_for_one(device: torch.device) -> None:
    """They do not evict each other for ever, and every eager call has its reason."""
    seconds = []

    def script(loop: Loop) -> None:
        for step in range(16):
            loop.step(1, length=6 + 3 * (step % 2))
            if loop.graphs:
                seconds.append(loop.report.capture_seconds)

    config = {"max_signatures": 1, "capture_after": 1}
    loop = twins(device, script, build=partial(WITH_DROPOUT, num_layers=1), config=config)
    assert loop.num_replays >= 4
    assert loop.num_replays + loop.num_eager == 16
    assert all(loop.reasons())
    captures = sum(after != before for before, after in itertools.pairwise(seconds))
    assert captures < 8, f"captured {captures} times in 16 steps"


class Balanced(Block):
    """Counts and drops in training only."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return super().forward(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_b78_evaluation_never_replays_training(device: torch.device, mode: Any) -> None:
    model = built(partial(Stack, block=Balanced), device)
    with attached(model, LAYERS) as manager:
        train(model, device, 3)
        assert num_replays(manager) > 0
        before = [int(layer.count) for layer in model.layers]
        expected = built(partial(Stack, block=Balanced), device).eval()
        expected.load_state_dict(model.state_dict())
        state = torch.get_rng_state()
        model.eval()
        for number in range(4):
            with mode():
                results = [each(inputs(device, number)).clone() for each in (model, expected)]
            assert torch.equal(*results)
        assert [int(layer.count) for layer in model.layers] == before
        model.train()
        assert torch.equal(torch.get_rng_state(), state)


def test_b78_training_after_evaluation_is_training(device: torch.device) -> None:
    """An odd number of evaluations does not turn the slots of training round."""

    def script(loop: Loop) -> None:
        for _ in range(4):
            loop.step(4)
            loop.evaluate(3)

    loop = twins(device, script, build=WITH_DROPOUT, schedule=schedule("ffffbbbb", "ffbfbfbb"))
    assert loop.num_replays >= 2 * 3 * 4


def test_b80_calls_in_a_wrong_order(device: torch.device) -> None:
    model = built(Stack, device)
    manager = graphstep.attach(model, regions=LAYERS)
    manager.end_step()
    manager.end_step()
    model(inputs(device, 0)).backward()
    manager.end_step()
    loss = model(inputs(device, 1))
    manager.close()
    with pytest.raises(LifecycleError, match="closed"):
        loss.backward()
    with pytest.raises(LifecycleError, match="closed"):
        manager.end_step()
    manager.close()
    assert manager.report().pool_bytes == 0
    model(inputs(device, 2)).backward()


def test_b80_a_step_that_ends_with_forwards_in_flight(device: torch.device) -> None:
    model, expected = built(Stack, device), built(Stack, device)
    with attached(model, LAYERS) as manager:
        losses = []
        for each in (expected, model):
            for number in range(4):
                each.zero_grad()
                loss = each(inputs(device, number))
                if each is model:
                    manager.end_step()
                loss.backward()
                losses.append(loss.detach())
        assert losses[:4] == losses[4:]
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_b82_a_new_capture_starts_when_the_old_one_is_gone(device: torch.device) -> None:
    """Attached again and again, the peak is that of the first time."""
    model, sizes = built(partial(Stack, 4), device), []
    for _ in range(3):
        with attached(model, LAYERS) as manager:
            train(model, device, 3)
            sizes.append(manager.report().pool_bytes)
        assert manager.report().pool_bytes == 0
    assert sizes[0] > 0
    assert max(sizes) <= 1.1 * sizes[0]


@pytest.mark.gpu
def test_b82_the_peak_of_a_second_capture() -> None:
    device, peaks = torch.device("cuda"), []
    model = built(partial(Stack, 4), device)
    for _ in range(3):
        with attached(model, LAYERS):
            torch.cuda.reset_peak_memory_stats()
            train(model, device, 3)
            peaks.append(torch.cuda.max_memory_reserved())
        torch.cuda.empty_cache()
    assert max(peaks) <= 1.1 * peaks[0]


@pytest.mark.parametrize("wraps", [1, 3])
def test_b84_layers_in_wrappers_are_found(device: torch.device, wraps: int) -> None:
    def wrapped(dropout: float) -> nn.Module:
        layer: nn.Module = Layer(dropout)
        for _ in range(wraps):
            layer = Wrapped(layer)
        return layer

    loop = twins(device, steps(4, 2), build=partial(Decoder, dropout=0.2, layer=wrapped))
    assert [row.name for row in loop.report.rows] == [f"layers.{index}" + ".inner" * wraps for index in range(2)]
    assert loop.num_replays == 2 * 3 * 2


def test_b84_no_coverage_is_an_error_and_says_so(device: torch.device) -> None:
    with pytest.raises(ConfigError) as caught:
        graphstep.attach(built(Stack, device))
    assert "0 layers" in str(caught.value) or "nothing" in str(caught.value)
    assert caught.value.problems[0].fix
    with pytest.warns(Warning, match=r".") as warned:
        manager = graphstep.attach(built(Stack, device), CudaGraphConfig(impl="local", policy="auto"))
    assert len(warned) == 1
    manager.close()


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_b85_resumed_from_a_checkpoint(device: torch.device, num_before: int) -> None:
    """Graphs at once, from the first step after the resume; losses as if there had been no interruption."""

    def script(loop: Loop, interrupted: bool = True) -> None:
        steps(num_before, 2)(loop)
        if interrupted:
            loop.resume()
        steps(4, 2)(loop)

    loop = twins(device, script, build=WITH_DROPOUT)
    assert loop.num_replays == 2 * 3 * 2
    whole = Loop(device, True, build=WITH_DROPOUT)
    if num_before:
        script(whole, interrupted=False)
        assert differences(whole.trace, loop.trace) == []
    whole.close()


@pytest.mark.parametrize("order", ["one by one", "in flight"])
@pytest.mark.parametrize("numbers", [(4, 6, 3), (4, 3, 6), (6, 4, 3)], ids=str)
def test_b86_the_number_of_microbatches_changes(device: torch.device, numbers: Any, order: str) -> None:
    def script(loop: Loop) -> None:
        for number in (*numbers, *numbers):
            loop.step(number)

    orders = ["fb" * n if order == "one by one" else "f" * n + "b" * n for n in (3, 4, 6)]
    loop = twins(device, script, build=WITH_DROPOUT, schedule=schedule(*orders))
    if order == "one by one" or numbers[0] == 6:
        assert loop.num_eager == 2 * numbers[0]
    assert loop.num_replays >= 2 * 13


def test_b88_one_pool_for_all_regions(device: torch.device) -> None:
    """Of a chain of layers only the saved activations add up; the gradients between them share their memory."""
    sizes = {}
    for number in (2, 4, 8):
        model = built(partial(Stack, number), device)
        with attached(model, LAYERS) as manager:
            train(model, device, 2)
            sizes[number] = manager.report().pool_bytes
    grown = [sizes[4] - sizes[2], (sizes[8] - sizes[4]) / 2]
    assert grown[1] <= 1.2 * max(grown[0], sizes[2] / 2)


def test_b89_no_mask_is_made_up(device: torch.device) -> None:
    """None stays None: no static memory for it, and what it computes is what eager computes."""
    static = []
    for mask in (None, torch.zeros(1, 6, 6, device=device)):
        call = lambda layer, x, index, mask=mask: layer(x, attention_mask=mask)[0]  # noqa: E731
        build = partial(Stack, block=lambda: DecoderLayer(0.1), call=call)
        models = [built(build, device) for _ in range(2)]
        expected = train(models[0], device, 4)
        with attached(models[1], LAYERS) as manager:
            assert differences(expected, train(models[1], device, 4)) == []
            assert num_replays(manager) == 2 * 3
            static.append([row.static_bytes for row in manager.report().rows])
    assert static[0][0] <= 2 * 6 * HIDDEN * 4
    assert static[0][1] == 0


def test_b92_capturing_again_and_again_keeps_nothing(device: torch.device) -> None:
    model = built(partial(Stack, 1), device)

    def measured() -> int:
        for _ in range(2):
            with attached(model, LAYERS):
                train(model, device, 2)
        gc.collect()
        if device.type == "cuda":
            return torch.cuda.memory_allocated()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(isinstance(each, Tensor) for each in gc.get_objects())

    first = measured()
    assert max(measured() for _ in range(2)) <= first


def test_b93_results_are_the_next_arguments(device: torch.device) -> None:
    """Without a copy: only the first of six regions has an argument of its own."""
    model = built(partial(Stack, 6), device)
    with attached(model, LAYERS) as manager:
        train(model, device, 3)
        assert [row.static_bytes > 0 for row in manager.report().rows] == [True] + [False] * 5


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def test_b93_recompute_inside_of_regions_needs_no_more_copies(device: torch.device) -> None:
    models = [built(partial(Stack, 6, Recomputed), device) for _ in range(2)]
    expected = train(models[0], device, 4, 2)
    with attached(models[1], LAYERS) as manager:
        assert differences(expected, train(models[1], device, 4, 2)) == []
        assert num_replays(manager) == 6 * 3 * 2
        assert [row.static_bytes > 0 for row in manager.report().rows] == [True] + [False] * 5
