"""The words that options of a few words can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Normalization = Literal["LayerNorm", "RMSNorm"]
PositionEmbedding = Literal["learned_absolute", "rope", "none"]
DecayStyle = Literal["linear", "cosine", "constant", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
Device = Literal["auto", "cpu", "cuda"]
TokenizerType = Literal["ByteTokenizer", "HuggingFaceTokenizer"]

NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)
POSITION_EMBEDDINGS: tuple[str, ...] = get_args(PositionEmbedding)
DECAY_STYLES: tuple[str, ...] = get_args(DecayStyle)
WSD_DECAY_STYLES: tuple[str, ...] = get_args(WsdDecayStyle)
DEVICES: tuple[str, ...] = get_args(Device)
TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)
BYTE_VOCABULARY = 257
"""The bytes of text, and the end of a document: what ``ByteTokenizer`` has."""

TransformerImpl = Literal["local", "transformer_engine", "inference_optimized"]
CrossEntropyFusion = Literal["native", "te"]
Fp8Format = Literal["e4m3", "hybrid"]
Fp8Recipe = Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"]
Fp4Format = Literal["e2m1"]
Fp4Recipe = Literal["nvfp4", "custom"]
RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
ScoreFunction = Literal["softmax", "sigmoid"]
RouterDtype = Literal["fp32", "fp64"]
TokenDropPolicy = Literal["probs", "position"]
TokenDispatcher = Literal["allgather", "alltoall", "flex"]
FlexBackend = Literal["deepep", "hybridep", "ncclep"]
SizingDistribution = Literal["exponential", "linear"]
SamplingBackend = Literal["torch", "flashinfer"]
KvCacheMode = Literal["persist", "offload", "recompute"]
Optimizer = Literal["adam", "sgd", "muon", "dist_muon"]
DataloaderType = Literal["single", "cyclic", "external"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "transformer_impl": get_args(TransformerImpl),
    "cross_entropy_fusion_impl": get_args(CrossEntropyFusion),
    "fp8_format": get_args(Fp8Format),
    "fp8_recipe": get_args(Fp8Recipe),
    "fp4_format": get_args(Fp4Format),
    "fp4_recipe": get_args(Fp4Recipe),
    "recompute_granularity": get_args(RecomputeGranularity),
    "recompute_method": get_args(RecomputeMethod),
    "moe_router_load_balancing_type": get_args(LoadBalancing),
    "moe_router_score_function": get_args(ScoreFunction),
    "moe_router_dtype": get_args(RouterDtype),
    "moe_token_drop_policy": get_args(TokenDropPolicy),
    "moe_token_dispatcher_type": get_args(TokenDispatcher),
    "moe_flex_dispatcher_backend": get_args(FlexBackend),
    "inference_dynamic_batching_cuda_graph_sizing_distribution": get_args(SizingDistribution),
    "inference_dynamic_batching_sampling_backend": get_args(SamplingBackend),
    "rl_kv_cache_management_mode": get_args(KvCacheMode),
    "optimizer": get_args(Optimizer),
    "dataloader_type": get_args(DataloaderType),
}
"""Option -> its words, for the options that come from Megatron-LM without a part of ours behind them yet."""

RECOMPUTE_MODULES: tuple[str, ...] = (
    "core_attn",
    "mlp",
    "moe",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "shared_experts",
    "mhc",
    "gdn_norm_out",
    "gdp_in_proj",
    "gdp_qkv",
)
OFFLOAD_MODULES: tuple[str, ...] = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
    "gdp_qkv",
)
