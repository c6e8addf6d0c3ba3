"""A model given as one region: its loss is computed from its logits inside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hugging_face.tiny import Loop, build, eager_reasons, steps, twins
from torch import Tensor

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.hugging_face import use_causal_attention

WHOLE = {"": "model"}


def causal(model: Any) -> Any:
    use_causal_attention(model)
    return model


def padding(tokens: Tensor) -> Tensor:
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return mask


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "named", [{}, {"attention_mask": padding}, {"output_hidden_states": True}], ids=["plain", "mask", "hidden states"]
)
def test_the_backward_is_a_launch(device: torch.device, family: str, named: dict[str, Any]) -> None:
    prepare = (lambda model: model) if "attention_mask" in named else causal
    report = twins(family, device, steps(6, **named), prepare=prepare, regions=WHOLE, use_cache=False)
    (row,) = report.rows
    assert eager_reasons(report) == {"observed"}
    assert (row.num_replays, row.num_launches) == (5, 2 * 5)


def test_logits_of_routers() -> None:
    """Each is read by its layer, and by a further loss that is computed inside as well.

    Not on a GPU: some versions count tokens for that loss in a way that a GPU refuses to capture.
    """
    device = torch.device("cpu")
    script, options = steps(6, output_router_logits=True), {"use_cache": False, "experts_implementation": "grouped_mm"}
    report = twins("qwen3_moe", device, script, prepare=causal, regions=WHOLE, **options)
    (row,) = report.rows
    assert eager_reasons(report) == {"observed"}
    assert (row.num_replays, row.num_launches) == (5, 2 * 5)


def test_a_loss_over_the_logits_too(device: torch.device) -> None:
    """In some steps only, which are computed again and counted."""

    def run(model: Any) -> list[Tensor]:
        loop = Loop(model, device)
        for number in range(6):
            tokens = loop.tokens()
            result = model(input_ids=tokens, labels=tokens)
            loss = result.loss + (1e-3 * result.logits.logsumexp(-1).square().mean() if number in (2, 4) else 0)
            del result
            loss.backward()
            loop.trace += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            del loss
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loop.trace

    expected = run(causal(build("llama", device, use_cache=False)))
    model = causal(build("llama", device, use_cache=False))
    with graphstep.attach(model, CudaGraphConfig(impl="local"), regions=WHOLE) as manager:
        found = run(model)
        (row,) = manager.report().rows
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    assert {reason.code: count for reason, count in row.eager_calls.items()} == {"observed": 1, "partial-backward": 2}
    assert row.last_detail.startswith("result['logits'] of ")
    assert (row.num_replays, row.num_launches) == (5, 5 + 3)
