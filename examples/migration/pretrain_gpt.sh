#!/bin/bash
# A launcher with old options of CUDA graphs, as written for Megatron-LM.
set -euo pipefail

MODEL_ARGS=(
    --num-layers 24           # a small GPT
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
)

GRAPH_ARGS=(
    --enable-cuda-graph
    --cuda-graph-scope attn full_iteration_inference   # what is captured
)

torchrun --nproc-per-node 8 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${GRAPH_ARGS[@]}" \
    --micro-batch-size 4 \
    --data-path "$DATA_PATH"

# The same model for a benchmark: one graph for the whole step.
torchrun --nproc-per-node 8 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    --mock-data \
    --cuda-graph-scope full_iteration \
    --no-check-for-nan-in-loss-and-grad
