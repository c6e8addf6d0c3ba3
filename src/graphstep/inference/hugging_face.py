"""What a ``config.json`` of Hugging Face says about a model, as a configuration of ours.

Known are Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE. Names of fields: the configurations of transformers 4
and 5. What would change the result and is not supported is refused, all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.errors import ConfigError, Problem
from graphstep.inference.rope_scaling import Rotation, read_rotation, rotation_problems

_KINDS: Final = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_ACTIVATIONS: Final = ("silu", "swish")
_ALWAYS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_MOST_LAYERS: Final = 10_000
_FRACTIONS: Final = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
_SWITCHES: Final = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window")
_USUAL_EPSILON: Final[Mapping[str, float]] = {"mixtral": 1e-5}
"""What transformers takes where a configuration leaves it out; otherwise 1e-6."""
_USUAL_THETA: Final[Mapping[str, float]] = {"mixtral": 1e6}
"""Likewise; otherwise 10000."""


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A model of Hugging Face in our words."""

    model: ModelConfig
    moe: MoEConfig
    layers_with_experts: tuple[bool, ...]
    stop_tokens: tuple[int, ...]
    """Tokens that end a text."""
    rotation: Rotation
    """What its rotary tables are filled with."""

    def untied(self) -> HuggingFaceModel:
        """The same with a head of its own, whatever the configuration says."""
        return replace(self, model=replace(self.model, untie_embeddings_and_output_weights=True))


def read_config(
    config: Mapping[str, Any], *, where: str, max_positions: int | None = None, limit_option: str = "max_positions"
) -> HuggingFaceModel:
    """Translate a configuration.

    Args:
        config: content of ``config.json``.
        where: names it in errors.
        max_positions: the longest sequence that is wanted, where that is less than the model can have. It saves the
            memory of tables, and makes a model with a wider sliding window usable.
        limit_option: what sets it, for errors.

    Raises:
        ConfigError: another architecture, or what the reference model does not have; all problems at once.
    """
    problems = [Problem("hugging-face-model", what, where, fix) for what, fix in _problems(config, max_positions)]
    if problems:
        problems = [
            Problem(each.code, each.what, each.where, each.fix.replace("{limit}", limit_option)) for each in problems
        ]
        raise ConfigError(problems)
    positions = config["max_position_embeddings"]
    positions = positions if max_positions is None else min(positions, max_positions)
    try:
        return _translated(config, positions)
    except ConfigError as error:  # Sizes that do not fit each other; the rules name our options.
        found = [Problem(each.code, each.what, f"{where} ({each.where})", "check the file") for each in error.problems]
        raise ConfigError(found) from error


