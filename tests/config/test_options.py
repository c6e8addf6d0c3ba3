"""The table of options is consistent, and covers every field."""

from __future__ import annotations

import dataclasses
import re

import pytest

from graphstep.config import RunConfig, from_argv
from graphstep.config.elsewhere import SWITCHES, VALUES
from graphstep.config.help import help_text
from graphstep.config.migrations import NEW_NAMES, OLD_NAMES
from graphstep.config.options import OPTIONS, Option
from graphstep.config.run import SECTIONS

# Megatron-LM's names, and our own --device, --compare-with-eager, --log-jsonl, switches of single pool and retained
# backward graphs, and --cuda-graph- policy, on-mismatch, capture-after, max-signatures, merge-layers, debug, verify,
# shadow-interval and their tolerances.
SPELLINGS = """
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels --group-query-attention
--num-query-groups --seq-length --max-position-embeddings --swiglu --normalization --norm-epsilon
--position-embedding-type --rotary-base --rotary-percent --attention-dropout --hidden-dropout --disable-bias-linear
--add-qkv-bias --qk-layernorm --untie-embeddings-and-output-weights --init-method-std
--make-vocab-size-divisible-by --vocab-size
--micro-batch-size --global-batch-size --train-iters --lr --min-lr --lr-decay-style --lr-decay-iters --lr-warmup-iters
--lr-warmup-fraction --lr-warmup-init --lr-wsd-decay-style --lr-wsd-decay-iters --weight-decay --clip-grad --adam-beta1
--adam-beta2 --adam-eps --bf16 --seed --eval-interval --eval-iters --log-interval --save --load --save-interval
--tensorboard-dir --log-jsonl --no-check-for-nan-in-loss-and-grad
--deterministic-mode --device --compare-with-eager --data-path --split --tokenizer-type --tokenizer-model
--data-cache-path --mock-data --append-eod --no-append-eod --cuda-graph-impl --cuda-graph-modules
--cuda-graph-warmup-steps --cuda-graph-use-single-mempool --no-cuda-graph-use-single-mempool
--cuda-graph-retain-backward-graph --optimizer-cuda-graph --inference-cuda-graph-scope --cuda-graph-policy
--cuda-graph-on-mismatch --cuda-graph-capture-after --cuda-graph-max-signatures --cuda-graph-merge-layers
--cuda-graph-report --cuda-graph-trace
--cuda-graph-debug --cuda-graph-verify --cuda-graph-shadow-interval --cuda-graph-verify-rtol --cuda-graph-verify-atol
--hybrid-layer-pattern --mtp-num-layers --multi-latent-attention --transformer-impl --cross-entropy-loss-fusion
--cross-entropy-fusion-impl --no-gradient-accumulation-fusion --te-rng-tracker --inference-rng-tracker --fp16
--loss-scale --fp8-format --fp8-recipe --fp8-param-gather --fp4-format --fp4-recipe --optimizer --skip-train
--dataloader-type --calculate-per-token-loss --check-for-large-grads --check-for-spiky-loss --log-num-zeros-in-grad
--timing-log-level
--tensor-model-parallel-size --pipeline-model-parallel-size --num-virtual-stages-per-pipeline-rank
--context-parallel-size --expert-model-parallel-size --expert-tensor-parallel-size --tensor-parallel-num-weight-shards
--sequence-parallel --hybrid-context-parallel --use-distributed-optimizer --use-precision-aware-optimizer
--use-megatron-fsdp --megatron-fsdp-cuda-graph-mode --overlap-grad-reduce --overlap-param-gather
--overlap-moe-expert-parallel-comm --delay-wgrad-compute --fake-process-group --recompute-granularity
--recompute-method --recompute-num-layers --recompute-modules --cpu-offloading-num-layers
--fine-grained-activation-offloading --offload-modules --fine-grained-offloading-max-inflight-offloads
--delay-offload-until-cuda-graph --activation-offload-fraction --min-offloaded-tensor-size --optimizer-cpu-offload
--num-experts --moe-layer-freq --moe-ffn-hidden-size --moe-router-topk --moe-router-load-balancing-type
--moe-aux-loss-coeff --moe-z-loss-coeff --moe-router-pre-softmax --moe-router-score-function
--moe-router-enable-expert-bias --moe-router-dtype --moe-router-padding-for-quantization --moe-input-jitter-eps
--moe-router-num-groups --moe-router-group-topk --moe-router-topk-scaling-factor --moe-router-bias-update-rate
--moe-shared-expert-gate --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads
--moe-token-dispatcher-type --moe-flex-dispatcher-backend --moe-grouped-gemm --moe-use-grouped-tensor
--use-transformer-engine-op-fuser --moe-shared-expert-intermediate-size --moe-shared-expert-overlap --moe-latent-size
--moe-permute-fusion --moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy
--moe-pad-experts-for-cuda-graph-inference --moe-expert-rank-capacity-factor --moe-paged-stash
--moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-buffer-size-factor-cpu
--moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-zero-copy --inference-dynamic-batching
--inference-dynamic-batching-num-cuda-graphs --inference-dynamic-batching-cuda-graph-mixed-prefill-count
--inference-dynamic-batching-cuda-graph-sizing-distribution --decode-only-cuda-graphs
--inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens --inference-dynamic-batching-max-requests
--inference-dynamic-batching-max-tokens --inference-dynamic-batching-block-size
--inference-dynamic-batching-buffer-size-gb --inference-dynamic-batching-unified-memory-level
--inference-dynamic-batching-sampling-backend --num-speculative-tokens --inference-batch-times-seqlen-threshold
--enable-chunked-prefill --batch-invariant-mode --perform-rl-step --rl-training-cuda-graphs --rl-persist-cuda-graphs
--rl-kv-cache-management-mode --rl-inference-model-unified-memory-level
--rl-offload-inference-model-weights-when-idle --rl-offload-optimizer-during-inference
--deferred-nan-check --compile
--gradient-accumulation-fusion --parallel-weight-gradients
--enable-cuda-graph --external-cuda-graph --cuda-graph-scope --moe-router-padding-for-fp8 --hybrid-override-pattern
"""


