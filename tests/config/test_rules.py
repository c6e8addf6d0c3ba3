"""Every rule has an example that breaks it, and says something useful."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from graphstep.config import DataConfig, ModelConfig, RunConfig, TrainingConfig, from_argv
from graphstep.config.options import OPTIONS
from graphstep.config.rules import RULES, Rule
from graphstep.config.switches import CudaGraphConfig
from graphstep.errors import ConfigError

FULL = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
LOCAL = "--cuda-graph-impl local"

# rule -> a command line that breaks it, and nothing else
PROBLEMS = {
    "heads-divide-hidden": "--hidden-size 100 --num-attention-heads 3",
    "groups-divide-heads": "--group-query-attention --num-query-groups 3",
    "groups-missing": "--group-query-attention",
    "sequence-exceeds-positions": "--seq-length 64 --max-position-embeddings 32",
    "rotary-channels": "--position-embedding-type rope --kv-channels 5",
    "batches-divide": "--micro-batch-size 4 --global-batch-size 6",
    "min-lr-above-lr": "--lr 1e-4 --min-lr 1e-3",
    "warmup-init-above-lr": "--lr 1e-4 --lr-warmup-init 1e-3",
    "warmup-given-twice": "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
    "warmup-too-long": "--train-iters 10 --lr-warmup-iters 10",
    "wsd-decay-missing": "--lr-decay-style WSD",
    "wsd-decay-too-long": "--lr-decay-style WSD --train-iters 10 --lr-warmup-iters 5 --lr-wsd-decay-iters 6",
    "comparison-too-long": f"--train-iters 10 --compare-with-eager 20 {LOCAL}",
    "tokenizer-model-missing": "--tokenizer-type HuggingFaceTokenizer",
    "mock-and-real-data": "--mock-data --data-path a.txt",
    "validation-without-data": "--split 1,0,1",
    "full-iteration-nan-check": "--cuda-graph-impl full_iteration",
    "full-iteration-modules": f"{FULL} --cuda-graph-modules attn",
    "modules-need-experts": f"{LOCAL} --cuda-graph-modules attn moe_router",
    "modules-match-nothing": f"{LOCAL} --cuda-graph-modules mamba",
    "inference-scope-needs-local": f"{FULL} --inference-cuda-graph-scope block",
    "inference-scope-none": f"{LOCAL} --inference-cuda-graph-scope none",
}
NOTICES = {
    "groups-without-effect": "--num-query-groups 2",
    "rotary-without-effect": "--rotary-base 5",
    "qkv-bias-without-effect": "--add-qkv-bias",
    "warmup-beyond-run": "--train-iters 10 --lr-decay-iters 100 --lr-warmup-iters 20",
    "wsd-without-effect": "--lr-wsd-decay-iters 3",
    "decay-without-effect": "--lr-decay-style constant --min-lr 1e-5",
    "comparison-without-graphs": "--compare-with-eager 3",
    "save-interval-without-save": "--save-interval 3",
    "eval-interval-without-effect": "--eval-interval 7 --eval-iters 0",
    "tokenizer-model-without-effect": "--tokenizer-model tokenizer.json",
    "module-matches-nothing": f"{LOCAL} --cuda-graph-modules attn mamba",
    "modules-without-graphs": "--cuda-graph-modules moe",
    "warmup-zero": f"{LOCAL} --cuda-graph-warmup-steps 0",
    "warmup-without-graphs": "--cuda-graph-warmup-steps 5",
    "pool-without-effect": f"{LOCAL} --no-cuda-graph-use-single-mempool",
    "retain-without-effect": f"{FULL} --cuda-graph-retain-backward-graph",
}
TRAINING_PROBLEMS = {
    "not-available-transformer-engine": "--cuda-graph-impl transformer_engine",
    "not-available-optimizer-graph": "--optimizer-cuda-graph",
    "not-available-retain": f"{LOCAL} --cuda-graph-retain-backward-graph",
}
TRAINING_NOTICES = {
    "inference-scope-without-effect": f"{LOCAL} --inference-cuda-graph-scope block",
    "pool-always-single": f"{FULL} --no-cuda-graph-use-single-mempool",
}

# option -> values that are wrong by themselves
WRONG_VALUES = {
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
    "data_path": ((),),
    "split": ("", "0,1,1", "a,b,c", "1,2,3,4", "1,-1,1", "nan,1,1", "1e400"),
    "tokenizer_type": ("bytes",),
    "make_vocab_size_divisible_by": (0,),
    "cuda_graph_warmup_steps": (-1,),
}


def codes(argv: str, *, for_training: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_argv(argv.split(), for_training=for_training)
    return [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize(("code", "argv"), PROBLEMS.items())
def test_a_broken_rule_is_the_only_problem(code: str, argv: str) -> None:
    assert codes(argv) == [code]


@pytest.mark.parametrize(("code", "argv"), NOTICES.items())
def test_a_broken_notice_lets_the_run_go_on(code: str, argv: str) -> None:
    assert [notice.code for notice in from_argv(argv.split()).notices] == [code]


@pytest.mark.parametrize(("code", "argv"), TRAINING_PROBLEMS.items())
def test_what_train_cannot_do_yet_is_refused_by_train_only(code: str, argv: str) -> None:
    assert codes(argv, for_training=True) == [code]
    assert from_argv(argv.split()).notices == ()


@pytest.mark.parametrize(("code", "argv"), TRAINING_NOTICES.items())
def test_what_has_no_effect_in_train_is_said_in_train_only(code: str, argv: str) -> None:
    assert [notice.code for notice in from_argv(argv.split(), for_training=True).notices] == [code]
    assert from_argv(argv.split()).notices == ()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, bad in WRONG_VALUES.items() for value in bad])
def test_a_wrong_value_is_the_only_problem(name: str, value: object) -> None:
    target = {option.dest: option for option in OPTIONS}[name]
    section = {"model": ModelConfig, "training": TrainingConfig, "data": DataConfig, "graphs": CudaGraphConfig}
    with pytest.raises(ConfigError) as caught:
        section[str(target.section)](**{target.target: value})
    assert [problem.code for problem in caught.value.problems] == [f"{name.replace('_', '-')}-range"]
    assert caught.value.problems[0].where == target.spellings[0]


@pytest.mark.parametrize("fraction", ["-0.1", "1"])
def test_warmup_fraction_out_of_range(fraction: str) -> None:
    assert codes(f"--lr-warmup-fraction {fraction}") == ["lr-warmup-fraction-range"]


def test_every_rule_has_an_example() -> None:
    examples = {*PROBLEMS, *NOTICES, *TRAINING_PROBLEMS, *TRAINING_NOTICES, "lr-warmup-fraction-range"}
    examples |= {f"{name.replace('_', '-')}-range" for name in WRONG_VALUES}
    assert {rule.code for rule in RULES} == examples


def test_codes_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_declares_what_it_looks_at_and_names_real_options(rule: Rule) -> None:
    options = RunConfig().options() | {option.dest: option.default for option in OPTIONS if option.section is None}
    options |= {f"given_{option.dest}": True for option in OPTIONS} | {"layer_modules": frozenset()}
    options |= {"cuda_graph_impl": "local", "cuda_graph_modules": ("mamba",)}
    declared = {name: options[name] for name in rule.fields}
    assert isinstance(rule.broken(SimpleNamespace(**declared)), bool)
    assert rule.what.format_map(declared)
    assert rule.fix
    assert rule.fix.format_map(declared)
    spellings = {spelling for option in OPTIONS for spelling in option.spellings}
    named = {word.strip(".,:;()") for word in f"{rule.what} {rule.fix} {rule.where}".split() if word.startswith("--")}
    assert named <= spellings


def test_the_nan_check_message_says_what_to_add() -> None:
    with pytest.raises(ConfigError) as caught:
        from_argv(["--cuda-graph-impl", "full_iteration"])
    assert caught.value.problems[0].fix == "add --no-check-for-nan-in-loss-and-grad"


def test_all_problems_are_reported_together() -> None:
    argv = "--num-layers 0 --hidden-size 100 --num-attention-heads 3 --lr 1e-4 --min-lr 1 --split x --what --bf16=1"
    assert sorted(codes(argv)) == [
        "heads-divide-hidden",
        "min-lr-above-lr",
        "num-layers-range",
        "split-range",
        "unexpected-value",
        "unknown-option",
    ]


def test_a_wrong_value_causes_no_further_complaints() -> None:
    assert codes("--num-attention-heads 0") == ["num-attention-heads-range"]
    assert codes("--hidden-size x --num-attention-heads 3") == ["malformed-value"]
    assert codes("--micro-batch-size x --global-batch-size 7") == ["malformed-value"]
    assert codes("--train-iters -3 --lr-warmup-iters 5 --compare-with-eager 2") == ["train-iters-range"]
    assert codes("--seq-length 0") == ["seq-length-range"]


@pytest.mark.parametrize(
    "argv",
    [
        "",
        FULL,
        LOCAL,
        f"{LOCAL} --cuda-graph-modules attn mlp",
        "--cuda-graph-impl none --inference-cuda-graph-scope none",
        "--hidden-size 100 --num-attention-heads 3 --kv-channels 33",
        "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-warmup-iters 5",
        "--lr-warmup-fraction 0",
        "--split 1 --eval-iters 0",
        "--split 90/10",
        "--clip-grad 0 --weight-decay 0 --eval-iters 0 --compare-with-eager 0 --seed 0",
    ],
)
def test_good_options_pass_without_notices(argv: str) -> None:
    assert from_argv(argv.split(), for_training=True).notices == ()