def stop_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text, of a ``config.json`` or ``generation_config.json``; empty if it names none."""
    found = config.get("eos_token_id")
    each = found if isinstance(found, list) else [found]
    return tuple(token for token in each if isinstance(token, int) and not isinstance(token, bool) and token >= 0)


def _translated(config: Mapping[str, Any], positions: int) -> HuggingFaceModel:
    kind, heads = config["model_type"], config["num_attention_heads"]
    moe, with_experts = MoEConfig(), (False,) * config["num_hidden_layers"]
    if _num_experts(config) is not None:
        moe, with_experts = _experts(config)
    model = ModelConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"],
        seq_length=positions,
        max_position_embeddings=positions,
        vocab_size=config["vocab_size"],
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=config.get("rms_norm_eps") or _USUAL_EPSILON.get(kind, 1e-6),
        position_embedding_type="rope",
        rotary_base=_base(config),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=bool(config.get("attention_bias")),
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind.startswith("qwen3"),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
    )
    return HuggingFaceModel(model, moe, with_experts, stop_tokens(config), read_rotation(_rope(config), config))


def _problems(config: Mapping[str, Any], max_positions: int | None) -> Iterator[tuple[str, str]]:
    """What is wrong, and what to do."""
    other = "use a model without"
    kind = config.get("model_type")
    if kind not in _KINDS:
        yield f"an architecture of type {kind!r}, which is not known here", f"use one of: {', '.join(_KINDS)}"
        return  # Fields of others can mean anything.
    wrong = [name for name in _ALWAYS if not _is_count(config.get(name))]
    # A number that is wrong must not fill the memory with what is known of each layer.
    wrong += ["num_hidden_layers"] if not wrong and config["num_hidden_layers"] > _MOST_LAYERS else []
    if kind == "qwen3_moe" and not _is_count(config.get("moe_intermediate_size")):
        wrong.append("moe_intermediate_size")
    if kind in ("mixtral", "qwen3_moe"):
        wrong += [] if _num_experts(config) is not None else ["num_experts"]
        wrong += [] if _is_count(config.get("num_experts_per_tok")) else ["num_experts_per_tok"]
    # Where these are left out, transformers takes numbers that suit one model of the family.
    wrong += ["num_key_value_heads"] if kind != "llama" and "num_key_value_heads" not in config else []
    wrong += ["head_dim"] if kind == "qwen3" and "head_dim" not in config else []
    wrong += [name for name in ("num_key_value_heads", "head_dim") if not _is_count(config.get(name) or 1)]
    wrong += [name for name in ("rope_parameters", "rope_scaling") if not isinstance(config.get(name) or {}, dict)]
    wrong += [name for name in ("layer_types", "mlp_only_layers") if not isinstance(config.get(name) or [], list)]
    wrong += [name for name in ("sliding_window", "decoder_sparse_step") if not _is_count_or_none(config.get(name))]
    wrong += [name for name in _SWITCHES if not isinstance(config.get(name), bool | None)]
    wrong += [name for name in _FRACTIONS if not all(_is_positive(of.get(name)) for of in (config, *_dicts(config)))]
    wrong += ["rope_theta"] if "rope_theta" not in wrong and _base(config) <= 1 else []
    if wrong:
        yield f"numbers that are missing or malformed: {', '.join(wrong)}", "download config.json again"
        return
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        yield f"the activation {activation}; known is {_ACTIVATIONS[0]}", other
    rope = _rope(config)
    if any(isinstance(part, dict) for part in rope.values()):
        yield "another rotation for each type of layer", other
    else:
        yield from rotation_problems(rope, "rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        yield "a rotation of a part of the channels", other
    yield from _attention_problems(config, max_positions)
    if config.get("quantization_config") is not None:
        yield "weights that are quantised", "use the model in bfloat16"


def _attention_problems(config: Mapping[str, Any], max_positions: int | None) -> Iterator[tuple[str, str]]:
    kind, other = config["model_type"], "use a model without"
    positions = config["max_position_embeddings"]
    longest = positions if max_positions is None else min(positions, max_positions)
    window = config.get("sliding_window")
    layer_types = config.get("layer_types") or []
    is_used = config.get("use_sliding_window", True) if kind.startswith("qwen") else True
    if (is_used or "sliding_attention" in layer_types) and window is not None and window < longest:
        yield (
            f"a sliding window of {window} tokens, for up to {longest}; attention is to all tokens here",
            f"keep sequences within the window: {{limit}} {window}",
        )
    others = sorted({str(each) for each in layer_types} - {"full_attention", "sliding_attention"})
    if others:
        yield f"layers of the types {', '.join(others)}", other
    if kind == "llama" and bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        yield (
            "biases in attention alone or in the MLP alone (attention_bias, mlp_bias)",
            "use one with both or none",
        )
    elif kind != "llama" and config.get("attention_bias"):
        yield "biases in attention (attention_bias)", other


def _experts(config: Mapping[str, Any]) -> tuple[MoEConfig, tuple[bool, ...]]:
    is_mixtral = config["model_type"] == "mixtral"
    dense = config.get("mlp_only_layers") or []
    every = config.get("decoder_sparse_step") or 1
    layers = range(config["num_hidden_layers"])
    with_experts = tuple(is_mixtral or (layer not in dense and (layer + 1) % every == 0) for layer in layers)
    if not any(with_experts):
        return MoEConfig(), with_experts
    moe = MoEConfig(
        num_experts=_num_experts(config),
        moe_layer_freq=tuple(map(int, with_experts)),
        moe_ffn_hidden_size=config["intermediate_size" if is_mixtral else "moe_intermediate_size"],
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_load_balancing_type="none",
        # Weights of the chosen that add up to one are the softmax over the chosen.
        moe_router_pre_softmax=not (is_mixtral or config.get("norm_topk_prob", False)),
        moe_grouped_gemm=True,
    )
    return moe, with_experts


def _num_experts(config: Mapping[str, Any]) -> int | None:
    if config["model_type"] not in ("mixtral", "qwen3_moe"):
        return None
    found = (config.get(name) for name in ("num_local_experts", "num_experts"))
    return next((number for number in found if _is_count(number)), None)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _base(config: Mapping[str, Any]) -> float:
    """Of the rotation frequencies; only for a configuration whose numbers are numbers."""
    usual = _USUAL_THETA.get(config["model_type"], 1e4)
    found = [of.get("rope_theta") for of in (*_dicts(config), config)]
    return next((float(each) for each in found if isinstance(each, int | float)), usual)


def _is_count_or_none(value: object) -> bool:
    return value is None or _is_count(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _dicts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rope = _rope(config)
    return [rope] if isinstance(rope, dict) else []


def _is_positive(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30)
