"""The fp8 arguments of ``make_graphed_callables`` with layers of this package, where nothing else is installed."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.strategies.callables.jobs import Job, compared
from tests.strategies.callables.test_fp8_linear import ROWS, WIDE, Block, state_of
from tests.strategies.runs import differences
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, ConfigError, InputMismatchError
from graphstep.models import DelayedScaling, Float8Linear, mark_first_microbatch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="transformer_engine is installed"
)
NAMES = [
    ("fp8_enabled", "fp8_recipe", "fp8_weight_caching"),
    ("enabled", "recipe", "cache_quantized_params"),
]


def uncached() -> Block:
    return Block(caches_weight=False)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_weight_caching_with_the_flag_at_each_call(
    device: torch.device, names: tuple[str, str, str], is_ordered: bool
) -> None:
    recipe = DelayedScaling(amax_history_len=2, margin=1)

    def script(job: Job) -> None:
        block = job.built(uncached)
        for layer in (block.up, block.down):
            if not job.graphs:
                layer.use_recipe(recipe, caches_weight=True)
        sample = (job.sample(ROWS, WIDE, requires_grad=True),)
        options = dict(zip(names, (True, recipe, True), strict=True))
        if is_ordered:
            places = job.graphed((block,), [sample] * 2, _order=[1, -1, 1, -1], **options)
        else:
            places = [job.graphed(block, sample, **options)] * 2
        optimizer = job.optimizer(lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            for number, place in enumerate(places):
                x = (job.draw(ROWS, WIDE) * (step + 1)).detach().requires_grad_()
                if job.graphs:
                    result = place(x, is_first_microbatch=number == 0)
                else:
                    if number == 0:
                        mark_first_microbatch(block)
                    result = place(x)
                result.square().mean().backward()
                job.note(x=x, result=result, **{f"state {n}": b for n, b in state_of(block).items()})
                del result
            optimizer.step()

    compared(device, script, replays=12)


def test_the_flag_has_to_be_given(device: torch.device) -> None:
    layer = Float8Linear(WIDE, WIDE).to(device)
    x = torch.ones(ROWS, WIDE, device=device)
    graphed = graphstep.make_graphed_callables(layer, (x,), fp8_enabled=True, fp8_weight_caching=True)
    for named in ({}, {"is_first_microbatch": 1}, {"is_first_microbatch": None}):
        with pytest.raises(InputMismatchError, match="is_first_microbatch"):
            graphed(x, **named)
    graphed(x, is_first_microbatch=True)
    graphed.forward.reset()
    assert not layer.caches_weight, "nobody says which microbatch is the first any more"
    graphed(x)


def test_evaluation_between_microbatches_begins_no_step(device: torch.device) -> None:
    layer = Float8Linear(WIDE, WIDE).to(device)
    x = torch.ones(ROWS, WIDE, device=device)
    graphed = graphstep.make_graphed_callables(layer, (x,), fp8_enabled=True, fp8_weight_caching=True)
    graphed(x, is_first_microbatch=True)
    layer.eval()
    graphed(x, is_first_microbatch=True)
    assert bool(layer.skip_weight_update)
    layer.train()
    graphed.forward.reset()


def test_a_recipe_of_transformer_engine(device: torch.device) -> None:
    layer = Float8Linear(WIDE, WIDE).to(device)
    recipe = SimpleNamespace(
        fp8_format=SimpleNamespace(name="HYBRID"), margin=0, amax_history_len=16, amax_compute_algo="max"
    )
    x = torch.ones(ROWS, WIDE, device=device)
    graphed = graphstep.make_graphed_callables(layer, (x,), fp8_enabled=True, fp8_recipe=recipe)
    assert layer.amax_history.shape == (16, 3)
    graphed(x).sum().backward()
    assert graphed.forward.report().rows[0].num_replays == 1
    graphed.forward.reset()


def test_a_failed_capture_gives_recipe_and_state_back(device: torch.device) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Float8Linear(WIDE, WIDE)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x)
            return result * result.sum().item()

    module = Reading().to(device)
    module.inner(torch.randn(ROWS, WIDE, device=device)).sum().backward()
    before, recipe = state_of(module), module.inner.recipe
    with pytest.raises(CaptureError):
        graphstep.make_graphed_callables(
            module,
            (torch.ones(ROWS, WIDE, device=device, requires_grad=True),),
            fp8_enabled=True,
            fp8_weight_caching=True,
            fp8_recipe=DelayedScaling(amax_history_len=2),
        )
    assert not differences([before], [state_of(module)])
    assert (module.inner.recipe, module.inner.caches_weight) == (recipe, False)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"fp8_enabled": True}, ["callables[1] has no layer that multiplies in fp8", "Float8Linear"]),
        ({"fp8_enabled": [True]}, ["1 values for 2 callables"]),
        ({"fp8_enabled": [True, False], "fp8_calibrating": True, "fp8_group": "g"}, ["calibrate", "reduce_amax"]),
        ({"fp8_weight_caching": True}, ["fp8_weight_caching: it is given without fp8_enabled"]),
        ({"fp8_enabled": False, "fp8_calibrating": True}, ["fp8_calibrating: it is given without fp8_enabled"]),
        ({"recipe": DelayedScaling(), "fp8_group": "g"}, ["fp8_recipe: it is given", "fp8_group: it is given"]),
        ({"fp8_recipe": None, "recipe": None, "enabled": False, "fp8_enabled": False}, ["fp8_recipe", "fp8_enabled"]),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], texts: list[str]) -> None:
    modules = (Float8Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
    samples = ((torch.ones(ROWS, WIDE),),) * 2
    with pytest.raises(ConfigError) as caught:
        graphstep.make_graphed_callables(modules, samples, **options)
    for text in texts:
        assert text in str(caught.value)


def test_a_recipe_may_wait_for_a_switch_that_is_off(device: torch.device) -> None:
    module, sample = nn.Linear(WIDE, WIDE, device=device), torch.ones(ROWS, WIDE, device=device)
    graphed = graphstep.make_graphed_callables(module, (sample,), fp8_enabled=False, fp8_recipe=DelayedScaling())
    graphed.forward.reset()


def test_a_recipe_of_another_kind_leaves_the_layer(device: torch.device) -> None:
    layer = Float8Linear(WIDE, WIDE).to(device)
    before = layer.recipe
    with pytest.raises(ConfigError, match="no recipe of delayed scaling"):
        graphstep.make_graphed_callables(
            layer, (torch.ones(ROWS, WIDE, device=device),), fp8_enabled=True, fp8_recipe=object()
        )
    assert layer.recipe is before
