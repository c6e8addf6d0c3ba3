"""Rules about layers, kernels and number formats."""

from __future__ import annotations

from typing import Any

from graphstep.config.layer_pattern import is_layer_pattern, pattern_fault, pattern_layers
from graphstep.config.rules.graphs import has_experts
from graphstep.config.rules.rule import Rule, at_least, idle, no_effect, optional, words_of

_FLASHINFER = (0, 6, 4)


def _without_biases(options: Any) -> dict[str, str]:
    missing = (
        ("--normalization RMSNorm", options.normalization != "RMSNorm"),
        ("--disable-bias-linear", options.add_bias_linear),
    )
    added = " ".join(word for word, is_missing in missing if is_missing)
    changes = [f"add {added}"] if added else []
    changes += ["leave --add-qkv-bias out"] if options.add_qkv_bias else []
    return {"changes": " and ".join(changes)}


LAYER_RULES: tuple[Rule, ...] = (
    *words_of(
        "transformer_impl",
        "cross_entropy_fusion_impl",
        "fp8_format",
        "fp8_recipe",
        "fp4_format",
        "fp4_recipe",
        "optimizer",
        "dataloader_type",
    ),
    optional("mtp_num_layers", lambda v: v >= 1, "at least 1", "leave it out for none"),
    optional("loss_scale", lambda v: v > 0, "above 0", "leave it out for dynamic loss scaling"),
    at_least(0, "timing_log_level", "use 0 for no timers"),
    Rule(
        # Not the range of a value that no other rule may look at: what its known letters ask for is told as well.
        code="hybrid-layer-pattern-range",
        fields=("hybrid_layer_pattern",),
        broken=lambda o: o.hybrid_layer_pattern is not None and not is_layer_pattern(o.hybrid_layer_pattern),
        details=lambda o: {"fault": pattern_fault(o.hybrid_layer_pattern)},
        what="--hybrid-layer-pattern {hybrid_layer_pattern} cannot be read: {fault}",
        fix="write a letter a layer: M for Mamba, * for attention, - for an MLP, E for experts",
    ),
    Rule(
        code="hybrid-num-layers",
        fields=("hybrid_layer_pattern", "num_layers"),
        broken=lambda o: (
            o.hybrid_layer_pattern is not None
            and is_layer_pattern(o.hybrid_layer_pattern)
            and len(pattern_layers(o.hybrid_layer_pattern)) != o.num_layers
        ),
        what="the pattern {hybrid_layer_pattern} and {num_layers} layers disagree",
        fix="leave --num-layers out: the pattern gives it",
    ),
    Rule(
        code="fp16-and-bf16",
        fields=("fp16", "bf16"),
        broken=lambda o: o.fp16 and o.bf16,
        what="--fp16 and --bf16 both choose the number format of the parameters",
        fix="keep one of the two",
    ),
    Rule(
        code="fp8-and-fp4",
        fields=("fp8_format", "fp4_format"),
        broken=lambda o: o.fp8_format is not None and o.fp4_format is not None,
        what="--fp8-format and --fp4-format both choose the number format of matrix multiplications",
        fix="keep one of the two",
    ),
    *idle(("loss_scale",), ("fp16",), lambda o: not o.fp16, "only fp16 scales the loss", "add --fp16, or leave it out"),
    *idle(
        ("fp8_recipe", "fp8_param_gather"),
        ("fp8_format",),
        lambda o: o.fp8_format is None,
        "fp8 is off",
        "add --fp8-format hybrid, or leave it out",
    ),
    *idle(
        ("fp4_recipe",),
        ("fp4_format",),
        lambda o: o.fp4_format is None,
        "fp4 is off",
        "add --fp4-format e2m1, or leave it out",
    ),
    *idle(
        ("cross_entropy_fusion_impl",),
        ("cross_entropy_loss_fusion",),
        lambda o: not o.cross_entropy_loss_fusion,
        "the loss is not fused",
        "add --cross-entropy-loss-fusion, or leave it out",
    ),
    no_effect(
        "rng-tracker-without-effect",
        ("te_rng_tracker", "inference_rng_tracker"),
        lambda o: o.te_rng_tracker or o.inference_rng_tracker,
        "--te-rng-tracker and --inference-rng-tracker have no effect: a graph can always replay generators here",
        "leave them out",
    ),
    Rule(
        code="inference-optimized-layers",
        fields=("transformer_impl", "normalization", "add_bias_linear", "add_qkv_bias"),
        broken=lambda o: (
            o.transformer_impl == "inference_optimized"
            and (o.normalization != "RMSNorm" or o.add_bias_linear or o.add_qkv_bias)
        ),
        details=_without_biases,
        what="inference_optimized layers have RMSNorm and no bias",
        fix="{changes}, or use --transformer-impl transformer_engine",
        fix_on_page="add --normalization RMSNorm --disable-bias-linear and leave --add-qkv-bias out, or use "
        "--transformer-impl transformer_engine",
    ),
    Rule(
        code="inference-optimized-experts",
        fields=(
            "transformer_impl",
            "num_experts",
            "moe_expert_capacity_factor",
            "moe_router_padding_for_quantization",
            "moe_pad_experts_for_cuda_graph_inference",
        ),
        broken=lambda o: (
            o.transformer_impl == "inference_optimized"
            and o.num_experts is not None
            and (
                o.moe_expert_capacity_factor is not None
                or o.moe_router_padding_for_quantization
                or o.moe_pad_experts_for_cuda_graph_inference
            )
        ),
        what="experts of inference_optimized layers take any number of tokens: they know neither capacity nor padding",
        fix="leave the options of capacity and padding out, or use --transformer-impl transformer_engine",
    ),
    Rule(
        code="inference-optimized-router",
        fields=("transformer_impl", "num_experts", "moe_router_dtype"),
        broken=lambda o: (
            o.transformer_impl == "inference_optimized" and o.num_experts is not None and o.moe_router_dtype != "fp32"
        ),
        what="the router of inference_optimized layers computes in fp32",
        fix="add --moe-router-dtype fp32",
    ),
    Rule(
        code="inference-optimized-mxfp8",
        fields=("transformer_impl", "fp8_format", "fp8_recipe", "flashinfer_version"),
        broken=lambda o: (
            o.transformer_impl == "inference_optimized"
            and o.fp8_format is not None
            and o.fp8_recipe == "mxfp8"
            and o.flashinfer_version < _FLASHINFER
        ),
        what="mxfp8 in inference_optimized layers needs FlashInfer 0.6.4 or newer",
        fix="install it, or use another --fp8-recipe",
    ),
    Rule(
        code="router-padding-needs-fp8",
        fields=("moe_router_padding_for_quantization", "fp8_format", "fp4_format"),
        broken=lambda o: o.moe_router_padding_for_quantization and o.fp8_format is None and o.fp4_format is None,
        what="--moe-router-padding-for-quantization pads for fp8 and fp4, and both are off",
        fix="add --fp8-format hybrid, or leave it out",
    ),
    Rule(
        code="router-padding-dispatcher",
        fields=("moe_router_padding_for_quantization", "moe_token_dispatcher_type"),
        broken=lambda o: o.moe_router_padding_for_quantization and o.moe_token_dispatcher_type == "allgather",
        what="the allgather dispatcher cannot pad the tokens of an expert",
        fix="use --moe-token-dispatcher-type alltoall or flex",
    ),
    Rule(
        code="many-experts-router",
        fields=("num_experts", "moe_router_dtype"),
        broken=lambda o: has_experts(o) and o.num_experts >= 32 and o.moe_router_dtype is None,
        what="a router of {num_experts} experts below fp32 may be unstable",
        fix="add --moe-router-dtype fp32",
        is_notice=True,
    ),
)
