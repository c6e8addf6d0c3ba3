"""Tiny random models of transformers, and a training loop whose trace is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import graphstep
from graphstep.capture.report import CaptureReport
from graphstep.config import CudaGraphConfig

pytest.importorskip("transformers")

COMMON: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS: Mapping[str, Any] = {**COMMON, "head_dim": 8}
MOE: Mapping[str, Any] = {**HEADS, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": HEADS,
    "qwen2": COMMON,
    "qwen3": HEADS,
    "mistral": {**HEADS, "sliding_window": 4},
    "gemma": HEADS,
    "gemma2": {**HEADS, "sliding_window": 4},
    "gemma3_text": {**HEADS, "sliding_window": 4},
    "gpt2": {
        **{"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
        **{"bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM"},
    },
    # These two hand the cache to their layers by another name.
    "gpt_neox": {**COMMON, "hidden_dropout": 0.0},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4, "pad_token_id": 0},
    "mixtral": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": MOE,
    "deepseek_v3": {
        **COMMON,
        **{"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 16},
        **{"qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8},
    },
    "mamba2": {
        **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "head_dim": 8},
        **{"num_heads": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    },
}
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
PARTIAL = ("attn", "moe_router", "moe_preprocess")

Prepare = Callable[[Any], Any]


def build(family: str, device: torch.device, **options: Any) -> Any:
    """A model in training mode, the same for the same arguments."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **options})
    return AutoModelForCausalLM.from_config(config).to(device).train()


class Loop:
    """A training loop; what it leaves is in ``trace``."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        self.generator = torch.Generator().manual_seed(1)
        self.trace: list[Tensor] = []

    def tokens(self, num_rows: int = 2, length: int = 12) -> Tensor:
        """Other ones in each call."""
        return torch.randint(3, 64, (num_rows, length), generator=self.generator).to(self.device)

    def step(self, num_microbatches: int = 1, *, num_rows: int = 2, length: int = 12, **named: Any) -> None:
        """Forward and backward of each microbatch, then an update. ``named`` may have functions of the tokens."""
        self.optimizer.zero_grad()
        for _ in range(num_microbatches):
            tokens = self.tokens(num_rows, length)
            given = {name: value(tokens) if callable(value) else value for name, value in named.items()}
            result = self.model(**{"input_ids": tokens, "labels": tokens, **given})
            result.loss.backward()
            self.trace.append(result.loss.detach().clone())
        self.trace += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()


def steps(number: int = 6, **named: Any) -> Callable[[Loop], None]:
    """A script of equal steps with changing inputs."""

    def script(loop: Loop) -> None:
        for _ in range(number):
            loop.step(**named)

    return script


def twins(
    family: str,
    device: torch.device,
    script: Callable[[Loop], Any] = steps(),  # noqa: B008
    *,
    prepare: Prepare = lambda model: model,
    modules: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    regions: Mapping[str, str] | None = None,
    **options: Any,
) -> CaptureReport:
    """Run a script eagerly and attached, insist on the same bits, and return the report."""
    traces = []
    reports = []
    for graphs in (False, True):
        model = prepare(build(family, device, **options))
        torch.manual_seed(7)
        loop = Loop(model, device)
        if graphs:
            captured = CudaGraphConfig(impl="local", modules=tuple(modules), **(config or {}))
            with graphstep.attach(model, captured, regions=regions) as manager:
                script(loop)
                reports.append(manager.report())
        else:
            script(loop)
        traces.append([*loop.trace, *(p.detach().clone() for p in model.parameters())])
    assert len(traces[0]) == len(traces[1])
    different = [index for index, pair in enumerate(zip(*traces, strict=True)) if not torch.equal(*pair)]
    assert different == []
    return reports[0]


def eager_reasons(report: CaptureReport) -> set[str]:
    """Codes of why calls ran eagerly."""
    return {reason.code for row in report.rows for reason, count in row.eager_calls.items() if count}
