"""Command lines: how words are read, what is refused, what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphstep.config import CapturePolicy, CudaGraphImpl, CudaGraphModule, MismatchPolicy, RunConfig, from_argv
from graphstep.config.run import SECTIONS
from graphstep.errors import ConfigError, Problem


def problems(*argv: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        from_argv(argv)
    return caught.value.problems


def parse(line: str) -> RunConfig:
    return from_argv(line.split())


def test_values_arrive() -> None:
    config = parse(
        "--num-layers 12 --hidden-size=768 --num-attention-heads 12 --group-query-attention --num-query-groups 4 "
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --lr 6e-4 --bf16 "
        "--data-path a.txt b --save out --no-append-eod --cuda-graph-impl local --cuda-graph-modules attn mlp "
        "--cuda-graph-warmup-steps 5 --cuda-graph-retain-backward-graph"
    )
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_query_groups) == (12, 768, 4)
    assert (config.model.swiglu, config.model.normalization, config.model.add_bias_linear) == (True, "RMSNorm", False)
    assert (config.training.lr, config.training.bf16, config.training.save) == (6e-4, True, "out")
    assert (config.data.data_path, config.data.append_eod) == (("a.txt", "b"), False)
    assert config.graphs.impl is CudaGraphImpl.local
    assert config.graphs.modules == (CudaGraphModule.attn, CudaGraphModule.mlp)
    assert (config.graphs.warmup_steps, config.graphs.retain_backward_graph) == (5, True)


OWN = (
    "--cuda-graph-on-mismatch error --cuda-graph-capture-after 3 --cuda-graph-max-signatures 4 "
    "--cuda-graph-merge-layers 0 --cuda-graph-debug"
)
FULL = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"


def test_options_of_local_arrive() -> None:
    graphs = parse(f"--cuda-graph-impl local --cuda-graph-policy auto {OWN}").graphs
    assert (graphs.policy, graphs.on_mismatch) == (CapturePolicy.auto, MismatchPolicy.error)
    assert (graphs.capture_after, graphs.max_signatures, graphs.merge_layers, graphs.debug) == (3, 4, 0, True)


@pytest.mark.parametrize("impl", ["--cuda-graph-impl none", "--cuda-graph-impl transformer_engine", FULL])
def test_options_of_local_are_noticed_where_they_have_no_effect(impl: str) -> None:
    names = {"on-mismatch", "capture-after", "max-signatures", "merge-layers", "debug"}
    if "none" not in impl:
        names -= {"on-mismatch", "max-signatures"}  # these the others have as well
    if "transformer_engine" in impl:
        names -= {"merge-layers", "debug"}
    notices = [notice.code for notice in parse(f"{impl} {OWN}").notices]
    assert sorted(notices) == sorted(f"cuda-graph-{name}-without-effect" for name in names)


@pytest.mark.parametrize("impl", ["--cuda-graph-impl local", "--cuda-graph-impl transformer_engine", FULL])
def test_the_usual_policy_may_be_given(impl: str) -> None:
    assert parse(f"{impl} --cuda-graph-policy required").notices == ()


@pytest.mark.parametrize(
    "words", [["attn,mlp"], ["attn,", "mlp"], ["attn", "mlp"], ["attn, mlp"], ["attn", "mlp,attn"]]
)
def test_modules_may_be_joined_by_commas(words: list[str]) -> None:
    config = from_argv(["--cuda-graph-impl", "local", "--cuda-graph-modules", *words])
    assert config.graphs.modules == ("attn", "mlp")


def test_negative_numbers_are_values() -> None:
    for word in ("-1", "-1e-4", "-.5"):
        assert [problem.code for problem in problems("--lr", word)] == ["lr-range"]
    assert [problem.code for problem in problems("--lr", "-inf")] == ["malformed-value"]


def test_a_dash_and_odd_words_are_values() -> None:
    assert from_argv(["--save", "-"]).training.save == "-"
    assert from_argv(["--save=--odd name"]).training.save == "--odd name"
    assert from_argv(["--save=a=b"]).training.save == "a=b"


def test_the_last_one_counts_and_is_noticed() -> None:
    config = parse("--num-layers 2 --num-layers 3 --bf16 --bf16")
    assert config.model.num_layers == 3
    assert [(notice.code, notice.where) for notice in config.notices] == [("given-twice", "--num-layers")]
    config = from_argv(["--no-append-eod", "--append-eod"])
    assert config.data.append_eod
    assert [notice.code for notice in config.notices] == ["given-twice"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--num_layers", "--num-layers"),
        ("--cuda-graph-imp", "--cuda-graph-impl"),
        ("--no-check-for-nan", "--no-check-for-nan-in-loss-and-grad"),
        ("--Swiglu", "--swiglu"),
    ],
)
def test_typos_get_a_suggestion_and_nothing_is_abbreviated(typed: str, meant: str) -> None:
    (problem,) = problems(typed)
    assert (problem.code, problem.where, problem.fix) == ("unknown-option", typed, f"did you mean {meant}?")


def test_every_unknown_option_is_one_problem() -> None:
    found = problems("--xyzzy", "1", "2", "-q", "--plugh=3", "--")
    assert [(problem.code, problem.where) for problem in found] == [
        ("unknown-option", "--xyzzy"),
        ("unknown-option", "-q"),
        ("unknown-option", "--plugh"),
        ("unknown-option", "--"),
    ]
    assert "--help" in found[0].fix


@pytest.mark.parametrize(
    ("argv", "code", "what"),
    [
        (["--num-layers"], "missing-value", "--num-layers needs a value"),
        (["--num-layers", "--bf16"], "missing-value", "--num-layers needs a value"),
        (["--cuda-graph-modules"], "missing-value", "--cuda-graph-modules needs a value"),
        (["--cuda-graph-modules", ","], "missing-value", "--cuda-graph-modules needs a value"),
        (["--num-layers="], "malformed-value", "--num-layers: expected a whole number, got ''"),
        (["--num-layers", "1.5"], "malformed-value", "--num-layers: expected a whole number, got '1.5'"),
        (["--num-layers", "9" * 30], "malformed-value", "whole number of at most"),
        (["--num-layers", "9" * 5000], "malformed-value", "--num-layers: expected a whole number"),
        (["--lr", "fast"], "malformed-value", "--lr: expected a finite number, got 'fast'"),
        (["--lr", "nan"], "malformed-value", "--lr: expected a finite number, got 'nan'"),
        (["--kv-channels", "0"], "malformed-value", "--kv-channels: expected a whole number above 0, got '0'"),
        (["--global-batch-size", "0"], "malformed-value", "a whole number above 0"),
        (["--save", ""], "malformed-value", "a name that is not empty"),
        (["--save", "a\0b"], "malformed-value", "a name that is not empty"),
        (["--cuda-graph-impl", ""], "unknown-choice", "expected one of none, local"),
        (["--cuda-graph-impl", "te"], "unknown-choice", "expected one of none, local"),
        (["--cuda-graph-impl", "Local"], "unknown-choice", "expected one of none, local"),
        (["--bf16", "true"], "unexpected-value", "unexpected 'true' after --bf16, which takes no value"),
        (["--bf16=1"], "unexpected-value", "unexpected '1' after --bf16, which takes no value"),
        (["--num-layers", "2", "3"], "unexpected-value", "unexpected '3' after --num-layers 2"),
        (["--data-path=a", "b"], "unexpected-value", "unexpected 'b' after --data-path a"),
        (["train"], "unexpected-value", "unexpected 'train' before the first option"),
    ],
)
def test_words_that_cannot_be_read(argv: list[str], code: str, what: str) -> None:
    (problem,) = problems(*argv)
    assert problem.code == code
    assert what in problem.what
    assert problem.fix


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--lr", "abc"], "write --lr X, such as --lr 0.001"),
        (["--lr"], "write --lr X, such as --lr 0.001"),
        (["--min-lr", "low"], "write --min-lr X, such as --min-lr 0.0"),
        (["--num-layers", "two"], "write --num-layers N, such as --num-layers 4"),
        (["--ffn-hidden-size", "0"], "write --ffn-hidden-size CHANNELS"),
        (["--lr-warmup-fraction", "some"], "write --lr-warmup-fraction SHARE, such as --lr-warmup-fraction 0.1"),
        (["--device"], "write --device auto|cpu|cuda"),
        (["--save"], "write --save FOLDER"),
        (["--data-path"], "write --data-path PATH ..."),
    ],
)
def test_the_form_of_an_option_is_said_for_numbers_with_an_example(argv: list[str], fix: str) -> None:
    (problem,) = problems(*argv)
    assert problem.fix == fix


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--hybrid-layer-pattern", "-M"], "write --hybrid-layer-pattern=-M if that is the value"),
        (["--hybrid-layer-pattern", "-M*", "--bf16"], "write --hybrid-layer-pattern='-M*' if that is the value"),
        (["--save", "-run=1"], "write --save=-run=1 if that is the value"),
        (["--data-path", "-text.txt"], "write --data-path=-text.txt if that is the value"),
    ],
)
def test_a_text_that_begins_with_a_dash_is_one_problem(argv: list[str], fix: str) -> None:
    (problem,) = problems(*argv)
    assert (problem.code, problem.where, problem.fix) == ("missing-value", argv[0], fix)
    assert f"{argv[1]} is read as an option" in problem.what


def test_an_option_with_a_typing_error_is_said_behind_one_without_its_value() -> None:
    found = problems("--save", "--swigluu", "--lr", "-x", "--num-layers", "-y")
    assert [(problem.where, problem.fix.partition(",")[0]) for problem in found] == [
        ("--save", "write --save=--swigluu if that is the value"),
        ("--swigluu", "did you mean --swiglu?"),
        ("--lr", "write --lr X"),
        ("-x", "graphstep train --help lists the options"),
        ("--num-layers", "write --num-layers N"),
        ("-y", "graphstep train --help lists the options"),
    ]
    assert [problem.where for problem in problems("--save", "-a", "-b")] == ["--save", "-b"]


def test_a_text_that_begins_with_a_dash_may_be_attached() -> None:
    assert parse("--save=-run").training.save == "-run"


def test_choices_get_a_suggestion() -> None:
    (problem,) = problems("--cuda-graph-impl", "full-iteration")
    assert problem.fix == "did you mean full_iteration?"


def test_old_modules_are_read_but_not_proposed() -> None:
    (problem,) = problems("--cuda-graph-modules", "xyzzy")
    assert problem.what.endswith("mlp, moe, moe_router, moe_preprocess, mamba, got 'xyzzy'")
    notices = from_argv(["--cuda-graph-modules", "full_iteration_inference"], {}).notices
    assert [notice.code for notice in notices] == ["old-module-full-iteration-inference-without-effect"]


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--inference-cuda-graph-scope", "module_scoped"], "write --inference-cuda-graph-scope layer"),
        (
            ["--inference-full-iteration-cuda-graph"],
            "write --cuda-graph-impl local --inference-cuda-graph-scope block",
        ),
    ],
)
def test_forms_that_are_gone_say_what_to_write(argv: list[str], fix: str) -> None:
    (problem,) = problems(*argv)
    assert problem.fix == fix


@pytest.mark.parametrize(
    ("line", "env", "codes"),
    [
        ("", {"WORLD_SIZE": "x"}, ["world-size-range"]),
        ("", {"WORLD_SIZE": "2", "RANK": "2"}, ["rank-range"]),
        ("--cuda-graph-impl local", {"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, []),
        (
            "--cuda-graph-impl transformer_engine",
            {"PYTORCH_ALLOC_CONF": "a:1, Expandable_Segments : TRUE"},
            ["expandable-segments"],
        ),
        (
            "--cuda-graph-impl transformer_engine",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"},
            [],
        ),
        (
            "--cuda-graph-impl local --context-parallel-size 2",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "WORLD_SIZE": "2"},
            ["expandable-segments"],
        ),
        ("--cuda-graph-impl local", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "WORLD_SIZE": "2"}, []),
        (
            "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "WORLD_SIZE": "2"},
            ["expandable-segments"],
        ),
    ],
)
def test_the_environment_is_checked(line: str, env: dict[str, str], codes: list[str]) -> None:
    try:
        from_argv(line.split(), env)
        found: list[str] = []
    except ConfigError as error:
        found = [problem.code for problem in error.problems]
    assert found == codes


def test_the_environment_of_the_process_is_read_when_asked_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = from_argv(["--micro-batch-size", "2"])
    assert config.training.global_batch_size == 8
    assert config.origins["global_batch_size"] == "environment"
    assert from_argv(["--micro-batch-size", "2"], {}).training.global_batch_size == 2


def test_every_wrong_word_of_a_list_is_reported() -> None:
    found = problems("--cuda-graph-impl", "local", "--cuda-graph-modules", "atn", "mlp", "moe-router")
    assert [problem.fix for problem in found] == ["did you mean attn?", "did you mean moe_router?"]


def test_query_groups_count_only_with_the_switch() -> None:
    assert from_argv(["--num-query-groups", "2"]).model.num_query_groups == 4
    assert from_argv(["--num-query-groups", "2", "--group-query-attention"]).model.num_query_groups == 2


def test_warmup_fraction_is_a_share_of_the_decay() -> None:
    assert parse("--lr-warmup-fraction 0.1 --train-iters 50").training.lr_warmup_iters == 5
    config = parse("--lr-warmup-fraction 0.1 --train-iters 50 --lr-decay-iters 30")
    assert config.training.lr_warmup_iters == 3


def test_the_vocabulary_is_padded() -> None:
    assert from_argv(["--vocab-size", "300"]).model.vocab_size == 384
    assert parse("--vocab-size 300 --make-vocab-size-divisible-by 7").model.vocab_size == 301
    assert from_argv([]).model.vocab_size == 0


def test_origins() -> None:
    config = parse("--num-layers 3 --lr-warmup-fraction 0.1 --num-query-groups 2")
    origins = {option.dest: origin for option, _, origin in config.entries()}
    assert origins["num_layers"] == "option"
    assert origins["hidden_size"] == "default"
    assert origins["kv_channels"] == origins["lr_warmup_iters"] == origins["num_query_groups"] == "derived"


def test_the_printed_form_holds_what_is_not_default() -> None:
    assert RunConfig().to_argv() == []
    line = "--num-layers 3 --disable-bias-linear --lr 0.01 --data-path a b --no-cuda-graph-use-single-mempool"
    assert " ".join(parse(line).to_argv()) == line


def test_the_printed_form_of_names_that_look_like_options() -> None:
    config = from_argv(["--save=--out", "--data-path=-x"])
    assert config.to_argv() == ["--save=--out", "--data-path=-x"]
    assert from_argv(config.to_argv()) == config


def test_json_is_plain() -> None:
    config = parse("--cuda-graph-impl local --cuda-graph-modules attn --data-path a")
    content = config.to_json()
    assert json.loads(json.dumps(content)) == content
    assert list(content) == list(SECTIONS)
    assert content["graphs"]["modules"] == ["attn"]
    assert content["graphs"]["impl"] == "local"
    assert content["data"]["data_path"] == ["a"]


def test_the_caller_s_words_are_left_alone() -> None:
    argv = ["--num-layers", "3"]
    from_argv(argv, {"HOME": "x"})
    assert argv == ["--num-layers", "3"]


@pytest.mark.parametrize(
    ("argv", "env"),
    [(["--lr", 1, "--seed", 3], {}), (["--seed", "3", "--lr", 1.0], {"WORLD_SIZE": 1, "RANK": 0, 5: 5})],
)
def test_numbers_count_as_words(argv: list[Any], env: dict[Any, Any]) -> None:
    config = from_argv(argv, env)
    assert (config.training.lr, config.training.seed) == (1.0, 3)


def test_paths_count_as_words() -> None:
    assert from_argv(["--save", Path("a")], {}).training.save == "a"  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("argv", "env", "where"),
    [
        (["--lr", None], {}, ["argv[1]"]),
        ([None, "--lr", [1], "--bogus"], {}, ["argv[0]", "argv[2]"]),
        (["--bf16", True], {}, ["argv[1]"]),
        ([b"--lr", "1"], {}, ["argv[0]"]),
        (["--seed", 10**5000], {}, ["argv[1]"]),
        ("--lr 1", {}, ["argv"]),
        (None, {}, ["argv"]),
        (["--lr", "x"], {"WORLD_SIZE": None, "RANK": b"1"}, ["--lr", "RANK", "WORLD_SIZE"]),
        ([], ["WORLD_SIZE=1"], ["env"]),
    ],
)
def test_what_is_no_word_is_named(argv: Any, env: Any, where: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_argv(argv, env)
    assert [problem.where for problem in caught.value.problems] == where
    assert all(problem.fix for problem in caught.value.problems)
