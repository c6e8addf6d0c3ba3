"""Options that Megatron-LM's command lines often hold and that change nothing here: read, and noticed.

Only what has no influence on the numbers of a run stands here; what would have one is refused as unknown.
"""

from __future__ import annotations

_SWITCHES = """
--use-mcore-models --use-flash-attn --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --no-async-tensor-model-parallel-allreduce
--tp-comm-overlap --use-tp-pp-dp-mapping --accumulate-allreduce-grads-in-fp32 --log-throughput --log-params-norm
--log-progress --log-timers-to-tensorboard --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard
--log-world-size-to-tensorboard --async-save --use-dist-ckpt --auto-detect-ckpt-format --no-ckpt-fully-parallel-save
--ckpt-fully-parallel-load --ckpt-assume-constant-structure --no-mmap-bin-files
--no-create-attention-mask-in-dataloader --manual-gc --exit-signal-handler --enable-one-logger
"""
SWITCHES: tuple[str, ...] = tuple(_SWITCHES.split())
"""Options without a value."""

_VALUES = """
--distributed-backend --distributed-timeout-minutes --num-workers --num-dataset-builder-threads --attention-backend
--tensorboard-log-interval --tensorboard-queue-size --timing-log-option --ckpt-format --dist-ckpt-strictness
--manual-gc-interval --wandb-project --wandb-exp-name --wandb-save-dir
"""
VALUES: tuple[str, ...] = tuple(_VALUES.split())
"""Options with one value."""
