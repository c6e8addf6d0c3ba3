"""What rules tell users to do works, and is not what they have done already."""

from __future__ import annotations

import itertools

import pytest

from graphstep.config import from_argv
from graphstep.errors import ConfigError, Problem

EXPERTS = "--num-experts 8"
WHOLE, STATIC = "whole-layers-need-static-experts", "moe-needs-static-shapes"


def the_problem(words: str, code: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        from_argv(words.split(), {}, for_training=True)
    return next(problem for problem in caught.value.problems if problem.code == code)


def is_taken(words: str) -> bool:
    return bool(from_argv(words.split(), {}, for_training=True))


@pytest.mark.parametrize(
    "given",
    [
        "",
        "--moe-expert-capacity-factor 2",
        "--bf16",
        "--disable-bias-linear --device cpu",
        "--moe-grouped-gemm --disable-bias-linear --device cuda",
        "--moe-router-load-balancing-type none",
    ],
)
@pytest.mark.parametrize(
    ("impl", "code"),
    [
        ("--cuda-graph-impl local", WHOLE),
        ("--cuda-graph-impl transformer_engine", WHOLE),
        ("--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", WHOLE),
        ("--cuda-graph-impl local --cuda-graph-modules moe", STATIC),
    ],
)
def test_either_way_to_static_experts_works(given: str, impl: str, code: str) -> None:
    """What is missing is named, what was given is not, and with it the run is taken."""
    words = f"{EXPERTS} {impl} {given}"
    fix = the_problem(words, code).fix
    ways = fix.partition(";")[0].removeprefix("add ").removesuffix(", which drops tokens").split(", or ")
    assert len(ways) == 2
    for way in ways:
        assert not set(way.split()) & set(given.split())
        assert is_taken(f"{words} {way}")
    assert ("which drops tokens" in fix) is ("--moe-expert-capacity-factor" not in given)


@pytest.mark.parametrize(
    "pattern", ["", "--hybrid-layer-pattern *E-", "--hybrid-layer-pattern ME --mamba-num-groups 1"]
)
@pytest.mark.parametrize("impl", ["local", "transformer_engine", "full_iteration"])
def test_parts_of_layers_that_are_offered_are_there(impl: str, pattern: str) -> None:
    nan = "--no-check-for-nan-in-loss-and-grad"
    fix = the_problem(f"{EXPERTS} --cuda-graph-impl {impl} {nan} {pattern}", WHOLE).fix
    parts = fix.partition("capture parts of layers: ")[2].partition(";")[0]
    given = "" if "--cuda-graph-impl" in parts else f"--cuda-graph-impl {impl}"
    config = from_argv(f"{EXPERTS} {nan} {pattern} {given} {parts}".split(), {}, for_training=True)
    assert not [notice for notice in config.notices if notice.code.startswith("no-layer-for")]


@pytest.mark.parametrize(
    ("impl", "policy", "said"),
    [
        ("local", "required", "--cuda-graph-policy auto"),
        ("transformer_engine", "required", ""),
        ("transformer_engine", "auto", "(--cuda-graph-policy auto has no effect with transformer_engine)"),
        ("full_iteration", "required", ""),
    ],
)
def test_a_policy_is_offered_where_it_helps(impl: str, policy: str, said: str) -> None:
    nan = "--no-check-for-nan-in-loss-and-grad"
    fix = the_problem(f"{EXPERTS} --cuda-graph-impl {impl} {nan} --cuda-graph-policy {policy}", WHOLE).fix
    assert said in fix
    assert ("--cuda-graph-policy" in fix) is bool(said)
    if impl == "local":
        assert is_taken(f"{EXPERTS} --cuda-graph-impl local --cuda-graph-policy auto")


@pytest.mark.parametrize(
    ("words", "named", "present"),
    [
        ("--cuda-graph-modules mamba", "mamba", "attn mlp"),
        ("--hybrid-layer-pattern M-M --mamba-num-groups 1 --cuda-graph-modules attn", "attn", "mlp mamba"),
        (
            "--hybrid-layer-pattern *E --num-experts 4 --cuda-graph-modules mamba",
            "mamba",
            "attn moe_router moe_preprocess",
        ),
    ],
)
def test_modules_of_no_layer_and_those_that_there_are(words: str, named: str, present: str) -> None:
    problem = the_problem(f"--cuda-graph-impl local {words}", "modules-match-nothing")
    assert problem.what.endswith(f"no layer of this model has {named}")
    assert problem.fix.startswith(f"name some of {present}")
    assert problem.where == "--cuda-graph-modules"


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_a_module_of_no_layer_beside_others(impl: str) -> None:
    words = f"--cuda-graph-impl {impl} --cuda-graph-modules mamba attn"
    problem = the_problem(words, "module-in-no-layer")
    assert problem.fix == "leave mamba out; the parts are attn mlp"
    assert {notice.code for notice in from_argv(words.split(), {}).notices} == {"no-layer-for-mamba"}


CAPACITY = "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.0"
FULL = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"


GROUPED = "--moe-grouped-gemm --disable-bias-linear --bf16"
PADDED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity, which drops tokens"
PARTS = "capture parts of layers: --cuda-graph-modules"
EAGERLY = "let layers with experts run eagerly: --cuda-graph-policy auto"
LEFT_OUT = "leave --cuda-graph-modules out"


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        # Sinkhorn balancing knows no capacity, so that only one way is left.
        (
            f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --cuda-graph-impl local",
            WHOLE,
            f"add {GROUPED}; or {PARTS} attn moe_router moe_preprocess; or {EAGERLY}",
        ),
        # A capacity without padding: preparing the dispatch reads on the host.
        (
            f"{EXPERTS} {CAPACITY} --cuda-graph-impl local --cuda-graph-policy auto --cuda-graph-modules moe",
            STATIC,
            f"add {GROUPED}, or --moe-pad-expert-input-to-capacity (--cuda-graph-policy auto does not help: moe is "
            "named)",
        ),
        (
            f"{EXPERTS} {CAPACITY} --cuda-graph-impl local",
            WHOLE,
            f"add {GROUPED}, or --moe-pad-expert-input-to-capacity; or {PARTS} attn; or {EAGERLY}",
        ),
        (
            f"{EXPERTS} {CAPACITY} --cuda-graph-impl transformer_engine --cuda-graph-modules moe_router moe_preprocess",
            "preprocess-reads-counts",
            "add --moe-pad-expert-input-to-capacity, or name no more than attn moe_router",
        ),
        (
            f"{EXPERTS} {CAPACITY} --cuda-graph-impl local --cuda-graph-modules moe_router",
            "preprocess-reads-counts",
            "add --moe-pad-expert-input-to-capacity, or name no more than attn",
        ),
        # Each way out of a pair of options that need each other.
        (
            "--parallel-weight-gradients",
            "parallel-weight-gradients-fusion",
            "add --gradient-accumulation-fusion, or leave --parallel-weight-gradients out",
        ),
        (
            f"{EXPERTS} --moe-use-grouped-tensor",
            "grouped-tensor-gemm",
            "add --moe-grouped-gemm, or leave --moe-use-grouped-tensor out",
        ),
        ("--hybrid-layer-pattern EE|E", "pattern-needs-experts", "add --num-experts"),
        (
            "--hybrid-layer-pattern *E",
            "pattern-needs-experts",
            "add --num-experts, or leave E out of --hybrid-layer-pattern",
        ),
        (
            "--transformer-impl inference_optimized --normalization RMSNorm --disable-bias-linear --add-qkv-bias",
            "inference-optimized-layers",
            "leave --add-qkv-bias out, or use --transformer-impl transformer_engine",
        ),
        (
            "--num-experts 1 --moe-router-topk 1 --moe-router-pre-softmax --moe-router-num-groups 4 "
            "--moe-router-group-topk 1",
            "groups-divide-experts",
            "use a --moe-router-num-groups that divides --num-experts",
        ),
        # Widths that the product of all experts cannot have.
        (
            f"{EXPERTS} --hidden-size 20 --num-attention-heads 2 --cuda-graph-impl local --cuda-graph-modules moe",
            STATIC,
            f"add {GROUPED} with multiples of 8 for --hidden-size and --moe-ffn-hidden-size, or {PADDED}; or name "
            "moe_router, not moe",
        ),
        # What adds gradients itself has no graphs of its own.
        (
            f"{EXPERTS} {FULL} --gradient-accumulation-fusion",
            WHOLE,
            f"add {GROUPED}, or {PADDED}",
        ),
        (
            f"{EXPERTS} --cuda-graph-impl local --cuda-graph-modules attn --gradient-accumulation-fusion",
            "fusion-captured-modules",
            f"use {FULL} without --cuda-graph-modules, or leave --gradient-accumulation-fusion out",
        ),
        (
            "--cuda-graph-impl transformer_engine --no-check-for-nan-in-loss-and-grad --compile",
            "compile-captured-modules",
            "use --cuda-graph-impl full_iteration, or leave --compile out",
        ),
        # Some layers have no experts.
        (
            f"{EXPERTS} --moe-layer-freq 2 --cuda-graph-impl transformer_engine",
            WHOLE,
            f"add {GROUPED}, or {PADDED}; or {PARTS} attn mlp moe_router moe_preprocess",
        ),
        (
            f"{EXPERTS} --cuda-graph-impl local --cuda-graph-modules mlp",
            "mlp-needs-dense-layers",
            "name some of attn moe_router moe_preprocess",
        ),
        (
            f"{EXPERTS} --moe-grouped-gemm --disable-bias-linear --cuda-graph-impl local --cuda-graph-modules attn mlp",
            "mlp-needs-dense-layers",
            f"name some of attn moe moe_router moe_preprocess, or {LEFT_OUT} to capture whole layers",
        ),
        (
            f"{EXPERTS} --hybrid-layer-pattern M* --mamba-num-groups 1 --cuda-graph-impl local "
            "--cuda-graph-modules mlp",
            "mlp-needs-dense-layers",
            f"name some of attn mamba, or {LEFT_OUT} to capture whole layers",
        ),
        # No experts to choose from.
        (
            "--hybrid-layer-pattern *- --cuda-graph-impl local --cuda-graph-modules moe",
            "modules-need-experts",
            "add --num-experts with 2 or more, and an E to --hybrid-layer-pattern, or name only modules the model has, "
            f"or {LEFT_OUT}",
        ),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_preprocess",
            "modules-need-experts",
            f"add --num-experts with 2 or more, or name only modules the model has, or {LEFT_OUT}",
        ),
        (
            "--num-experts 1 --moe-router-topk 1 --moe-router-pre-softmax --cuda-graph-impl transformer_engine",
            WHOLE,
            f"add {GROUPED}, or {PADDED}; or {PARTS} attn",
        ),
        (
            "--num-experts 1",
            "topk-exceeds-one-expert",
            "use --moe-router-topk 1 --moe-router-pre-softmax, or more experts",
        ),
        (
            "--num-experts 1 --moe-router-score-function sigmoid",
            "topk-exceeds-one-expert",
            "use --moe-router-topk 1, or more experts",
        ),
        (f"{EXPERTS} --moe-router-topk 9", "topk-exceeds-experts", "lower --moe-router-topk to 8 or less"),
        (
            f"{EXPERTS} --moe-grouped-gemm --disable-bias-linear --cuda-graph-impl transformer_engine "
            "--cuda-graph-modules moe moe_preprocess",
            "preprocess-needs-router",
            "leave moe_preprocess out",
        ),
        (
            f"{EXPERTS} --moe-grouped-gemm --cuda-graph-impl local --cuda-graph-modules attn",
            "moe-grouped-gemm-bias",
            "add --disable-bias-linear, or leave --moe-grouped-gemm out",
        ),
        (f"{EXPERTS} --moe-grouped-gemm --cuda-graph-impl local", "moe-grouped-gemm-bias", "add --disable-bias-linear"),
        (
            f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep",
            "not-available-flex-dispatcher",
            "use --moe-token-dispatcher-type alltoall or allgather, and leave --moe-flex-dispatcher-backend out",
        ),
        (
            "--hybrid-layer-pattern DD --cuda-graph-impl local --cuda-graph-modules attn",
            "modules-match-nothing",
            f"{LEFT_OUT} to capture whole layers",
        ),
    ],
)
def test_advice_leads_somewhere(words: str, code: str, fix: str) -> None:
    assert the_problem(words, code).fix == fix


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        ("--hidden-size 12 --device cpu --bf16", 8),
        ("--hidden-size 14 --device cpu", 4),
        ("--hidden-size 16 --device cpu --moe-ffn-hidden-size 6", 4),
        ("--hidden-size 16 --bf16 --ffn-hidden-size 12", 8),
        ("--hidden-size 12", 8),
        ("--hidden-size 12 --device cpu", 0),
        ("--hidden-size 14 --device cpu --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", 0),
    ],
)
def test_widths_of_one_product(sizes: str, multiple: int) -> None:
    words = f"{EXPERTS} --num-attention-heads 2 --moe-grouped-gemm --disable-bias-linear {sizes}"
    if not multiple:
        assert is_taken(words)
        return
    problem = the_problem(words, "moe-grouped-gemm-sizes")
    assert f"multiples of {multiple}" in problem.fix
    assert "None" not in problem.what


