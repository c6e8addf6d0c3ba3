"""The same model in the code of Hugging Face's transformers, with the same weights, as a peer.

Shapes: B batch, S sequence, H hidden, E experts, F width inside an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graphstep.models import GPTModel
from graphstep.models.head import token_cross_entropy

if TYPE_CHECKING:
    from common.case import Case


def why_no_twin(case: Case) -> str | None:
    """Why transformers has no model of this shape, or None."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed"
    del transformers
    model, moe = case.config.model, case.config.moe
    if case.config.layers.hybrid_layer_pattern is not None or not moe.num_experts or moe.moe_layer_freq != 1:
        return "only models with experts in every layer have a twin in transformers here"
    fits = (
        model.swiglu
        and model.normalization == "RMSNorm"
        and model.position_embedding_type == "rope"
        and model.rotary_percent == 1.0
        and not model.add_bias_linear
        and not model.qk_layernorm
        and moe.moe_shared_expert_intermediate_size is None
        and moe.moe_router_score_function == "softmax"
        and moe.moe_router_load_balancing_type == "none"
    )
    has = "RMSNorm, rope, SwiGLU, a softmax router, no biases and no shared expert, and its --qk-layernorm is left out"
    return None if fits else f"Qwen3-MoE has {has}"


class QwenTwin(nn.Module):
    """Qwen3-MoE of transformers with the weights of ours; called as ours is: tokens and labels in, mean loss out.

    Experts run through its ``grouped_mm`` path, attention through scaled dot-product attention. Its normalisation of
    queries and keys, which the cases have not, is left out, so that the two compute the same.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        model, moe = case.config.model, case.config.moe
        config = Qwen3MoeConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_query_groups,
            head_dim=model.kv_channels,
            max_position_embeddings=model.max_position_embeddings,
            rms_norm_eps=model.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
            tie_word_embeddings=not model.untie_embeddings_and_output_weights,
            moe_intermediate_size=moe.moe_ffn_hidden_size or model.ffn_hidden_size,
            num_experts=moe.num_experts,
            num_experts_per_tok=moe.moe_router_topk,
            norm_topk_prob=True,
            use_cache=False,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )
        with torch.device("meta"):
            self.twin = Qwen3MoeForCausalLM(config)
        self.twin.to_empty(device="cpu").to(torch.bfloat16 if case.config.training.bf16 else torch.float32)
        for name, buffer in type(self.twin.model.rotary_emb)(config).named_buffers():
            self.twin.model.rotary_emb.register_buffer(name, buffer.clone(), persistent=False)
        copy_weights(case.origin, self.twin)
        self.to(case.device).train()

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross entropy, as of ours."""
        return token_cross_entropy(self.twin(input_ids=tokens_BS).logits, labels_BS)


@torch.no_grad()
def copy_weights(ours: GPTModel, twin: Any) -> None:
    """Fill a Qwen3-MoE with the weights of a model of ours; both on the CPU."""
    state = ours.state_dict()
    twin.model.embed_tokens.weight.copy_(state["embedding.weight"])
    twin.model.norm.weight.copy_(state["head.norm.weight"])
    if "head.weight" in state:
        twin.lm_head.weight.copy_(state["head.weight"])
    heads, groups, channels = (
        ours.config.num_attention_heads,
        ours.config.num_query_groups,
        ours.config.kv_channels,
    )
    rows = (heads * channels, groups * channels, groups * channels)
    for number, layer in enumerate(twin.model.layers):
        part = {name.removeprefix(f"layers.{number}."): value for name, value in state.items()}
        attention = layer.self_attn
        for projection, weight in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj),
            part["attention.qkv.weight"].split(rows),
            strict=True,
        ):
            projection.weight.copy_(weight)
        attention.o_proj.weight.copy_(part["attention.out.weight"])
        attention.q_norm, attention.k_norm = nn.Identity(), nn.Identity()
        layer.input_layernorm.weight.copy_(part["attention_norm.weight"])
        layer.post_attention_layernorm.weight.copy_(part["moe_norm.weight"])
        layer.mlp.gate.weight.copy_(part["moe.router.weight"])
        layer.mlp.experts.gate_up_proj.copy_(part["moe.experts.up"].transpose(1, 2))
        layer.mlp.experts.down_proj.copy_(part["moe.experts.down"].transpose(1, 2))
