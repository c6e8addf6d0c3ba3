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
            "attn moe moe_router moe_preprocess",
        ),
    ],
)
def test_modules_of_no_layer_and_those_that_there_are(words: str, named: str, present: str) -> None:
    problem = the_problem(f"--cuda-graph-impl local {words}", "modules-match-nothing")
    assert problem.what.endswith(f"no layer of this model has {named}")
    assert f"name some of {present}, or" in problem.fix
    assert problem.where == "--cuda-graph-modules"


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_a_module_of_no_layer_beside_others(impl: str) -> None:
    words = f"--cuda-graph-impl {impl} --cuda-graph-modules mamba attn"
    problem = the_problem(words, "module-in-no-layer")
    assert problem.fix == "leave mamba out; the parts are attn mlp"
    assert {notice.code for notice in from_argv(words.split(), {}).notices} == {"no-layer-for-mamba"}


def test_what_is_accepted_without_a_run_in_view_still_is() -> None:
    """Rules of the run alone do not reach those who only describe a configuration."""
    impls = ("local", "transformer_engine")
    modules = ("", "--cuda-graph-modules attn mamba")
    for impl, named in itertools.product(impls, modules):
        assert from_argv(f"{EXPERTS} --cuda-graph-impl {impl} {named}".split(), {})
