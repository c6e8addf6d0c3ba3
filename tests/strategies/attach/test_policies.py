"""What happens to what cannot be captured, and to calls that fit no recording: always what the policy says."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Failing, Loop, OneFails, RecomputedLayers, schedule, twins
from tests.strategies.attach.plain import HIDDEN, LAYERS, Block, Stack, attached, built, num_replays, reasons, train
from tests.strategies.models import Decoder
from tests.strategies.runs import differences, steps
from torch import Tensor, nn

import graphstep
from graphstep.capture.reasons import EagerReason
from graphstep.config import CudaGraphConfig
from graphstep.errors import CaptureError, ConfigError, InputMismatchError


def test_off_captures_nothing(device: torch.device) -> None:
    loop = twins(device, steps(4, 2), build=WITH_DROPOUT, config={"policy": "off"})
    assert loop.num_recordings == loop.num_replays == 0


def test_off_needs_nothing_to_capture() -> None:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphstep.attach(model, CudaGraphConfig(impl="local", policy="off")).close()


@pytest.mark.parametrize("modules", [(), ("mlp",)], ids=["layers", "mlp"])
def test_required_names_the_line(device: torch.device, modules: Any) -> None:
    """Nothing is left behind: training without the manager goes on as if it had never been there."""
    loops = [Loop(device, graphs, build=OneFails, config={"modules": modules}) for graphs in (False, True)]
    for loop in loops:
        torch.manual_seed(3)
        loop.step(2)
        if loop.graphs:
            with pytest.raises(CaptureError) as caught:
                loop.manager.end_step()
            assert "layers.1" in caught.value.where
            assert "the line to name" in caught.value.where
            assert caught.value.fix
            assert all(row.pool_bytes == 0 for row in loop.report.rows)
            loop.close()
        loop.step(2)
    assert differences(loops[0].trace, loops[1].trace) == []


def test_required_raises_without_the_end_of_the_step(device: torch.device) -> None:
    loop = Loop(device, True, build=OneFails)
    loop.step(1)
    with pytest.raises(CaptureError, match=r"."):
        loop.step(1)
    loop.close()


@pytest.mark.parametrize("ends_steps", [False, True])
@pytest.mark.parametrize("modules", [(), ("mlp",)], ids=["layers", "mlp"])
def test_auto_captures_the_others(device: torch.device, modules: Any, ends_steps: bool) -> None:
    config = {"policy": "auto", "modules": modules}
    with pytest.warns(Warning, match=r"layers\.1"):
        loop = twins(device, steps(5, 2), build=OneFails, config=config, ends_steps=ends_steps)
    rows = loop.report.rows
    assert [row.num_replays for row in rows] == [4 * 2, 0, 4 * 2]
    assert [row.num_recordings > 0 for row in rows] == [True, False, True]
    assert sum(rows[1].eager_calls.values()) == 5 * 2
    assert len(rows[1].eager_calls) == 2, "observed, and why it was not captured"


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (2 + 0 * gradient.sum().item())  # the line to name


class BackwardFails(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(FailsBackward.apply(x))


def mixed(*blocks: Callable[[], nn.Module]) -> Callable[[], Stack]:
    def build() -> Stack:
        model = Stack(0)
        model.layers.extend(block() for block in blocks)
        return model

    return build


@pytest.mark.parametrize("place", range(3))
def test_a_backward_that_reads_a_value(device: torch.device, place: int) -> None:
    blocks: list[Any] = [Block] * 3
    blocks[place] = BackwardFails
    build = mixed(*blocks)
    expected = train(built(build, device), device, num_microbatches=2)
    model = built(build, device)
    with attached(model, LAYERS, policy="auto") as manager:
        with pytest.warns(Warning, match=rf"layers\.{place}"):
            assert differences(expected, train(model, device, num_microbatches=2)) == []
        assert [row.num_replays > 0 for row in manager.report().rows] == [index != place for index in range(3)]
    with attached(model, LAYERS) as manager, pytest.raises(CaptureError) as caught:
        train(model, device, 3)
    assert "the line to name" in caught.value.where


class Bug(Block):
    """Fails with an error of its own when it runs for the second time in its life."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            raise KeyError("a bug")
        return super().forward(x)


