"""Tiny models of each kind, and the plain way to generate with them: the whole sequence again for every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from graphstep.config import InferenceConfig, InferenceCudaGraphScope
from graphstep.config.layers import LayersConfig
from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.requests import DrawNeeds, SamplingParams, draw_key
from graphstep.inference.sampling import DrawSettings, sample
from graphstep.models import GPTModel

VOCABULARY = 40
LONGEST = 32
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=48,
    seq_length=LONGEST,
    vocab_size=VOCABULARY,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    init_method_std=0.4,
)
"""Wide weights: the logits of a model with small ones are nearly equal, and the best token a matter of rounding."""
GPT2 = replace(
    LLAMA,
    num_query_groups=4,
    swiglu=False,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    add_bias_linear=True,
    untie_embeddings_and_output_weights=False,
)
EXPERTS = MoEConfig(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, moe_grouped_gemm=True)
ONE_BY_ONE = replace(EXPERTS, moe_grouped_gemm=False, moe_shared_expert_intermediate_size=16)
MAMBA = MambaConfig(mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2)
HYBRID = LayersConfig(hybrid_layer_pattern="M*-M")
MODELS = ("gpt", "llama", "moe", "moe one by one", "hybrid")


def build_model(kind: str, device: torch.device | str = "cpu", **changes: Any) -> GPTModel:
    config, options = LLAMA, {}
    if kind == "gpt":
        config = GPT2
    elif kind.startswith("moe"):
        options = {"moe": ONE_BY_ONE if "one by one" in kind else EXPERTS}
    elif kind == "hybrid":
        config, options = replace(LLAMA, num_layers=4), {"layers": HYBRID, "mamba": MAMBA}
    config = replace(config, **changes) if changes else config
    return GPTModel(config, generator=torch.Generator().manual_seed(7), device=device, **options).eval()


def build_engine(
    model: GPTModel,
    scope: str = "none",
    *,
    max_requests: int = 4,
    max_tokens: int = 16,
    num_blocks: int = 64,
    is_required: bool = True,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> DynamicEngine:
    inference = InferenceConfig(
        inference_dynamic_batching=True,
        inference_dynamic_batching_num_cuda_graphs=2,
        inference_dynamic_batching_max_requests=max_requests,
        inference_dynamic_batching_max_tokens=max_tokens,
        inference_dynamic_batching_block_size=4,
        inference_cuda_graph_max_tokens=max_tokens,
        **(options or {}),
    )
    more.setdefault("captures_at_start", False)
    config = EngineConfig(
        inference=inference,
        scope=InferenceCudaGraphScope(scope),
        num_blocks=num_blocks,
        is_required=is_required,
        **more,
    )
    return DynamicEngine(model, config)


@torch.no_grad()
def reference(model: GPTModel, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """Tokens by the training forward over the whole sequence, one after the other. The request needs a seed."""
    device = model.embedding.weight.device
    tokens = list(prompt)
    needs = DrawNeeds.of_flags([sampling.draw_flags])
    for _ in range(sampling.max_new_tokens):
        logits = model(torch.tensor([tokens], device=device))[0, -1:]
        settings = DrawSettings(
            torch.tensor([draw_key(sampling.seed or 0)], device=device),
            torch.tensor([sampling.temperature], device=device),
            torch.tensor([sampling.top_p], device=device),
            torch.tensor([sampling.top_k], dtype=torch.int32, device=device),
            torch.tensor([len(tokens)], device=device),
        )
        tokens.append(int(sample(logits, settings, needs).tokens))
        if tokens[-1] in sampling.stop_tokens or len(tokens) >= LONGEST:
            break
    return tokens[len(prompt) :]


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0, **options)


def seeded(num_tokens: int, seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0.9, top_k=12, top_p=0.9, seed=seed, **options)


def prompts(*lengths: int, seed: int = 3, first: int = 1) -> list[list[int]]:
    """Random prompts without the token of padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(first, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
