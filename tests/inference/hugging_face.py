"""Tiny random models of transformers, saved as it saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 61
POSITIONS = 48
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.4,  # Small weights give logits that are nearly equal.
    "eos_token_id": 7,
    "bos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "qwen3 experts": (
        "Qwen3Moe",
        {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16, "norm_topk_prob": True, **_EXPERTS},
    ),
    "qwen3 experts in some layers": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            **_EXPERTS,
        },
    ),
}


def build(kind: str, **changes: Any) -> Any:
    """A model with every weight at random: biases and norms, too, which start as zeros and ones."""
    import transformers

    name, options = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **options, **changes})
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 3:
                parameter.normal_(0.0, 0.4)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save as a user would."""
    model.save_pretrained(folder, **options)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of bytes with a few words in it: token 0 goes in front of texts, token 1 ends them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<begin>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world hello there"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
