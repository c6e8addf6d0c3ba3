"""``Float8Linear`` inside of graphs: the same bits as eagerly, and state that captures leave alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.models.tiny import GPT2, tiny_batch, tiny_model
from tests.strategies.callables.jobs import DTYPES, Job, compared
from tests.strategies.runs import differences
from torch import Tensor, nn
from torch.nn import functional

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.models import DelayedScaling, Float8Linear, GPTModel, mark_first_microbatch

WIDE, ROWS = 32, 16
RECIPES = [
    DelayedScaling(amax_history_len=3),
    DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent", fp8_format="e4m3", margin=1),
]


class Block(nn.Module):
    """An MLP in fp8, with a residual in the dtype of its input."""

    def __init__(self, recipe: DelayedScaling = RECIPES[0], caches_weight: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up = Float8Linear(WIDE, 48, recipe=recipe, caches_weight=caches_weight)
        self.down = Float8Linear(48, WIDE, bias=False, recipe=recipe, caches_weight=caches_weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return result


def state_of(*models: nn.Module) -> dict[str, Tensor]:
    """All buffers, those outside of the state dict too."""
    named = ((f"{i}.{name}", buffer) for i, model in enumerate(models) for name, buffer in model.named_buffers())
    return {name: buffer.clone() for name, buffer in named}


def graphed_blocks(job: Job, build: Callable[[], nn.Module], **options: Any) -> Callable[[Tensor], Tensor]:
    blocks = (job.built(build), job.built(build))
    for block in blocks:  # State that is not that of a fresh module.
        block(job.draw(ROWS, WIDE)).sum().backward()
        block.zero_grad()
    before = state_of(*blocks)
    sample = (job.sample(ROWS, WIDE, requires_grad=True),)
    first, second = job.graphed(blocks, (sample, sample), **options)
    assert not differences([before], [state_of(*blocks)])
    return lambda x: second(first(x))


def train(job: Job, model: Callable[[Tensor], Tensor], num_microbatches: int, num_steps: int = 6) -> None:
    optimizer = job.optimizer(lr=0.01)
    for step in range(num_steps):
        optimizer.zero_grad()
        for each in job.models:
            mark_first_microbatch(each)
        for _ in range(num_microbatches):
            x = (job.draw(ROWS, WIDE) * (step + 1)).detach().requires_grad_()
            result = model(x)
            result.square().mean().backward()
            job.note(x=x, result=result, **{f"state {n}": b for n, b in state_of(*job.models).items()})
            del result
        optimizer.step()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_graphs_equal_eager(device: torch.device, recipe: DelayedScaling, caches: bool, num_microbatches: int) -> None:
    def script(job: Job) -> None:
        model = graphed_blocks(job, partial(Block, recipe, caches))
        train(job, model, num_microbatches)
        scales = {tuple(each["state 0.up.scale 0"].tolist()) for each in job.trace}
        assert len(scales) >= 4, "they change from step to step"

    compared(device, script, replays=2 * 6 * num_microbatches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulates", [True, False])
def test_dtypes_and_gradients_accumulated_in_the_graph(
    device: torch.device, dtype: torch.dtype, accumulates: bool
) -> None:
    def script(job: Job) -> None:
        train(job, graphed_blocks(job, Block, accumulate_param_grads=accumulates), 2)

    compared(device, script, dtype=dtype, replays=2 * 6 * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inside_of_autocast(device: torch.device, dtype: torch.dtype) -> None:
    def script(job: Job) -> None:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            train(job, graphed_blocks(job, Block), 2)

    compared(device, script, replays=2 * 6 * 2)


def test_several_microbatches_in_flight(device: torch.device) -> None:
    """The forward of a later microbatch comes before the backward of the first one."""
    order = [1, 1, -1, 1, -1, -1]

    def script(job: Job) -> None:
        block = job.built(Block)
        sample = (job.sample(ROWS, WIDE, requires_grad=True),)
        places = job.graphed((block,), [sample] * 3, _order=order)
        optimizer = job.optimizer(lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            mark_first_microbatch(block)
            results, num_forwards = [], 0
            for entry in order:
                if entry > 0:
                    x = job.draw(ROWS, WIDE) * (step + 1)
                    results.append(places[num_forwards](x.detach().requires_grad_()))
                    num_forwards += 1
                else:
                    results.pop(0).square().mean().backward()
            job.note(**{f"state {n}": b for n, b in state_of(block).items()})
            optimizer.step()

    compared(device, script, replays=18)


def test_the_weight_is_quantised_in_the_first_microbatch_only(device: torch.device) -> None:
    """One graph serves both kinds of microbatch, which the device tells apart."""
    layer = Float8Linear(WIDE, WIDE, caches_weight=True).to(device)
    sample = (torch.ones(ROWS, WIDE, device=device),)
    graphed = graphstep.make_graphed_callables(layer, sample)
    x = torch.randn(ROWS, WIDE, device=device)
    first = graphed(x).detach().clone()
    with torch.no_grad():
        layer.weight.mul_(0.5)
    assert torch.equal(graphed(x), first)
    mark_first_microbatch(layer)
    assert not torch.equal(graphed(x), first)
    (row,) = graphed.forward.report().rows
    assert row.num_replays == 3
    graphed.forward.reset()


def test_a_failed_capture_leaves_the_state(device: torch.device) -> None:
    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            return result * result.sum().item()

    block = Reading().to(device)
    block(torch.randn(ROWS, WIDE, device=device)).sum().backward()
    block.zero_grad()
    before = state_of(block)
    with pytest.raises(graphstep.CaptureError):
        graphstep.make_graphed_callables(block, (torch.ones(ROWS, WIDE, device=device, requires_grad=True),))
    assert not differences([before], [state_of(block)])


def test_loading_a_checkpoint_between_replays(device: torch.device) -> None:
    """Buffers are loaded in place, where graphs look for them."""
    layer = Float8Linear(WIDE, WIDE, recipe=RECIPES[0], caches_weight=True).to(device)
    graphed = graphstep.make_graphed_callables(layer, (torch.ones(ROWS, WIDE, device=device),))
    data = torch.randn(8, ROWS, WIDE, device=device)

    def run(turns: range) -> list[Tensor]:
        found = []
        for turn in turns:
            mark_first_microbatch(layer)
            layer.zero_grad()
            result = graphed(data[turn])
            result.square().mean().backward()
            found += [result.detach().clone(), layer.weight.grad.clone(), layer.scale.clone()]
            del result
        return found

    run(range(4))
    kept = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = run(range(4, 8))
    layer.load_state_dict(kept)
    assert all(map(torch.equal, run(range(4, 8)), expected))
    graphed.forward.reset()


class Model(nn.Module):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inp, self.layers = nn.Linear(4, WIDE), nn.ModuleList([build() for _ in range(3)])
        self.out = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.out(x).square().mean()
        return result


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("together", [True, False])
def test_attached_to_a_loop(device: torch.device, caches: bool, num_microbatches: int, together: bool) -> None:
    """``graphstep.attach``; with microbatches that follow each other, and all in flight at once."""

    def run(graphs: bool) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Model(partial(Block, RECIPES[0], caches)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = torch.Generator().manual_seed(1)
        trace = []
        manager = graphstep.attach(model, regions={"layers.*": "layer"}) if graphs else None
        for step in range(7):
            optimizer.zero_grad()
            mark_first_microbatch(model)
            losses: list[Tensor] = []
            for _ in range(num_microbatches):
                batch = torch.randn(ROWS, 4, generator=data).to(device) * (step + 1)
                losses.append(model(batch))
                if not together:
                    losses[-1].backward()
            if together:
                torch.stack(losses).sum().backward()
            found = {"loss": torch.stack(losses).detach().clone(), **state_of(model)}
            found.update((name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)
            trace.append(found)
            del losses
            optimizer.step()
        if manager is not None:
            rows = manager.report().rows
            assert all(row.num_replays >= 5 * num_microbatches for row in rows), manager.report()
            manager.close()
        return trace

    different = differences(run(False), run(True))
    assert not different, different[:6]


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("merge", [1, 0])
def test_the_reference_model_with_its_segments(device: torch.device, num_microbatches: int, merge: int) -> None:
    def run(graphs: bool) -> list[dict[str, Tensor]]:
        model: GPTModel = tiny_model(GPT2, fp8=RECIPES[0]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = CudaGraphConfig(impl="local", modules=("attn", "mlp"), merge_layers=merge, policy="required")
        manager = graphstep.attach(model, config) if graphs else None
        trace = []
        for step in range(7):
            optimizer.zero_grad()
            mark_first_microbatch(model)
            for number in range(num_microbatches):
                batch = tiny_batch(GPT2, seed=10 * step + number)
                loss = model(**{name: tensor.to(device) for name, tensor in batch.items()})
                loss.backward()
            found = {"loss": loss.detach().clone(), **state_of(model)}
            found.update((name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)
            trace.append(found)
            del loss
            optimizer.step()
        if manager is not None:
            assert all(row.num_replays >= 4 * num_microbatches for row in manager.report().rows), manager.report()
            manager.close()
        return trace

    different = differences(run(False), run(True))
    assert not different, different[:6]
