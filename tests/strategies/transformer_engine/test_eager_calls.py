"""Calls of captured layers that no graph is for: they run eagerly with a reason, and the rest goes on as it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder, in_order
from tests.strategies.runs import Run, insist_on_the_same_bits
from torch import Tensor, nn

from graphstep.capture.reasons import EagerReason
from graphstep.config import CudaGraphConfig
from graphstep.errors import CaptureError, InputMismatchError, LifecycleError, PlanError
from graphstep.strategies import TECudaGraphHelper

THREE = partial(Decoder, 3, 0.1)
ORDERS = {"fb": (1, -1), "ffbfbb": (1, 1, -1, 1, -1, -1)}


def twins(
    device: torch.device,
    script: Callable[[Run, Callable[[], None]], Any],
    *,
    word: str = "fb",
    build: Callable[[], nn.Module] = THREE,
    sizes: tuple[int, int] = (6, 2),
    **config: Any,
) -> TECudaGraphHelper:
    """Run ``script`` eagerly and with a helper, which the script is given a function to capture with."""
    runs = []
    helper: TECudaGraphHelper | None = None
    config = {"warmup_steps": 1, **config}
    for is_graphed in (False, True):
        run = Run(device, "none", build=build, forward_backward=in_order(word))
        if is_graphed:
            helper = TECudaGraphHelper(
                run.model, CudaGraphConfig(impl="transformer_engine", **config), *sizes, order=ORDERS[word]
            )
            script(run, helper.create_cudagraphs)
        else:
            script(run, lambda: None)
        runs.append(run)
    insist_on_the_same_bits(*runs)
    assert helper is not None
    helper.delete_cuda_graphs()
    return helper


def reasons(helper: TECudaGraphHelper) -> list[dict[str, int]]:
    """Of each layer, without the recorded calls."""
    return [
        {reason: count for reason, count in row.eager_calls.items() if reason != EagerReason.OBSERVED}
        for row in helper.report().rows
    ]


def replays(helper: TECudaGraphHelper) -> list[int]:
    return [row.num_replays for row in helper.report().rows]


# ----- layers without a backward


class FrozenStart(Decoder):
    """The embedding and the first layers are frozen."""

    def __init__(self, num_frozen: int = 1) -> None:
        super().__init__(3, 0.1)
        self.norm.weight = nn.Parameter(self.norm.weight.detach().clone())
        for module in (self.embedding, *self.layers[:num_frozen]):
            for parameter in module.parameters():
                parameter.requires_grad_(False)


@pytest.mark.parametrize("word", ORDERS)
@pytest.mark.parametrize("num_frozen", [1, 2])
def test_frozen_first_layers_are_not_waited_for(device: torch.device, num_frozen: int, word: str) -> None:
    number = word.count("f")

    def script(run: Run, capture: Callable[[], None]) -> None:
        run.step(number)
        capture()
        for _ in range(5):
            run.step(number)
            run.evaluate(1)

    helper = twins(device, script, build=partial(FrozenStart, num_frozen), word=word)
    assert replays(helper) == [0] * num_frozen + [5 * number] * (3 - num_frozen)
    frozen = {EagerReason.NO_GRADIENT: 5 * number, EagerReason.EVALUATION: 5}
    assert reasons(helper) == [frozen] * num_frozen + [{EagerReason.EVALUATION: 5}] * (3 - num_frozen)


def test_an_input_without_gradient_is_captured_with_trained_weights(device: torch.device) -> None:
    def script(run: Run, capture: Callable[[], None]) -> None:
        run.step(1)
        capture()
        for _ in range(5):
            run.step(1)

    assert replays(twins(device, script, build=partial(FrozenStart, 0))) == [5, 5, 5]


def test_nothing_but_frozen_layers_is_an_error(device: torch.device) -> None:
    run = Run(device, "none", build=partial(FrozenStart, 3))
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl="transformer_engine"), 6, 2)
    run.step(1)
    assert helper.is_recorded
    with pytest.raises(CaptureError, match=r"no result of layers\.0, layers\.1, layers\.2 needs a gradient"):
        helper.create_cudagraphs()
    run.step(1)
    assert not helper.graphs_created()
    assert not helper.capture_finished()
    helper.delete_cuda_graphs()


def test_a_chunk_without_a_backward_has_no_turns(device: torch.device) -> None:
    """Of two chunks the first is frozen; the order of both is that of an interleaved schedule."""

    def train(run: Run, helper: TECudaGraphHelper | None, chunks: nn.ModuleList) -> list[Tensor]:
        torch.manual_seed(2)
        found = []
        for step in range(6):
            if helper is not None and step == 1:
                helper.create_cudagraphs()
            middle = [chunks[0](torch.randn(2, 6, 16, device=device)) for _ in range(2)]
            outs = [chunks[1](x) for x in middle]
            for out in outs:
                out.square().mean().backward()
            del out, outs
            found += [p.grad.clone() for p in chunks[1].parameters() if p.grad is not None]
        return found

    results = []
    for is_graphed in (False, True):
        run = Run(device, "none", build=partial(Decoder, 4, 0.1))
        chunks = nn.ModuleList(nn.Sequential(*run.model.layers[k : k + 2]) for k in (0, 2))
        chunks[0].requires_grad_(False)
        config = CudaGraphConfig(impl="transformer_engine")
        helper = (
            TECudaGraphHelper(list(chunks), config, 6, 2, order=(1, 1, 2, 2, -2, -2, -1, -1)) if is_graphed else None
        )
        results.append(train(run, helper, chunks))
        if helper is not None:
            assert replays(helper) == [0, 0, 10, 10]
            helper.delete_cuda_graphs()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert len(results[0]) > 0


# ----- other shapes


@pytest.mark.parametrize("word", ORDERS)
def test_a_shape_that_was_not_seen_runs_eagerly(device: torch.device, word: str) -> None:
    number = word.count("f")

    def script(run: Run, capture: Callable[[], None]) -> None:
        run.step(number)
        capture()
        for length in (6, 9, 6, 9, 9, 6):
            run.step(number, length=length)
        run.step(batches=[run.batch(length=9 if k == 1 else 6) for k in range(number)])
        run.step(number)

    helper = twins(device, script, word=word)
    num_other = 3 * number + (number > 1)
    assert reasons(helper) == [{EagerReason.OTHER_SIGNATURE: num_other}] * 3
    assert replays(helper) == [8 * number - num_other] * 3
    assert all("changed shape" in row.last_mismatch[0] for row in helper.report().rows)


@pytest.mark.parametrize("word", ORDERS)
def test_shapes_that_were_seen_before_the_capture_are_captured(device: torch.device, word: str) -> None:
    number = word.count("f")

    def script(run: Run, capture: Callable[[], None]) -> None:
        for length in (9, 6, 4):
            run.step(number, length=length)
        capture()
        for length in (6, 9, 4, 9, 6, 6):
            run.step(number, length=length)
        run.step(batches=[run.batch(length=(9, 6, 4)[k]) for k in range(number)])
        run.step(number)

    helper = twins(device, script, word=word)
    assert reasons(helper) == [{}] * 3
    assert replays(helper) == [8 * number] * 3


def test_no_more_signatures_than_allowed_and_that_of_the_sizes_among_them(device: torch.device) -> None:
    def script(run: Run, capture: Callable[[], None]) -> None:
        for length in (9, 6):
            run.step(1, length=length)
        capture()
        for length in (6, 9, 6):
            run.step(1, length=length)

    helper = twins(device, script, max_signatures=2)
    assert reasons(helper) == [{}] * 3
    helper = twins(device, script, max_signatures=1, sizes=(9, 2))
    assert reasons(helper) == [{EagerReason.TOO_MANY_SIGNATURES: 2}] * 3


def test_another_shape_is_an_error_where_that_is_wanted(device: torch.device) -> None:
    def script(run: Run, capture: Callable[[], None]) -> None:
        run.step(1)
        capture()
        run.evaluate(1, length=9)
        run.step(1)

    helper = twins(device, script, on_mismatch="error")
    assert reasons(helper) == [{EagerReason.EVALUATION: 1}] * 3
    run = Run(device, "none", build=THREE)
    config = CudaGraphConfig(impl="transformer_engine", on_mismatch="error")
    helper = TECudaGraphHelper(run.model, config, 6, 2)
    run.step(1)
    helper.create_cudagraphs()
    with pytest.raises(InputMismatchError, match=r"(?s)argument 'hidden' changed shape.*create_cudagraphs"):
        run.step(1, length=9)
    run.step(1)
    helper.delete_cuda_graphs()


# ----- results that are held


def keep_from(run: Run, layer: int, at_most: int, *, first_only: bool = False) -> list[Tensor]:
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, result: Tensor) -> None:
        if not torch.is_grad_enabled() or (first_only and kept):
            return
        kept.append(result.detach())
        del kept[:-at_most]

    run.model.layers[layer].register_forward_hook(keep)
    return kept


@pytest.mark.parametrize("word", ORDERS)
@pytest.mark.parametrize("layer", range(3))
def test_a_result_that_is_held_for_ever_does_not_stop_replays(device: torch.device, layer: int, word: str) -> None:
    number = word.count("f")

    def script(run: Run, capture: Callable[[], None]) -> None:
        kept = keep_from(run, layer, 1, first_only=True)
        run.step(number)
        kept.clear()
        capture()
        for _ in range(8):
            run.step(number)
            run.kept.extend(each for each in kept if all(each is not other for other in run.kept))
        assert len(kept) == 1

    helper = twins(device, script, word=word)
    # One step holds the result, in two steps it is in the way of a slot, then the graphs are made anew.
    assert min(replays(helper)) >= 6 * number
    assert all(set(each) <= {EagerReason.RESULT_HELD, EagerReason.PLACE_IN_USE} for each in reasons(helper))
    assert any(reasons(helper))


@pytest.mark.parametrize("word", ORDERS)
@pytest.mark.parametrize("at_most", [1, 4, 100])
@pytest.mark.parametrize("layer", range(3))
def test_results_that_a_hook_keeps_are_never_overwritten(
    device: torch.device, layer: int, at_most: int, word: str
) -> None:
    number = word.count("f")

    def script(run: Run, capture: Callable[[], None]) -> None:
        kept = keep_from(run, layer, at_most)
        run.step(number)
        capture()
        for _ in range(12):
            run.step(number)
            run.kept.append(torch.cat([each.flatten() for each in kept]))

    helper = twins(device, script, word=word)
    # However long results are kept, it is in the way for a few steps only.
    assert min(replays(helper)) >= 7 * number, reasons(helper)


# ----- layers that are skipped


@pytest.mark.parametrize("word", ORDERS)
@pytest.mark.parametrize("order", [(1, 2), (0, 2), (0, 1), (0,), (1,), (2,)], ids=str)
def test_layers_that_a_step_skips(device: torch.device, order: tuple[int, ...], word: str) -> None:
    number = word.count("f")

    def script(run: Run, capture: Callable[[], None]) -> None:
        run.step(number)
        capture()
        for skips in (False, True, False, True, True, False):
            run.model.order = order if skips else (0, 1, 2)
            run.step(number)

    helper = twins(device, script, word=word)
    assert reasons(helper) == [{}] * 3
    assert replays(helper) == [(6 if layer in order else 3) * number for layer in range(3)]


@pytest.mark.parametrize("order", [(1, 2), (0, 2), (0, 1), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("which", range(3))
def test_layers_that_one_microbatch_skips(device: torch.device, which: int, order: tuple[int, ...]) -> None:
    def script(run: Run, capture: Callable[[], None]) -> None:
        count = 0
        orders = [order if k == which else (0, 1, 2) for k in range(3)]

        def choose(_module: nn.Module, _inputs: object) -> None:
            nonlocal count
            run.model.order = orders[count % 3]
            count += 1

        run.step(3)
        capture()
        handle = run.model.register_forward_pre_hook(choose)
        for _ in range(5):
            run.step(3)
        handle.remove()
        run.model.order = (0, 1, 2)
        run.step(3)

    helper = twins(device, script, word="ffbfbb")
    assert reasons(helper) == [{}] * 3


@pytest.mark.parametrize("seen", [[(0, 2), (0, 1, 2)], [(0, 1), (0, 2)], [(0,), (1,), (2,)], [(1, 2), (0, 1)]], ids=str)
def test_layers_that_are_skipped_before_the_capture(device: torch.device, seen: Any) -> None:
    def script(run: Run, capture: Callable[[], None]) -> None:
        for order in seen:
            run.model.order = order
            run.step(1)
        capture()
        for order in [(0, 1, 2), *seen, (0, 1, 2), (0, 1, 2)]:
            run.model.order = order
            run.step(1)

    helper = twins(device, script)
    assert min(replays(helper)) >= 3


def test_layers_in_another_order_are_refused_by_name(device: torch.device) -> None:
    run = Run(device, "none", build=THREE)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl="transformer_engine"), 6, 2)
    run.step(1)
    helper.create_cudagraphs()
    run.model.order = (0, 2, 1)
    with pytest.raises(PlanError) as caught:
        run.step(1)
    assert caught.value.what == (
        "expected the backward of the layers for microbatch 0 (chunk 0), and the forward of layers.1 for microbatch 1 "
        "(chunk 0) came"
    )
    helper.delete_cuda_graphs()


def test_a_layer_that_never_runs_is_named(device: torch.device) -> None:
    run = Run(device, "none", build=THREE)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl="transformer_engine"), 6, 2)
    run.model.order = (0, 2)
    run.step(1)
    with pytest.raises(LifecycleError, match="no forward and backward was seen") as caught:
        helper.create_cudagraphs()
    assert caught.value.what == "no forward and backward was seen of layers.1"
    run.model.order = (0, 1, 2)
    run.step(1)
    helper.create_cudagraphs()
    helper.delete_cuda_graphs()


@pytest.mark.parametrize("merge_layers", [0, 2])
def test_merged_layers_of_which_one_is_in_evaluation(device: torch.device, merge_layers: int) -> None:
    def script(run: Run, capture: Callable[[], None]) -> None:
        run.step(1)
        capture()
        run.step(1)
        run.model.layers[1].eval()
        run.step(1)
        run.model.layers[1].train()
        run.step(1)

    twins(device, script, build=partial(Decoder, 3), merge_layers=merge_layers)