def test_a_bug_that_shows_while_capturing(device: torch.device) -> None:
    """Policies are about what cannot be captured; a bug is a bug, or a reason in the report, never silence."""
    model = built(mixed(Block, Bug), device)
    with attached(model, LAYERS, policy="auto") as manager:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(model, device, 4)
        except KeyError:
            return
        assert any("a bug" in text for text in (*reasons(manager), str(manager.report())))


@pytest.mark.parametrize("policy", ["required", "auto"])
def test_nothing_to_capture(policy: str) -> None:
    model, config = nn.Sequential(nn.Linear(2, 2)), CudaGraphConfig(impl="local", policy=policy)
    if policy == "required":
        with pytest.raises(ConfigError):
            graphstep.attach(model, config)
    else:
        with pytest.warns(Warning, match=r"."):
            manager = graphstep.attach(model, config)
        model(torch.ones(1, 2)).sum().backward()
        assert manager.report().num_recordings == 0
        manager.close()


@pytest.mark.parametrize("regions", [None, {}], ids=str)
def test_no_patterns_and_no_segments(device: torch.device, regions: Any) -> None:
    with pytest.raises(ConfigError):
        graphstep.attach(Stack(), regions=regions)
    model = built(Stack, device)
    expected = train(built(Stack, device), device, 3)
    config = CudaGraphConfig(impl="local", policy="auto")
    with pytest.warns(Warning, match=r"."):
        manager = graphstep.attach(model, config, regions=regions)
    assert differences(expected, train(model, device, 3)) == []
    assert num_replays(manager) == 0
    manager.close()


def test_nothing_that_could_be_captured(device: torch.device) -> None:
    """Every region fails: an error where coverage is required, a warning and a reason each where it is not."""
    build = partial(Decoder, 2, 0.2, layer=Failing)
    with pytest.warns(Warning, match=r"layers\.[01]"):
        loop = twins(device, steps(4, 1), build=build, config={"policy": "auto"})
    assert loop.num_replays == 0
    assert all(len(row.eager_calls) == 2 for row in loop.report.rows)


@pytest.mark.parametrize("policy", ["auto", "required"])
def test_a_model_that_is_never_trained(device: torch.device, policy: str) -> None:
    """Evaluation alone is no reason to fail."""
    loop = twins(device, lambda loop: [loop.evaluate(2) for _ in range(4)], config={"policy": policy})
    assert loop.num_replays >= 0


def other_lengths(loop: Loop) -> None:
    for length in (6, 6, 9, 6, 9, 9, 6, 9):
        loop.step(2, length=length)


def test_a_mismatch_is_an_error(device: torch.device) -> None:
    """All differences are listed, nothing ran, and what was captured goes on."""
    loop = Loop(device, True, build=WITH_DROPOUT, config={"on_mismatch": "error"})
    steps(3, 1)(loop)
    replays, weights = loop.num_replays, loop.model.layers[0].mlp[1].weight.clone()
    with pytest.raises(InputMismatchError) as caught:
        loop.step(1, length=9)
    assert "layers.0" in caught.value.where
    assert "(2, 6, 16)" in str(caught.value)
    assert "(2, 9, 16)" in str(caught.value)
    assert torch.equal(loop.model.layers[0].mlp[1].weight, weights)
    assert loop.num_replays == replays
    loop.step(1)
    assert loop.num_replays == replays + 2
    loop.close()


def test_every_difference_is_listed(device: torch.device) -> None:
    model = built(partial(Stack, call=lambda layer, x, index: layer(x)), device)
    with attached(model, LAYERS, on_mismatch="error") as manager:
        train(model, device, 3)
        x = torch.randn(3, 5, HIDDEN, device=device, dtype=torch.float64, requires_grad=True)
        with pytest.raises(InputMismatchError) as caught, torch.autocast(device.type, dtype=torch.bfloat16):
            model.layers[0](x)
        for part in ("(2, 6, 16)", "(3, 5, 16)", "float64", "autocast"):
            assert part in str(caught.value), part
        assert num_replays(manager) == 2 * 2


