"""For every rule, a command line that breaks it and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphstep.config import Machine
from graphstep.config.choices import CHOICES
from graphstep.config.options import OPTIONS, Option

FULL = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
LOCAL = "--cuda-graph-impl local"
TE = "--cuda-graph-impl transformer_engine"
EXPERTS = "--num-experts 4"
STATIC = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
BUDGET = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.5"
FUSED = "--use-transformer-engine-op-fuser --moe-grouped-gemm"
EP = f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
OVERLAP = f"{EP} --bf16 --overlap-moe-expert-parallel-comm"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FINE = "--fine-grained-activation-offloading --offload-modules"
FAST = "--transformer-impl inference_optimized --normalization RMSNorm --disable-bias-linear"
SHARDS = "--tensor-parallel-num-weight-shards 2"
FP8 = "--fp8-format hybrid"
RL = "--perform-rl-step"

TWO_RANKS = {"WORLD_SIZE": "2"}
OFFLOAD = {"NVTE_CPU_OFFLOAD_V1": "1"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
MANY_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@dataclass(frozen=True)
class Example:
    """Words, and what they are read with."""

    argv: str
    env: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None


def example(value: str | Example) -> Example:
    return value if isinstance(value, Example) else Example(value)


PROBLEMS: dict[str, str | Example] = {
    "heads-divide-hidden": "--hidden-size 100 --num-attention-heads 3",
    "groups-divide-heads": "--group-query-attention --num-query-groups 3",
    "groups-missing": "--group-query-attention",
    "sequence-exceeds-positions": "--seq-length 64 --max-position-embeddings 32",
    "rotary-channels": "--position-embedding-type rope --kv-channels 5",
    "batches-divide": "--micro-batch-size 4 --global-batch-size 6",
    "min-lr-above-lr": "--lr 1e-4 --min-lr 1e-3",
    "warmup-init-above-lr": "--lr 1e-4 --lr-warmup-init 1e-3",
    "report-is-trace": "--cuda-graph-report a.json --cuda-graph-trace a.json",
    "warmup-given-twice": "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
    "warmup-too-long": "--train-iters 10 --lr-warmup-iters 10",
    "wsd-decay-missing": "--lr-decay-style WSD",
    "wsd-decay-too-long": "--lr-decay-style WSD --train-iters 10 --lr-warmup-iters 5 --lr-wsd-decay-iters 6",
    "comparison-too-long": f"--train-iters 10 --compare-with-eager 20 {LOCAL}",
    "tokenizer-model-missing": "--tokenizer-type HuggingFaceTokenizer",
    "mock-and-real-data": "--mock-data --data-path a.txt",
    "validation-without-data": "--split 1,0,1",
    "full-iteration-nan-check": "--cuda-graph-impl full_iteration",
    "compile-captured-modules": "--cuda-graph-impl local --compile",
    "fusion-captured-modules": "--cuda-graph-impl local --gradient-accumulation-fusion",
    "parallel-weight-gradients-fusion": "--parallel-weight-gradients",
    "full-iteration-modules": f"{FULL} --cuda-graph-modules attn",
    "modules-need-experts": f"{LOCAL} --cuda-graph-modules attn moe",
    "preprocess-needs-router": f"{EXPERTS} {TE} --cuda-graph-modules moe_preprocess",
    "moe-beside-router": f"{EXPERTS} {STATIC} {TE} --cuda-graph-modules moe moe_router",
    "mlp-needs-dense-layers": f"{EXPERTS} {LOCAL} --cuda-graph-modules attn mlp",
    "modules-match-nothing": f"{LOCAL} --cuda-graph-modules mamba",
    "inference-scope-needs-local": f"{FULL} --inference-cuda-graph-scope block",
    "inference-scope-none": f"{LOCAL} --inference-cuda-graph-scope none",
    # layers
    "hybrid-num-layers": "--hybrid-layer-pattern M*- --num-layers 5",
    "fp16-and-bf16": "--fp16 --bf16",
    "fp8-and-fp4": f"{FP8} --fp4-format e2m1",
    "inference-optimized-layers": "--transformer-impl inference_optimized",
    "inference-optimized-experts": f"{FAST} {EXPERTS} --moe-router-dtype fp32 --moe-expert-capacity-factor 1",
    "inference-optimized-router": f"{FAST} {EXPERTS}",
    "inference-optimized-mxfp8": Example(f"{FAST} {FP8} --fp8-recipe mxfp8", machine=Machine(flashinfer_version="0.6")),
    "router-padding-needs-fp8": f"{EP} --expert-model-parallel-size 1 --moe-router-padding-for-quantization",
    "router-padding-dispatcher": f"{EXPERTS} {FP8} --moe-router-padding-for-quantization",
    # experts
    "topk-exceeds-experts": f"{EXPERTS} --moe-router-topk 5",
    "layer-freq-length": f"{EXPERTS} --moe-layer-freq [0,1]",
    "topk-one-softmax": f"{EXPERTS} --moe-router-topk 1",
    "group-topk-needs-groups": f"{EXPERTS} --moe-router-group-topk 1",
    "group-topk-exceeds-groups": f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 3",
    "groups-divide-experts": f"{EXPERTS} --moe-router-num-groups 3 --moe-router-group-topk 2",
    "groups-hold-topk": f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 1",
    "expert-bias-score": f"{EXPERTS} --moe-router-enable-expert-bias",
    "capacity-balancing": f"{EXPERTS} --moe-expert-capacity-factor 1 --moe-router-load-balancing-type sinkhorn",
    "padding-needs-capacity": f"{EXPERTS} --moe-pad-expert-input-to-capacity",
    "padding-dispatcher": f"{EXPERTS} {STATIC} --moe-token-dispatcher-type flex",
    "moe-needs-static-shapes": f"{EXPERTS} {LOCAL} --cuda-graph-modules moe",
    "preprocess-reads-counts": (
        f"{EXPERTS} {LOCAL} --cuda-graph-modules moe_router moe_preprocess --moe-expert-capacity-factor 1 "
        "--moe-token-dispatcher-type alltoall"
    ),
    "shared-expert-overlap-dispatcher": (
        f"{EXPERTS} --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap"
    ),
    "ncclep-dispatcher": f"{EXPERTS} --moe-flex-dispatcher-backend ncclep",
    "grouped-tensor-gemm": f"{EXPERTS} --moe-use-grouped-tensor",
    "grouped-tensor-ncclep": (
        f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep --moe-grouped-gemm "
        "--moe-use-grouped-tensor"
    ),
    "rank-capacity-backend": f"{EXPERTS} --moe-token-dispatcher-type flex --moe-expert-rank-capacity-factor 1.5",
    "rank-capacity-fusion": f"{EXPERTS} {BUDGET}",
    "rank-capacity-dispatcher": f"{EXPERTS} {FUSED} {BUDGET} --moe-token-dispatcher-type alltoall",
    "rank-capacity-experts": f"{FUSED} {BUDGET}",
    "stash-needs-budget": "--moe-paged-stash",
    "stash-offload": f"{EXPERTS} {FUSED} {BUDGET} --moe-paged-stash --cpu-offloading-num-layers 1",
    "stash-offload-modules": Example(f"{EXPERTS} {FUSED} {BUDGET} --moe-paged-stash {FINE} moe_act", OFFLOAD),
    "zero-copy-needs-budget": (
        f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep --moe-ncclep-zero-copy"
    ),
    # recomputation and offloading
    "recompute-full-incomplete": "--recompute-granularity full --recompute-method uniform",
    "recompute-selective-method": "--recompute-granularity selective --recompute-method uniform",
    "recompute-modules-unknown": f"{SELECTIVE} core_atn",
    "recompute-moe-act": f"{EXPERTS} {SELECTIVE} moe_act",
    "recompute-mla": f"{SELECTIVE} mla_up_proj",
    "recompute-missing-layers": f"{SELECTIVE} mhc",
    "recompute-shared-experts": (
        f"{EP} --expert-model-parallel-size 1 --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap "
        f"{SELECTIVE} shared_experts"
    ),
    "recompute-delayed-scaling": f"{FP8} {SELECTIVE} layernorm",
    "recompute-full-in-graph": (
        f"{LOCAL} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "recompute-covers-router-graph": f"{EXPERTS} {TE} --cuda-graph-modules moe_router {SELECTIVE} moe",
    "recompute-attention-dropout": f"{LOCAL} --cuda-graph-modules attn --recompute-granularity selective",
    "recompute-hidden-dropout": f"{LOCAL} {SELECTIVE} mlp",
    "recompute-jitter": f"{EXPERTS} {FULL} {NO_DROPOUT} {SELECTIVE} moe --moe-input-jitter-eps 0.1",
    "offload-too-many-layers": "--cpu-offloading-num-layers 4",
    "offload-recompute": "--cpu-offloading-num-layers 1 --recompute-granularity selective",
    "offload-stages": Example("--cpu-offloading-num-layers 1 --pipeline-model-parallel-size 2", TWO_RANKS),
    "offload-in-graph": f"{LOCAL} --cpu-offloading-num-layers 1",
    "offload-both-ways": Example(f"--cpu-offloading-num-layers 1 {FINE} core_attn", OFFLOAD),
    "offload-nothing": Example("--fine-grained-activation-offloading", OFFLOAD),
    "offload-modules-unknown": Example(f"{LOCAL} --cuda-graph-modules attn {FINE} core_atn", OFFLOAD),
    "offload-projection-alone": Example(f"{FINE} attn_proj", OFFLOAD),
    "offload-recomputed-experts": Example(f"{EXPERTS} {FINE} moe_act {SELECTIVE} moe", OFFLOAD),
    "offload-fused-experts": Example(f"{EXPERTS} {FINE} fused_group_mlp", OFFLOAD),
    "offload-kernels": Example(f"--transformer-impl local {FINE} core_attn", OFFLOAD),
    "offload-weights": f"{FINE} core_attn",
    "offload-local-parts": Example(f"{LOCAL} --cuda-graph-modules attn {FINE} core_attn", OFFLOAD),
    "offload-local-whole-layers": Example(f"{EXPERTS} {LOCAL} {FINE} moe_act", OFFLOAD),
    "offload-captured-experts": Example(f"{EXPERTS} {STATIC} {TE} --cuda-graph-modules moe {FINE} core_attn", OFFLOAD),
    "offload-warmup": Example(f"{TE} --cuda-graph-warmup-steps 0 {FINE} core_attn", OFFLOAD),
    "offload-inflight": Example(f"{FULL} {FINE} core_attn", OFFLOAD),
    "optimizer-offload-precision": "--optimizer-cpu-offload",
    # ranks
    "ranks-divide": Example("--context-parallel-size 3", TWO_RANKS),
    "stages-divide-layers": Example("--num-layers 3 --pipeline-model-parallel-size 2", TWO_RANKS),
    "ranks-divide-heads": Example(
        "--num-attention-heads 1 --tensor-model-parallel-size 2", TWO_RANKS | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ),
    "ranks-connections": Example("--tensor-model-parallel-size 2", TWO_RANKS, Machine(gpu_arch=9)),
    "expert-ranks-divide": Example(f"{EXPERTS} --expert-model-parallel-size 4", TWO_RANKS),
    "ranks-batches-divide": Example("--micro-batch-size 1 --global-batch-size 3", TWO_RANKS),
    "expert-ranks-need-experts": Example("--expert-model-parallel-size 2", TWO_RANKS),
    "hybrid-context-parallel-graphs": (
        f"{LOCAL} --hybrid-context-parallel --calculate-per-token-loss --dataloader-type single"
    ),
    "hybrid-context-parallel-loop": "--hybrid-context-parallel",
    "precision-aware-optimizer": "--use-precision-aware-optimizer",
    "overlap-needs-expert-ranks": f"{EXPERTS} --bf16 --overlap-moe-expert-parallel-comm",
    "overlap-needs-half": Example(f"{EP} --overlap-moe-expert-parallel-comm", TWO_RANKS),
    "overlap-recompute": Example(f"{OVERLAP} {SELECTIVE} moe", TWO_RANKS),
    "overlap-shared-expert": Example(
        f"{OVERLAP} --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap", TWO_RANKS
    ),
    "overlap-mtp": Example(f"{OVERLAP} --mtp-num-layers 2", TWO_RANKS),
    "overlap-stages": Example(f"{OVERLAP} --pipeline-model-parallel-size 2", {"WORLD_SIZE": "4"}),
    "overlap-modules": Example(f"{OVERLAP} {TE} {STATIC} --cuda-graph-modules moe", TWO_RANKS),
    "delayed-wgrad-needs-overlap": "--delay-wgrad-compute",
    "delayed-wgrad-kernels": Example(f"{OVERLAP} --delay-wgrad-compute --transformer-impl local", TWO_RANKS),
    "delayed-wgrad-version": Example(f"{OVERLAP} {TE} --delay-wgrad-compute", TWO_RANKS, Machine(te_version="2.9.0")),
    "delayed-wgrad-graph-version": Example(
        f"{OVERLAP} {TE} --cuda-graph-modules attn --delay-wgrad-compute --overlap-grad-reduce --disable-bias-linear",
        TWO_RANKS,
        Machine(te_version="2.11"),
    ),
    "delayed-wgrad-fusion": Example(
        f"{OVERLAP} {TE} --cuda-graph-modules attn --delay-wgrad-compute --overlap-grad-reduce "
        "--no-gradient-accumulation-fusion --disable-bias-linear",
        TWO_RANKS,
    ),
    "delayed-wgrad-bias": Example(
        f"{OVERLAP} {TE} --cuda-graph-modules attn --delay-wgrad-compute --overlap-grad-reduce", TWO_RANKS
    ),
    "expandable-segments": Example(TE, EXPANDABLE),
    "weight-shards-priority": Example(f"{LOCAL} {SHARDS}", TWO_RANKS | MANY_CONNECTIONS, Machine(gpu_arch=10)),
    "weight-shards-recompute": Example(
        f"{EXPERTS} {LOCAL} --cuda-graph-modules moe_router moe_preprocess {SHARDS} {FP8} "
        f"--moe-shared-expert-intermediate-size 8 {SELECTIVE} shared_experts",
        TWO_RANKS | MANY_CONNECTIONS,
    ),
    # inference
    "inference-graph-count": f"{LOCAL} --inference-dynamic-batching-num-cuda-graphs 0",
    "inference-pipeline-graphs": Example(
        f"{LOCAL} --inference-batch-times-seqlen-threshold 8 --pipeline-model-parallel-size 2", TWO_RANKS
    ),
    "inference-pipeline-stages": "--inference-batch-times-seqlen-threshold 8",
    "block-scope-fp8": f"{LOCAL} --inference-cuda-graph-scope block {FP8}",
    "speculation-needs-mtp": "--num-speculative-tokens 1",
    "batch-invariant-padding": f"{EXPERTS} --batch-invariant-mode --moe-pad-experts-for-cuda-graph-inference",
    "rl-training-graphs": f"{RL} --rl-training-cuda-graphs",
    "rl-persist-graphs": f"{RL} --rl-persist-cuda-graphs",
    "rl-offload-needs-persist": f"{RL} {LOCAL} --rl-kv-cache-management-mode offload",
    "rl-offload-managed": (
        f"{RL} {LOCAL} --rl-persist-cuda-graphs --rl-kv-cache-management-mode offload "
        "--inference-dynamic-batching-unified-memory-level 1"
    ),
    "rl-persist-addresses": Example(
        f"{RL} {LOCAL} --rl-persist-cuda-graphs --rl-kv-cache-management-mode recompute",
        machine=Machine(torch_memory_saver=False),
    ),
    "rl-weights-addresses": Example(
        f"{RL} {LOCAL} --rl-offload-inference-model-weights-when-idle", machine=Machine(torch_memory_saver=False)
    ),
}
NOTICES: dict[str, str | Example] = {
    "groups-without-effect": "--num-query-groups 2",
    "rotary-without-effect": "--rotary-base 5",
    "qkv-bias-without-effect": "--add-qkv-bias",
    "warmup-beyond-run": "--train-iters 10 --lr-decay-iters 100 --lr-warmup-iters 20",
    "wsd-without-effect": "--lr-wsd-decay-iters 3",
    "decay-without-effect": "--lr-decay-style constant --min-lr 1e-5",
    "comparison-without-graphs": "--compare-with-eager 3",
    "verify-without-graphs": "--cuda-graph-verify 3",
    "verify-tolerance-without-effect": "--cuda-graph-verify-atol 1e-6",
    "save-interval-without-save": "--save-interval 3",
    "eval-interval-without-effect": "--eval-interval 7 --eval-iters 0",
    "tokenizer-model-without-effect": "--tokenizer-model tokenizer.json",
    "no-layer-for-mamba": f"{LOCAL} --cuda-graph-modules attn mamba",
    "no-layer-for-attn": f"{LOCAL} --hybrid-layer-pattern MM --cuda-graph-modules attn mamba",
    "no-layer-for-mlp": f"{LOCAL} --hybrid-layer-pattern M* --cuda-graph-modules attn mlp",
    "no-layer-for-moe": f"{LOCAL} {EXPERTS} {STATIC} --hybrid-layer-pattern M* --cuda-graph-modules attn moe",
    "modules-completed": f"{LOCAL} {EXPERTS} --cuda-graph-modules moe_router",
    "modules-without-graphs": "--cuda-graph-modules mlp",
    "wrong-modules-without-graphs": "--cuda-graph-modules moe",
    "warmup-zero": f"{LOCAL} --cuda-graph-warmup-steps 0",
    "warmup-without-graphs": "--cuda-graph-warmup-steps 5",
    "pool-without-effect": f"{LOCAL} --no-cuda-graph-use-single-mempool",
    "retain-without-effect": f"{FULL} --cuda-graph-retain-backward-graph",
    "policy-without-effect": "--cuda-graph-impl transformer_engine --cuda-graph-policy auto",
    "policy-off": f"{LOCAL} --cuda-graph-policy off",
    "capture-after-without-recapture": f"{LOCAL} --cuda-graph-on-mismatch eager --cuda-graph-capture-after 3",
    "full-iteration-host-reads": f"{FULL} --check-for-spiky-loss",
    "optimizer-graph-host-reads": "--optimizer-cuda-graph --optimizer sgd",
    "rng-tracker-without-effect": "--te-rng-tracker",
    "many-experts-router": "--num-experts 64",
    "balancing-without-weight": f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss",
    "weight-without-balancing": f"{EXPERTS} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01",
    "drop-policy-without-capacity": f"{EXPERTS} --moe-token-drop-policy position",
    "expert-groups-without-effect": f"{EXPERTS} --moe-router-num-groups 2",
    "layer-freq-beside-pattern": f"{EXPERTS} --hybrid-layer-pattern *E --moe-layer-freq 2",
    "grouped-gemm-half-precision": f"{EXPERTS} {LOCAL} --moe-grouped-gemm",
    "uneven-dispatch-host-reads": (
        f"{EXPERTS} {FULL} --moe-token-dispatcher-type flex --moe-hybridep-pad-uneven-dispatch-inputs"
    ),
    "recapture-without-effect": f"{TE} --cuda-graph-on-mismatch recapture",
    "one-signature-without-effect": f"{FULL} --cuda-graph-max-signatures 1",
    "uneven-dispatch-without-flex": f"{EXPERTS} --moe-hybridep-pad-uneven-dispatch-inputs",
    "flex-backend-without-flex": f"{EXPERTS} --moe-flex-dispatcher-backend hybridep",
    "recompute-router-norm": f"{EXPERTS} {TE} --cuda-graph-modules moe_router {SELECTIVE} layernorm",
    "offload-norm-in-graph": Example(f"{TE} --cuda-graph-modules attn {FINE} attn_norm", OFFLOAD),
    "delayed-offload-without-effect": "--delay-offload-until-cuda-graph",
    "sequence-parallel-needs-tensor": "--sequence-parallel",
    "ranks-connections-unknown": Example("--context-parallel-size 2", TWO_RANKS),
    "weight-shards-connections": Example(f"{LOCAL} {SHARDS}", TWO_RANKS),
    "freeze-gc-without-effect": Example("", {"CUDA_GRAPH_CAPTURE_FREEZE_GC": "1"}),
    "inference-expert-padding": Example(f"{LOCAL} {EP}", TWO_RANKS),
    "inference-max-tokens-clamped": f"{LOCAL} --inference-cuda-graph-max-tokens 0",
    "decode-only-and-all-prefills": f"{LOCAL} --decode-only-cuda-graphs --inference-cuda-graph-all-prefills",
    "rl-offload-optimizer": f"{RL} {LOCAL} --rl-training-cuda-graphs --rl-offload-optimizer-during-inference",
    "rl-no-inference-graphs": f"{RL} {TE} --rl-persist-cuda-graphs",
}
TRAINING_PROBLEMS: dict[str, str | Example] = {
    "not-available-retain": f"{LOCAL} --cuda-graph-retain-backward-graph",
    "not-available-ranks": Example("", TWO_RANKS),
    "not-available-pattern-letter": "--hybrid-layer-pattern *G",
    "module-in-no-layer": f"{LOCAL} --cuda-graph-modules attn mamba",
    "vocab-size": "--vocab-size 100",
    "not-available-mtp-num-layers": "--mtp-num-layers 1",
    "not-available-multi-latent-attention": "--multi-latent-attention",
    "not-available-fp16": "--fp16",
    "not-available-fp8-format": FP8,
    "not-available-fp4-format": "--fp4-format e2m1",
    "not-available-optimizer": "--optimizer muon",
    "not-available-skip-train": "--skip-train",
    "not-available-calculate-per-token-loss": "--calculate-per-token-loss",
    "not-available-check-for-large-grads": "--check-for-large-grads",
    "not-available-check-for-spiky-loss": "--check-for-spiky-loss",
    "not-available-log-num-zeros-in-grad": "--log-num-zeros-in-grad",
    "not-available-num-virtual-stages-per-pipeline-rank": "--num-virtual-stages-per-pipeline-rank 2",
    "not-available-fake-process-group": "--fake-process-group",
    "not-available-use-megatron-fsdp": "--use-megatron-fsdp",
    "not-available-recompute-granularity": "--recompute-granularity selective",
    "not-available-cpu-offloading-num-layers": "--cpu-offloading-num-layers 1",
    "not-available-fine-grained-activation-offloading": Example(f"{FINE} core_attn", OFFLOAD),
    "not-available-moe-latent-size": f"{EXPERTS} --moe-latent-size 8",
    "not-available-flex-dispatcher": f"{EXPERTS} --moe-token-dispatcher-type flex",
    "mamba-head-dim-divides": "--hybrid-layer-pattern M* --mamba-head-dim 96 --mamba-num-groups 1",
    "mamba-groups-divide-heads": "--hybrid-layer-pattern M*",
    "moe-grouped-gemm-bias": f"{EXPERTS} --moe-grouped-gemm",
    "moe-grouped-gemm-sizes": f"{EXPERTS} --moe-grouped-gemm --disable-bias-linear --moe-ffn-hidden-size 60",
    "pattern-needs-experts": "--hybrid-layer-pattern -*E",
    "topk-exceeds-one-expert": "--num-experts 1",
    "whole-layers-need-static-experts": f"{EXPERTS} {LOCAL}",
    "not-available-perform-rl-step": RL,
}
# These come only together with others that are not available either.
TRAINING_PROBLEMS_TOGETHER: dict[str, str | Example] = {
    "not-available-tensor-model-parallel-size": Example("--tensor-model-parallel-size 2", TWO_RANKS),
    "not-available-pipeline-model-parallel-size": Example("--pipeline-model-parallel-size 2", TWO_RANKS),
    "not-available-context-parallel-size": Example("--context-parallel-size 2", TWO_RANKS),
    "not-available-expert-model-parallel-size": Example(EP, TWO_RANKS),
    "not-available-tensor-parallel-num-weight-shards": Example(SHARDS, TWO_RANKS),
    "not-available-moe-expert-rank-capacity-factor": f"{EXPERTS} {FUSED} {BUDGET} --disable-bias-linear",
    "not-available-moe-paged-stash": f"{EXPERTS} {FUSED} {BUDGET} --disable-bias-linear --moe-paged-stash",
    "not-available-moe-router-padding-for-quantization": (
        f"{EXPERTS} --moe-token-dispatcher-type alltoall --moe-router-padding-for-quantization {FP8}"
    ),
    "not-available-hybrid-context-parallel": (
        "--hybrid-context-parallel --calculate-per-token-loss --dataloader-type single"
    ),
    "not-available-use-precision-aware-optimizer": "--use-precision-aware-optimizer --use-distributed-optimizer",
    "not-available-optimizer-cpu-offload": (
        "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"
    ),
}
NOTICES_TOGETHER: dict[str, str | Example] = {
    f"no-layer-for-moe-{part}": (
        f"{TE} {EXPERTS} --hybrid-layer-pattern M* --cuda-graph-modules attn moe_router moe_preprocess"
    )
    for part in ("router", "preprocess")
}
TRAINING_NOTICES: dict[str, str | Example] = {
    "inference-scope-without-effect": f"{LOCAL} --inference-cuda-graph-scope block",
    "sinkhorn-without-scores": f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax",
    "experts-without-layer": f"{EXPERTS} --hybrid-layer-pattern *-",
    "dynamic-experts-stay-eager": f"{EXPERTS} {LOCAL} --cuda-graph-policy auto",
    "pool-always-single": f"{FULL} --no-cuda-graph-use-single-mempool",
}

# option -> values that are wrong by themselves
WRONG_VALUES: dict[str, tuple[object, ...]] = {
    "cuda_graph_report": ("report.pdf", "html"),
    "cuda_graph_trace": ("trace.html",),
    "num_layers": (0, -1),
    "hidden_size": (0,),
    "num_attention_heads": (0,),
    "num_query_groups": (-1,),
    "kv_channels": (-1,),
    "ffn_hidden_size": (-1,),
    "seq_length": (0,),
    "max_position_embeddings": (-1,),
    "vocab_size": (-1,),
    "normalization": ("layernorm",),
    "position_embedding_type": ("alibi",),
    "norm_epsilon": (0.0,),
    "rotary_base": (0.0,),
    "rotary_percent": (0.0, 1.1),
    "attention_dropout": (-0.1, 1.0),
    "hidden_dropout": (-0.1, 1.0),
    "init_method_std": (0.0,),
    "micro_batch_size": (0,),
    "global_batch_size": (-4,),
    "train_iters": (0,),
    "lr": (-1.0,),
    "min_lr": (-1.0,),
    "lr_decay_style": ("wsd",),
    "lr_decay_iters": (-1,),
    "lr_warmup_iters": (-1,),
    "lr_warmup_init": (-1.0,),
    "lr_wsd_decay_style": ("constant",),
    "lr_wsd_decay_iters": (-1,),
    "weight_decay": (-0.1,),
    "clip_grad": (-1.0,),
    "adam_beta1": (-0.1, 1.0),
    "adam_beta2": (-0.1, 1.0),
    "adam_eps": (0.0,),
    "seed": (-1,),
    "eval_interval": (0,),
    "eval_iters": (-1,),
    "log_interval": (0,),
    "save_interval": (-1,),
    "device": ("gpu",),
    "compare_with_eager": (-1,),
    "cuda_graph_verify": (-1,),
    "cuda_graph_shadow_interval": (-1,),
    "cuda_graph_verify_rtol": (-1e-3,),
    "cuda_graph_verify_atol": (-1e-3,),
    "data_path": ((),),
    "split": ("", "0,1,1", "a,b,c", "1,2,3,4", "1,-1,1", "nan,1,1", "1e400"),
    "tokenizer_type": ("bytes",),
    "make_vocab_size_divisible_by": (0,),
    "cuda_graph_warmup_steps": (-1,),
    "cuda_graph_capture_after": (0, -1),
    "cuda_graph_max_signatures": (0, -1),
    "cuda_graph_merge_layers": (-1,),
    "hybrid_layer_pattern": ("", "X", "|", "M/", "M*-?"),
    "mtp_num_layers": (0,),
    "loss_scale": (0.0,),
    "timing_log_level": (-1,),
    "tensor_model_parallel_size": (0,),
    "pipeline_model_parallel_size": (0,),
    "context_parallel_size": (-1,),
    "expert_model_parallel_size": (0,),
    "tensor_parallel_num_weight_shards": (0,),
    "expert_tensor_parallel_size": (0,),
    "num_virtual_stages_per_pipeline_rank": (0,),
    "recompute_num_layers": (0,),
    "cpu_offloading_num_layers": (-1,),
    "fine_grained_offloading_max_inflight_offloads": (-1,),
    "activation_offload_fraction": (-0.1, 1.1),
    "min_offloaded_tensor_size": (-1,),
    "num_experts": (0, -1),
    "moe_layer_freq": (0, (), (0, 2)),
    "moe_ffn_hidden_size": (0,),
    "moe_router_topk": (0,),
    "moe_shared_expert_intermediate_size": (0,),
    "mamba_state_dim": (0,),
    "mamba_head_dim": (-1,),
    "mamba_num_groups": (0,),
    "mamba_num_heads": (0,),
    "moe_latent_size": (0,),
    "moe_router_num_groups": (0,),
    "moe_router_group_topk": (-1,),
    "moe_router_topk_scaling_factor": (0.0, -1.0),
    "moe_router_bias_update_rate": (-1e-3,),
    "moe_aux_loss_coeff": (-1e-2,),
    "moe_z_loss_coeff": (-1e-3,),
    "moe_input_jitter_eps": (-1e-2, 1.5),
    "moe_expert_capacity_factor": (0.0,),
    "moe_expert_rank_capacity_factor": (0.0, -1.0),
    "moe_paged_stash_page_size": (0, -4),
    "inference_dynamic_batching_unified_memory_level": (2,),
    "rl_inference_model_unified_memory_level": (-1,),
    "inference_dynamic_batching_max_requests": (0,),
    "inference_dynamic_batching_max_tokens": (0,),
    "inference_dynamic_batching_block_size": (0,),
    "inference_dynamic_batching_buffer_size_gb": (0.0,),
    "num_speculative_tokens": (-1,),
    **dict.fromkeys(CHOICES, ("bogus",)),
}

_WORDS = {
    "moe_router_topk": "3",
    "moe_layer_freq": "[0,1]",
    "moe_flex_dispatcher_backend": "hybridep",
    "num_speculative_tokens": "0",
    "offload_modules": "core_attn",
    "recompute_modules": "mlp",
}


def any_use_of(option: Option) -> str:
    """Words that give an option a value that breaks no rule."""
    flag = option.spellings[0]
    if option.nargs == 0:
        return flag
    if option.dest in _WORDS:
        return f"{flag} {_WORDS[option.dest]}"
    return f"{flag} {option.choices[-1] if option.choices else 1}"


BY_NAME = {option.dest: option for option in OPTIONS}
