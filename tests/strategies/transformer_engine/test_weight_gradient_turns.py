"""Weight gradients of layers in turns of their own: the bits of eager execution, and clear errors out of turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Frozen, Loop, RecomputedMlp
from tests.strategies.callables.delayed import delayed
from tests.strategies.models import Decoder, run_microbatches
from tests.strategies.runs import insist_on_the_same_bits
from tests.strategies.transformer_engine.helped import halves
from torch import Tensor, nn
from torch.nn import functional

from graphstep.capture.plan import Phase
from graphstep.capture.reasons import EagerReason
from graphstep.capture.report import CaptureReport
from graphstep.config import CudaGraphConfig
from graphstep.errors import ConfigError, LifecycleError, PlanError
from graphstep.strategies import TECudaGraphHelper
from graphstep.strategies.order_steps import steps_of
from graphstep.strategies.pipeline_order import pipeline_order

IN_TURN = (1, -1, -1.5)
IN_FLIGHT = (1, 1, -1, -1.5, 1, -1, -1, -1.5, -1.5)
LATE = tuple(delayed(pipeline_order(4, pipeline_size=3, pipeline_rank=0), 2))
CHUNKS = tuple(delayed(pipeline_order(4, pipeline_size=2, pipeline_rank=0, num_model_chunks=2), 1))
ORDERS = {"in turn": IN_TURN, "in flight": IN_FLIGHT, "late": LATE, "interleaved": CHUNKS}


class Helped:
    """As a manager: a helper, and how to make it."""

    def __init__(self, loop: HelpedLoop) -> None:
        config = CudaGraphConfig(impl="transformer_engine", **loop.config)
        chunks = [nn.ModuleList(half) for half in halves(loop.model)] if loop.num_chunks == 2 else loop.model
        self.helper = TECudaGraphHelper(chunks, config, 6, 2, order=loop.order)

    def report(self) -> CaptureReport:
        return self.helper.report()

    def close(self) -> None:
        self.helper.delete_cuda_graphs()


class HelpedLoop(Loop):
    """Runs an order, with the weight gradients where it has them if there is a helper."""

    def __init__(self, device: torch.device, graphs: bool, order: Sequence[float], **options: Any) -> None:
        self.order = list(order)
        self.num_chunks = int(max(self.order))
        self.before: Callable[[int], None] = lambda _place: None
        """Called before each entry of the order, with its place."""
        super().__init__(device, graphs, forward_backward=self.scheduled, **options)

    def _attach(self) -> Any:
        return Helped(self) if self.graphs else None

    @property
    def helper(self) -> TECudaGraphHelper | None:
        return self.manager.helper if self.manager is not None else None

    def scheduled(
        self, *, data_iterator: Iterator[Any], model: Any, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        if forward_only:
            return run_microbatches(
                data_iterator=data_iterator, model=model, num_microbatches=num_microbatches, forward_only=True
            )
        batches = [next(data_iterator) for _ in range(num_microbatches)]
        middle: dict[int, tuple[Tensor, Tensor]] = {}
        losses: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for place, step in enumerate(steps_of(self.order, num_chunks=self.num_chunks)):
            self.before(place)
            number, batch = step.microbatch, batches[step.microbatch]
            if step.phase is Phase.WEIGHT_GRADIENT:
                if self.helper is not None:
                    self.helper.backward_dw(step.chunk)
            elif step.phase is Phase.FORWARD and step.chunk < self.num_chunks - 1:
                x = model.embedding(batch["tokens"])
                for layer in halves(model)[0]:
                    x = layer(x)
                middle[number] = x, x.detach().requires_grad_()
            elif step.phase is Phase.FORWARD:
                if self.num_chunks == 1:
                    losses[number] = model(batch["tokens"], batch["labels"])
                else:
                    x = middle[number][1]
                    for layer in halves(model)[1]:
                        x = layer(x)
                    logits = functional.linear(model.norm(x), model.embedding.weight)
                    losses[number] = functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
                values[number] = losses[number].detach().float()
            elif step.chunk == self.num_chunks - 1:
                (losses.pop(number) / num_microbatches).backward()
            else:
                sent, received = middle.pop(number)
                sent.backward(received.grad)
            x = None
        return torch.stack([values[number] for number in range(num_microbatches)])

    def step(self, num_microbatches: int = 0, **options: Any) -> Tensor:
        if self.helper is not None and self.helper.is_recorded:
            self.helper.create_cudagraphs()
        return super().step(num_microbatches or sum(entry == 1 for entry in self.order), **options)


def twins(
    device: torch.device, script: Callable[[HelpedLoop], Any], order: Sequence[float], **options: Any
) -> HelpedLoop:
    loops = []
    for graphs in (False, True):
        loop = HelpedLoop(device, graphs, order, **options)
        script(loop)
        loops.append(loop)
    insist_on_the_same_bits(*loops)
    loops[1].close()
    return loops[1]


def train(loop: HelpedLoop) -> None:
    for number in range(6):
        loop.step()
        if number % 2:
            loop.evaluate(2)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dropout": WITH_DROPOUT,
    "recompute inside": partial(Decoder, layer=RecomputedMlp),
    "frozen": Frozen,
    "three layers": partial(Decoder, 3, 0.1),
}


@pytest.mark.parametrize("zero", ["none", "buffers"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(device: torch.device, kind: str, order: str, zero: str) -> None:
    loop = twins(device, train, ORDERS[order], build=KINDS[kind], zero=zero)
    num_microbatches = sum(entry == 1 for entry in ORDERS[order])
    assert [row.num_replays for row in loop.report.rows] == [5 * num_microbatches] * len(loop.model.layers)


@pytest.mark.parametrize("options", [{"autocast": torch.bfloat16}, {"config": {"merge_layers": 0}}], ids=str)
def test_the_same_bits_with(device: torch.device, options: dict[str, Any]) -> None:
    loop = twins(device, train, LATE, build=partial(Decoder, 3, 0.1), **options)
    assert loop.num_replays == 3 * 5 * 4


def test_each_chunk_or_layer_has_sets_for_what_is_in_flight(device: torch.device) -> None:
    loop = HelpedLoop(device, True, LATE)
    loop.step()
    loop.step()
    # Two forwards before the first backward, and two microbatches whose weight gradients wait.
    assert loop.helper is not None
    assert loop.helper.num_buffer_sets == (4,)
    loop.close()


# Eager calls in their turns.


def test_other_shapes_run_eagerly_in_their_turn(device: torch.device) -> None:
    def script(loop: HelpedLoop) -> None:
        for _ in range(2):
            loop.step()
        sizes = (6, 5, 6)
        for _ in range(2):
            loop.step(batches=[loop.batch(length=length) for length in sizes])
        loop.step()

    loop = twins(device, script, IN_FLIGHT, build=WITH_DROPOUT)
    assert loop.reasons() == {EagerReason.OBSERVED: 6, EagerReason.OTHER_SIGNATURE: 4}


def test_a_layer_that_changes_and_one_that_is_skipped(device: torch.device) -> None:
    def script(loop: HelpedLoop) -> None:
        for number in range(6):
            loop.model.layers[1].dropout = 0.3 if number == 3 else 0.1  # type: ignore[index, union-attr]
            loop.model.order = (0, 2) if number == 4 else (0, 1, 2)  # type: ignore[assignment]
            loop.step()

    twins(device, script, IN_FLIGHT, build=partial(Decoder, 3, 0.1), zero="zeros")


# Out of turn.


def test_weight_gradients_that_are_forgotten(device: torch.device) -> None:
    loop = HelpedLoop(device, True, IN_TURN)
    for _ in range(2):
        loop.step()
    batch = {name: tensor.to(device) for name, tensor in loop.batch().items()}
    loop.model(**batch).backward()
    with pytest.raises(PlanError, match=r"expected the weight gradients of the layers.*microbatch 0.*forward of"):
        loop.model(**batch)
    assert loop.helper is not None
    loop.helper.backward_dw()
    with pytest.raises(PlanError, match=r"expected the forward of the layers .*weight gradients of the layers"):
        loop.helper.backward_dw()
    loop.model(**batch).backward()
    loop.close()


def test_before_the_backward_and_inside_of_it(device: torch.device) -> None:
    loop = HelpedLoop(device, True, IN_TURN)
    for _ in range(2):
        loop.step()
    helper = loop.helper
    assert helper is not None
    batch = {name: tensor.to(device) for name, tensor in loop.batch().items()}
    loss = loop.model(**batch)
    with pytest.raises(PlanError, match="expected the backward of the layers"):
        helper.backward_dw()
    handle = loop.model.embedding.weight.register_hook(lambda _gradient: helper.backward_dw())
    with pytest.raises(LifecycleError, match="a backward is under way"):
        loss.backward()
    handle.remove()
    loop.close()


def test_an_order_without_them_and_chunks_that_are_not_there(device: torch.device) -> None:
    config = CudaGraphConfig(impl="transformer_engine")
    helper = TECudaGraphHelper(Decoder().to(device), config, 6, 2)
    with pytest.raises(PlanError, match="backwards compute the gradients of the weights as well"):
        helper.backward_dw()
    helper.delete_cuda_graphs()
    helper = TECudaGraphHelper(Decoder().to(device), config, 6, 2, order=IN_TURN)
    with pytest.raises(ConfigError, match="from 0 and below 1, got 1"):
        helper.backward_dw(1)
    helper.backward_dw()  # Nothing is captured yet.
    helper.delete_cuda_graphs()
    helper.backward_dw()


def test_a_step_that_was_given_up_begins_anew(device: torch.device) -> None:
    def script(loop: HelpedLoop) -> None:
        loop.step()
        loop.step()
        if loop.helper is not None:
            state = [(value, value.clone()) for value in loop.model.buffers()]
            batch = {name: tensor.to(device) for name, tensor in loop.batch().items()}
            losses = [loop.model(**batch), loop.model(**batch)]
            losses.pop(0).backward()
            losses.clear()
            for value, before in state:
                value.copy_(before)
        else:
            loop.batch()
        loop.step()
        loop.step()

    twins(device, script, (1, 1, -1, -1, -1.5, -1.5))


@pytest.mark.parametrize("place", range(len(IN_FLIGHT)))
def test_what_is_in_flight_at_the_deletion_keeps_its_weight_gradients(device: torch.device, place: int) -> None:
    """Whether its backward has run or not, and whether its graphs were replayed or not."""

    def script(loop: HelpedLoop) -> None:
        for _ in range(3):
            loop.step()
        helper = loop.helper

        def delete(now: int) -> None:
            if now == place and helper is not None:
                helper.delete_cuda_graphs()

        loop.before = delete
        loop.step(batches=[loop.batch(length=length) for length in (6, 5, 6)])
        loop.step()
        if helper is not None:
            assert helper.report().pool_bytes == 0

    twins(device, script, IN_FLIGHT, build=WITH_DROPOUT)
