"""What is said of options that differ from those of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from graphstep.config import RunConfig, from_argv
from graphstep.training.option_differences import option_problems, precision_problem
from graphstep.training.setup import architecture

BASE = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4")
EXPERTS = "--num-experts 4"
HYBRID = "--hybrid-layer-pattern"


def model(*argv: str) -> dict[str, Any]:
    """The architecture as a checkpoint holds it, with the options of ``BASE`` before those given."""
    return dict(json.loads(json.dumps(architecture(from_argv((*BASE, *argv))))))


def texts(here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(problem.what, problem.fix) for problem in option_problems(here, saved, where="state.json")]


@pytest.mark.parametrize(
    ("here", "saved", "what", "advice"),
    [
        ("--hidden-size 64", "", "--hidden-size is 64 here and 32", "use --hidden-size 32"),
        ("--num-layers 3", "", "--num-layers is 3 here and 2", "use --num-layers 2"),
        ("--num-attention-heads 8", "", "--num-attention-heads is 8 here and 4", "use --num-attention-heads 4"),
        ("--qk-layernorm", "", "--qk-layernorm is on here and off", "leave --qk-layernorm out"),
        ("", "--qk-layernorm", "--qk-layernorm is off here and on", "add --qk-layernorm"),
        ("--swiglu", "", "--swiglu is on here and off", "leave --swiglu out"),
        ("", "--swiglu --hidden-size 32", "--swiglu is off here and on", "add --swiglu"),
        ("--disable-bias-linear", "", "--disable-bias-linear is on here and off", "leave --disable-bias-linear out"),
        ("", "--disable-bias-linear", "--disable-bias-linear is off here and on", "add --disable-bias-linear"),
        ("--ffn-hidden-size 100", "", "--ffn-hidden-size is 100 here and 128", "use --ffn-hidden-size 128"),
        ("--seq-length 64", "", "--max-position-embeddings is 64 here and 128", "use --max-position-embeddings 128"),
        (
            "",
            "--group-query-attention --num-query-groups 2",
            "--num-query-groups is 4 here and 2",
            "use --group-query-attention --num-query-groups 2",
        ),
        (
            "--group-query-attention --num-query-groups 2",
            "",
            "--num-query-groups is 2 here and 4",
            "leave --group-query-attention out",
        ),
        (
            "--hidden-size 64",
            "--ffn-hidden-size 256",
            "--hidden-size is 64 here and 32",
            "use --hidden-size 32 and use --ffn-hidden-size 256",
        ),
        ("--vocab-size 256", "--vocab-size 512", "--vocab-size is 256 here and 512", "--vocab-size 512"),
        ("--normalization RMSNorm", "", "--normalization is RMSNorm here and LayerNorm", "use --normalization LayerN"),
        ("--num-experts 4", "", "--num-experts is 4 here and left out", "leave --num-experts out"),
        ("", "--num-experts 4", "--num-experts is left out here and 4", "use --num-experts 4"),
        (
            f"{EXPERTS} --moe-layer-freq [0,1]",
            EXPERTS,
            "--moe-layer-freq is [0,1] here and 1",
            "use --moe-layer-freq 1",
        ),
        (EXPERTS, f"{EXPERTS} --moe-layer-freq [0,1]", "--moe-layer-freq is 1 here and [0,1]", "-freq [0,1],"),
        (
            f"{EXPERTS} --moe-ffn-hidden-size 16",
            EXPERTS,
            "--moe-ffn-hidden-size is 16 here and 128",
            "use --moe-ffn-hidden-size 128",
        ),
        (
            EXPERTS,
            f"{EXPERTS} --moe-router-score-function sigmoid",
            "--moe-router-score-function is softmax here and sigmoid",
            "use --moe-router-score-function sigmoid",
        ),
        (
            f"{EXPERTS} --moe-shared-expert-intermediate-size 8",
            EXPERTS,
            "--moe-shared-expert-intermediate-size is 8 here and left out",
            "leave --moe-shared-expert-intermediate-size out",
        ),
        (f"{HYBRID} M*", "", "--hybrid-layer-pattern is M* here and left out", "leave --hybrid-layer-pattern out"),
        (f"{HYBRID} M*", f"{HYBRID} -*", "--hybrid-layer-pattern is M* here and -*", "use --hybrid-layer-pattern -*"),
        (
            f"{HYBRID} M* --mamba-state-dim 16",
            f"{HYBRID} M*",
            "--mamba-state-dim is 16 here and 128",
            "use --mamba-state-dim 128",
        ),
    ],
    ids=lambda text: text or "base",
)
def test_one_option_is_one_problem(here: str, saved: str, what: str, advice: str) -> None:
    [(found_what, found_fix)] = texts(model(*here.split()), model(*saved.split()))
    assert found_what == f"{what} in the checkpoint"
    assert advice in found_fix
    assert found_fix.endswith("nothing was loaded")


def test_several_options_are_all_named_and_following_the_advice_helps() -> None:
    saved = model("--hidden-size", "48", "--ffn-hidden-size", "80", "--kv-channels", "16", "--add-qkv-bias")
    here = ("--num-layers", "4")
    problems = texts(model(*here), saved)
    assert [what.split()[0] for what, _ in problems] == [
        "--num-layers",
        "--hidden-size",
        "--kv-channels",
        "--ffn-hidden-size",
        "--add-qkv-bias",
    ]
    words = [word for _, fix in problems for word in re.findall(r"--[a-z-]+(?: \d+)?", fix)]
    assert texts(model(*here, *" ".join(words).split()), saved) == []


def test_losses_and_capacities_may_change() -> None:
    here = "--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none --moe-expert-capacity-factor 2"
    assert texts(model(*EXPERTS.split(), *here.split()), model(*EXPERTS.split())) == []


def test_a_model_of_attention_and_mlp_has_what_it_had_before_there_were_others() -> None:
    assert not any(name.startswith(("moe", "mamba", "num_experts", "hybrid")) for name in model())
    assert not any(name.startswith(("moe", "num_experts")) for name in model(*EXPERTS.split(), *f"{HYBRID} M*".split()))


def test_equal_architectures_have_no_problem() -> None:
    assert texts(architecture(RunConfig()), json.loads(json.dumps(architecture(RunConfig())))) == []


@pytest.mark.parametrize("value", [None, "32", [], {}, 1.5, True])
def test_values_of_a_damaged_file_are_shown_as_they_are(value: Any) -> None:
    saved = {**model(), "hidden_size": value, "swiglu": value}
    assert any("hidden" in what and str(value) in what for what, _ in texts(model(), saved))


def test_names_that_are_no_options_are_shown_too() -> None:
    saved = {name: value for name, value in model().items() if name != "rotary_base"} | {"twist": 3}
    assert [what for what, _ in texts(model(), saved)] == [
        "rotary_base: expected 10000.0, found None",
        "twist: expected None, found 3",
    ]


def test_the_precision_is_named_by_its_option() -> None:
    fp32, bf16 = {torch.float32}, {torch.bfloat16}
    problem = precision_problem(bf16, fp32, where="")
    assert problem is not None
    assert problem.what == "--bf16 is on here and off in the checkpoint"
    assert problem.fix.startswith("leave --bf16 out")
    problem = precision_problem(fp32, bf16, where="")
    assert problem is not None
    assert problem.fix.startswith("add --bf16")
    assert precision_problem(fp32, fp32, where="") is None
    assert precision_problem(fp32 | bf16, fp32, where="") is None
    assert precision_problem(fp32, {torch.float64}, where="") is None
    assert precision_problem(fp32, set(), where="") is None