def test_evaluation_is_no_mismatch(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        for _ in range(4):
            loop.step(1)
            loop.evaluate(1, length=8)

    assert twins(device, script, build=WITH_DROPOUT, config={"on_mismatch": "error"}).num_replays >= 2 * 3


def test_a_mismatch_runs_eagerly(device: torch.device) -> None:
    loop = twins(device, other_lengths, build=WITH_DROPOUT, config={"on_mismatch": "eager"})
    assert loop.num_replays == 2 * 3 * 2
    assert loop.num_eager == 2 * 2 + 2 * 4 * 2
    assert all(any("9" in text for text in row.last_mismatch) for row in loop.report.rows)
    assert [row.num_recordings for row in loop.report.rows] == [2, 2]


def test_a_mismatch_is_captured_too(device: torch.device) -> None:
    loop = twins(device, other_lengths, build=WITH_DROPOUT, config={"on_mismatch": "recapture"})
    assert loop.num_replays == 2 * 2 * (3 + 2)
    assert [row.num_recordings for row in loop.report.rows] == [4, 4]


@pytest.mark.parametrize("ends_steps", [False, True])
@pytest.mark.parametrize("capture_after", [1, 2, 3])
def test_how_often_a_signature_must_be_seen(device: torch.device, capture_after: int, ends_steps: bool) -> None:
    """In so many steps; how often in each is no matter."""

    def script(loop: Loop) -> None:
        for length in (6, 6, 9, 9, 9, 9, 9):
            loop.step(3, length=length)

    config = {"capture_after": capture_after}
    loop = twins(device, script, build=WITH_DROPOUT, config=config, ends_steps=ends_steps)
    assert loop.num_replays == 2 * 3 * (1 + 5 - capture_after)


@pytest.mark.parametrize("ends_steps", [False, True])
def test_an_attribute_that_changed_before_another_signature_was_captured(
    device: torch.device, ends_steps: bool
) -> None:
    """What is captured later has the new value; what was captured before still has the old one."""

    def script(loop: Loop) -> None:
        for step, length in enumerate((6, 6, 9, 9, 6, 9, 6)):
            if step == 2:
                loop.model.layers[0].dropout = 0.6
            loop.step(1, length=length)

    loop = twins(device, script, build=WITH_DROPOUT, ends_steps=ends_steps)
    assert loop.num_replays > 0


def test_what_is_seen_too_seldom_is_not_captured(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        for length in (6, 6, 7, 8, 9, 10, 11, 12, 6):
            loop.step(1, length=length)

    loop = twins(device, script)
    assert [row.num_recordings for row in loop.report.rows] == [2, 2]
    assert loop.num_replays == 2 * 2


def test_the_least_used_is_evicted(device: torch.device) -> None:
    """Two signatures a region: what is used all the time stays."""

    def script(loop: Loop) -> None:
        for length in (6, 6, 6, 6, 7, 7, 7, 8, 8, 8, 6, 8):
            loop.step(1, length=length)

    loop = twins(device, script, build=WITH_DROPOUT, config={"max_signatures": 2})
    assert [row.num_recordings for row in loop.report.rows] == [4, 4]
    assert loop.num_replays == 2 * (3 + 1 + 1 + 1 + 1)


def test_an_evicted_signature_can_come_back(device: torch.device) -> None:
    replays = []

    def script(loop: Loop) -> None:
        for length in (6,) * 3 + (9,) * 8 + (6,) * 16:
            loop.step(1, length=length)
            replays.append(loop.num_replays if loop.graphs else 0)

    config = {"max_signatures": 1, "capture_after": 1}
    loop = twins(device, script, build=partial(WITH_DROPOUT, num_layers=1), config=config)
    (row,) = loop.report.rows
    assert (row.num_recordings, row.num_evictions) == (2, 2)
    graphed = replays[len(replays) // 2 :]
    assert [graphed[end] - graphed[end - 1] for end in (2, 10, -1)] == [1, 1, 1]


@pytest.mark.parametrize("debug", [False, True])
def test_an_eviction_takes_no_memory_of_what_stays(device: torch.device, debug: bool) -> None:
    """Of one layer two variants have graphs and of the other one has: an eviction cuts chains in their middle."""

    def script(loop: Loop) -> None:
        for step, (num_microbatches, length) in enumerate(
            [(2, 6), (1, 6), (1, 6), (1, 6), (1, 4), (2, 6), (1, 4), (2, 6)]
        ):
            if step == 2:
                loop.model.layers[0].dropout = 0.3
            loop.step(num_microbatches, length=length)

    config = {"max_signatures": 2, "capture_after": 1, "debug": debug}
    twins(device, script, build=partial(Decoder, dropout=0.1), config=config, schedule=schedule("fb", "ffBB"))


def test_an_eviction_gives_memory_back(device: torch.device) -> None:
    sizes = []

    def script(loop: Loop) -> None:
        for length in (8, 8, 7, 7, 7, 6, 6, 6, 5, 5, 5, 8, 8, 8):
            loop.step(1, length=length)
            if loop.graphs:
                sizes.append(loop.report.pool_bytes)

    twins(device, script, config={"max_signatures": 1, "capture_after": 1})
    assert max(sizes[2:]) <= 1.1 * sizes[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "always"},
        {"on_mismatch": "ignore"},
        {"capture_after": 0},
        {"max_signatures": 0},
        {"merge_layers": -1},
        {"capture_after": "two"},
    ],
    ids=str,
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        CudaGraphConfig(impl="local", **wrong)
    assert str(next(iter(wrong.values()))) in str(caught.value)


def test_the_report(device: torch.device) -> None:
    """Hits, misses and reasons of each region, as an object, a table and plain data."""
    loop = Loop(device, True, build=OneFails, config={"policy": "auto", "on_mismatch": "eager"})
    with pytest.warns(Warning, match=r"layers\.1"):
        steps(2, 2)(loop)
    for length in (9, 6):
        loop.step(2, length=length)
    report = loop.report
    data = report.to_json()
    assert [row["name"] for row in data["regions"]] == ["layers.0", "layers.1", "layers.2"]
    for row in report.rows:
        assert row.num_replays + sum(row.eager_calls.values()) == 4 * 2
        assert (row.num_recordings > 0) == (row.capture_seconds > 0 and row.name != "layers.1")
        assert row.pool_bytes == 0 or row.num_recordings > 0
    assert report.capture_seconds > 0
    assert report.pool_bytes > 0
    assert [row.num_slots for row in report.rows] == [1, 0, 1]
    assert [row.num_signatures for row in report.rows] == [1, 0, 1]
    assert [row.num_misses for row in report.rows] == [2, 6, 2]
    assert report.coverage() == (2, 3)
    assert "the line to name" in report.rows[1].why_not_captured
    codes = [{each["code"] for each in row["eager_reasons"]} for row in data["regions"]]
    assert codes == [{"observed", "other-signature"}, {"observed", "capture-failed"}, {"observed", "other-signature"}]
    for text in ("layers.0", "layers.1", "layers.2", "the line to name"):
        assert text in " ".join(str(report).split()), text
    assert str(loop.manager.session.report()) == str(report)
    loop.close()


def test_recompute_around_layers_is_refused(device: torch.device) -> None:
    """Where coverage is required, a loop that never replays is told so; where not, the report says why."""
    loop = Loop(device, True, build=RecomputedLayers)
    with pytest.raises(CaptureError, match="recompute"):
        steps(3, 1)(loop)
    loop.close()
    gc.collect()  # Before torch 2.13 a checkpoint whose function has failed stays active as long as the error is kept.
    with pytest.warns(UserWarning, match="recompute"):
        loop = twins(device, steps(3, 1), build=RecomputedLayers, config={"policy": "auto"})
    assert set(loop.reasons()) == {EagerReason.RECOMPUTE}
