"""Every rule has an example that breaks it, and says something useful."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.config.rule_examples import (
    BY_NAME,
    FULL,
    LOCAL,
    NOTICES,
    NOTICES_TOGETHER,
    PROBLEMS,
    TRAINING_NOTICES,
    TRAINING_PROBLEMS,
    TRAINING_PROBLEMS_TOGETHER,
    WRONG_VALUES,
    Example,
    any_use_of,
    example,
)

from graphstep.config import RunConfig, from_argv
from graphstep.config.options import OPTIONS
from graphstep.config.rules import RULES, Rule
from graphstep.config.rules.rule import FACTS
from graphstep.config.run import SECTIONS
from graphstep.errors import ConfigError

WITHOUT_EFFECT = [
    rule.fields[0]
    for rule in RULES
    if rule.code.endswith("-without-effect") and f"given_{rule.fields[0]}" in rule.fields and not rule.for_training
]
IDLE_IN_TRAIN = [rule.fields[0] for rule in RULES if rule.code.endswith("-unused-in-train")]


def read(value: str | Example, *, for_training: bool = False) -> RunConfig:
    it = example(value)
    return from_argv(it.argv.split(), it.env, machine=it.machine, for_training=for_training)


def codes(value: str | Example, *, for_training: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(value, for_training=for_training)
    return [problem.code for problem in caught.value.problems]


def noticed(value: str | Example, *, for_training: bool = False) -> list[str]:
    return [notice.code for notice in read(value, for_training=for_training).notices]


@pytest.mark.parametrize(("code", "value"), PROBLEMS.items())
def test_a_broken_rule_is_the_only_problem(code: str, value: str | Example) -> None:
    assert codes(value) == [code]


@pytest.mark.parametrize(("code", "value"), NOTICES.items())
def test_a_broken_notice_lets_the_run_go_on(code: str, value: str | Example) -> None:
    assert noticed(value) == [code]


@pytest.mark.parametrize(("code", "value"), NOTICES_TOGETHER.items())
def test_notices_come_together(code: str, value: str | Example) -> None:
    assert code in noticed(value)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_option_without_effect_is_a_notice(name: str) -> None:
    if name not in ("num_query_groups",):
        assert noticed(any_use_of(BY_NAME[name])) == [f"{name.replace('_', '-')}-without-effect"]


@pytest.mark.parametrize("name", IDLE_IN_TRAIN)
def test_an_option_without_effect_in_train_is_a_notice_there(name: str) -> None:
    words = any_use_of(BY_NAME[name])
    if name == "transformer_impl":
        words = f"{words} --normalization RMSNorm --disable-bias-linear"
    if name == "moe_use_grouped_tensor":
        words = f"{words} --moe-grouped-gemm"
    assert set(noticed(words, for_training=True)) - set(noticed(words)) == {f"{name.replace('_', '-')}-unused-in-train"}


@pytest.mark.parametrize(("code", "value"), TRAINING_PROBLEMS.items())
def test_what_train_cannot_do_yet_is_refused_by_train_only(code: str, value: str | Example) -> None:
    assert codes(value, for_training=True) == [code]
    read(value)


@pytest.mark.parametrize(("code", "value"), TRAINING_PROBLEMS_TOGETHER.items())
def test_what_train_cannot_do_yet_may_come_together(code: str, value: str | Example) -> None:
    found = codes(value, for_training=True)
    assert code in found
    assert all(other.startswith("not-available-") for other in found)
    read(value)


@pytest.mark.parametrize(("code", "value"), TRAINING_NOTICES.items())
def test_what_has_no_effect_in_train_is_said_in_train_only(code: str, value: str | Example) -> None:
    assert noticed(value, for_training=True) == [code]
    assert noticed(value) == []


@pytest.mark.parametrize("layers", ["--hybrid-layer-pattern *-", "--num-layers 2 --moe-layer-freq [0,0]"])
def test_experts_of_no_layer_are_said_to_have_no_effect_and_nothing_else(layers: str) -> None:
    """Whether they could be captured is no question then."""
    arguments = f"--num-experts 4 --cuda-graph-impl local {layers}"
    assert noticed(arguments, for_training=True) == ["experts-without-layer"]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, bad in WRONG_VALUES.items() for value in bad])
def test_a_wrong_value_is_the_only_problem(name: str, value: object) -> None:
    target = BY_NAME[name]
    with pytest.raises(ConfigError) as caught:
        SECTIONS[str(target.section)](**{target.target: value})
    assert [problem.code for problem in caught.value.problems] == [f"{name.replace('_', '-')}-range"]
    assert caught.value.problems[0].where == target.spellings[0]


@pytest.mark.parametrize("fraction", ["-0.1", "1"])
def test_warmup_fraction_out_of_range(fraction: str) -> None:
    assert codes(f"--lr-warmup-fraction {fraction}") == ["lr-warmup-fraction-range"]


def test_every_rule_has_an_example() -> None:
    examples = {*PROBLEMS, *NOTICES, *NOTICES_TOGETHER, *TRAINING_PROBLEMS, *TRAINING_PROBLEMS_TOGETHER}
    examples |= {*TRAINING_NOTICES, "lr-warmup-fraction-range"}
    examples |= {f"{name.replace('_', '-')}-range" for name in WRONG_VALUES}
    examples |= {f"{name.replace('_', '-')}-without-effect" for name in WITHOUT_EFFECT}
    examples |= {f"{name.replace('_', '-')}-unused-in-train" for name in IDLE_IN_TRAIN}
    assert {rule.code for rule in RULES} ^ examples <= {"num-query-groups-without-effect"}


def test_codes_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_declares_what_it_looks_at_and_names_real_options(rule: Rule) -> None:
    options = from_argv([], {}).options() | {
        option.dest: option.default for option in OPTIONS if option.section is None
    }
    options |= dict.fromkeys(FACTS, 1) | {f"given_{option.dest}": True for option in OPTIONS}
    options |= {
        "layer_modules": frozenset(),
        "dynamic_experts": "",
        "te_version": (),
        "flashinfer_version": (),
        "given_half_of_router": True,
    }
    options |= {"unmatched_modules": "", "unknown_recompute_modules": "", "unknown_offload_modules": ""}
    options |= RunConfig().options() | {"cuda_graph_impl": "local", "cuda_graph_modules": ("mamba",)}
    options |= {"world_size": 1, "rank": 0, "expandable_segments": False}
    options |= dict.fromkeys(
        (
            "nccl_graph_register",
            "cuda_device_max_connections",
            "nvte_cpu_offload_v1",
            "cuda_graphs_use_node_priority",
            "cuda_graph_capture_freeze_gc",
        ),
        "",
    )
    declared = {name: options[name] for name in rule.fields}
    assert isinstance(rule.broken(SimpleNamespace(**declared)), bool)
    assert rule.what
    assert rule.fix
    if rule.details is None:  # Else the examples show it: only what breaks the rule has such details.
        assert rule.problem(declared)
    assert rule.page == f"docs/rules.md#{rule.code}"
    spellings = {spelling for option in OPTIONS for spelling in option.spellings}
    named = {
        word.strip(".,:;()")
        for word in f"{rule.what} {rule.fix} {rule.fix_on_page} {rule.where}".split()
        if word.startswith("--")
    }
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