@pytest.mark.parametrize(
    "words",
    [
        "--num-experts 4 --moe-grouped-gemm",
        "--num-experts 1",
        "--num-experts 4 --moe-token-dispatcher-type flex",
        "--num-experts 4 --moe-grouped-gemm --disable-bias-linear --moe-ffn-hidden-size 12",
    ],
)
def test_experts_of_no_layer_are_a_notice_and_no_problem(words: str) -> None:
    config = from_argv(f"--hybrid-layer-pattern *- {words}".split(), {}, for_training=True)
    assert "experts-without-layer" in {notice.code for notice in config.notices}


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (
            "--hybrid-layer-pattern *E --moe-grouped-gemm --cuda-graph-impl local",
            {"pattern-needs-experts", "moe-grouped-gemm-bias"},
        ),
        ("--hybrid-layer-pattern *E --cuda-graph-impl transformer_engine", {"pattern-needs-experts", WHOLE}),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_preprocess",
            {"preprocess-needs-router", "modules-need-experts"},
        ),
        (
            f"{EXPERTS} --moe-grouped-gemm --moe-router-topk 9 --cuda-graph-impl local",
            {"topk-exceeds-experts", "moe-grouped-gemm-bias"},
        ),
    ],
)
def test_all_at_once(words: str, codes: set[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_argv(words.split(), {}, for_training=True)
    assert {problem.code for problem in caught.value.problems} == codes


@pytest.mark.parametrize("impl", ["local", "transformer_engine", "full_iteration"])
def test_nothing_has_to_be_static_where_graphs_are_switched_off(impl: str) -> None:
    words = f"{EXPERTS} --cuda-graph-impl {impl} --no-check-for-nan-in-loss-and-grad --cuda-graph-policy off"
    notices = {notice.code for notice in from_argv(words.split(), {}, for_training=True).notices}
    assert "policy-off" in notices
    assert "policy-without-effect" not in notices


def test_what_is_accepted_without_a_run_in_view_still_is() -> None:
    """Rules of the run alone do not reach those who only describe a configuration."""
    impls = ("local", "transformer_engine")
    modules = ("", "--cuda-graph-modules attn mamba")
    for impl, named in itertools.product(impls, modules):
        assert from_argv(f"{EXPERTS} --cuda-graph-impl {impl} {named}".split(), {})
