"""A whole step of a model of transformers as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.hugging_face.tiny import build
from torch import Tensor

import graphstep
from graphstep.errors import CaptureError, ConfigError, InputMismatchError
from graphstep.hugging_face import use_causal_attention


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trace(
    family: str, device: torch.device, *, graphs: bool, causal: bool = True, **options: Any
) -> tuple[list[Tensor], int]:
    model = build(family, device, **options)
    if device.type == "cuda":
        model = model.to(torch.bfloat16)  # grouped products of fp32 read on the host there
    if causal and graphs:
        use_causal_attention(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)
    step = step_of(model, optimizer)
    graphed = graphstep.graph_step(step, modules=[model]) if graphs else None
    generator = torch.Generator().manual_seed(1)
    losses = [
        (graphed or step)(torch.randint(3, 64, (2, 12), generator=generator).to(device)).clone() for _ in range(8)
    ]
    num_replays = 0
    if graphed is not None:
        num_replays = graphed.report().rows[0].num_replays
        graphed.close()
    return [*losses, *(p.detach().clone() for p in model.parameters())], num_replays


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_one_graph(device: torch.device, family: str, use_cache: bool) -> None:
    """Equal to the eager step with transformers' own attention, which needs no mask either."""
    options = {"use_cache": use_cache}
    if family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        options["experts_implementation"] = "grouped_mm"  # type: ignore[assignment]
    expected, _ = trace(family, device, graphs=False, **options)
    found, num_replays = trace(family, device, graphs=True, **options)
    assert num_replays == 5
    assert all(map(torch.equal, expected, found))


def test_mamba(device: torch.device) -> None:
    expected, _ = trace("mamba2", device, graphs=False)
    found, num_replays = trace("mamba2", device, graphs=True, causal=False)
    assert num_replays == 5
    assert all(map(torch.equal, expected, found))


def test_a_loop_over_experts_is_refused(device: torch.device) -> None:
    with pytest.raises(CaptureError, match=r"nonzero|host"):
        trace("qwen3_moe", device, graphs=True, experts_implementation="eager")


def test_causal_attention_refuses_padding(device: torch.device) -> None:
    model = build("llama", device)
    use_causal_attention(model)
    tokens = torch.arange(8, device=device)[None].expand(2, -1)
    mask = torch.ones_like(tokens)
    with pytest.raises(InputMismatchError, match="mask of padding"):
        model(tokens, attention_mask=mask)
    with torch.no_grad():
        assert torch.equal(model(tokens, attention_mask=mask).logits, model(tokens).logits)
        mask[0, 0] = 0
        with pytest.raises(InputMismatchError, match="mask of padding"):
            model(tokens, attention_mask=mask)
    model.set_attn_implementation("sdpa")
    model(tokens, attention_mask=mask)


def test_causal_attention_generates_the_same(device: torch.device) -> None:
    model = build("llama", device).eval()
    tokens = torch.arange(3, 9, device=device)[None]
    before = model.generate(tokens, max_new_tokens=5, do_sample=False)
    use_causal_attention(model)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), before)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_causal_attention_needs_a_causal_model(device: torch.device, family: str) -> None:
    with pytest.raises(ConfigError, match="sliding window"):
        use_causal_attention(build(family, device))