def test_the_options() -> None:
    spellings = [spelling for option in OPTIONS for spelling in option.spellings]
    assert sorted(spellings) == sorted([*SPELLINGS.split(), *SWITCHES, *VALUES])


def test_names_are_unique() -> None:
    assert len({option.dest for option in OPTIONS}) == len(OPTIONS)


def test_old_and_new_names_are_options() -> None:
    names = {spelling: option.dest for option in OPTIONS for spelling in option.spellings}
    assert {**OLD_NAMES, **NEW_NAMES}.items() <= names.items()


def test_every_field_has_an_option() -> None:
    config = RunConfig()
    fields = {(name, field.name) for name in SECTIONS for field in dataclasses.fields(getattr(config, name))}
    assert {(option.section, option.target) for option in OPTIONS if option.section} == fields


def test_the_defaults_are_those_of_the_dataclasses() -> None:
    assert from_argv([]) == RunConfig()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.dest)
def test_an_option_says_what_it_is(option: Option) -> None:
    assert option.help
    assert option.group
    assert option.nargs == 0 or option.choices or option.metavar
    others = ["group_query_attention", "lr_warmup_fraction", *OLD_NAMES.values()]
    others += [flag.removeprefix("--").replace("-", "_") for flag in (*SWITCHES, *VALUES)]
    assert option.section is not None or option.dest in others
    assert option.annotation


def test_help_shows_every_option_and_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = help_text("graphstep train", "100 % fun")
    assert "100 % fun" in text
    assert all(spelling in text for spelling in SPELLINGS.split())
    assert "(default: 4 x hidden size" in text
    assert "None" not in text
    lines = {entry.split()[0].strip(","): entry for entry in re.split(r"\n  (?=--)", text) if entry.startswith("--")}
    assert "(default: 1234)" in lines["--seed"]
    assert "(default: on)" in lines["--append-eod"]
    assert "moe_preprocess" in lines["--cuda-graph-modules"]
    assert "fp32 main weights" in lines["--bf16"]
    assert "--disable-bias-linear" in lines["--moe-grouped-gemm"]
    assert "a GPU needs --bf16" in lines["--moe-grouped-gemm"]
    assert "must divide the heads of a layer: 2 x hidden size / channels" in lines["--mamba-num-groups"]
    for name in ("policy", "on-mismatch", "max-signatures", "merge-layers", "debug"):
        assert "transformer_engine" in lines[f"--cuda-graph-{name}"]


def test_help_of_another_table() -> None:
    text = help_text("x", "", (Option(dest="a", flags=("--a",), group="g", help="50%", metavar="N", default=3),))
    assert "50% (default: 3)" in text
