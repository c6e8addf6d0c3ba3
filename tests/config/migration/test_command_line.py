"""Command lines: every row of the table of migrations, and what the new form means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.config.migration import migrate_argv
from graphstep.config.migration.occurrences import MODULE_WORDS
from graphstep.config.migrations import MIGRATIONS, migrate
from graphstep.errors import ConfigError

FULL_INFERENCE = "full_iteration_inference"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--enable-cuda-graph", "--cuda-graph-impl local"),
        ("--external-cuda-graph", "--cuda-graph-impl transformer_engine"),
        ("--enable-cuda-graph --enable-cuda-graph", "--cuda-graph-impl local"),
        ("--cuda-graph-impl none --enable-cuda-graph", "--cuda-graph-impl local"),
        ("--enable-cuda-graph --cuda-graph-impl none", "--cuda-graph-impl local"),
        ("--cuda-graph-scope attn", "--cuda-graph-modules attn"),
        ("--cuda-graph-scope=attn", "--cuda-graph-modules=attn"),
        ("--cuda-graph-scope attn,mlp", "--cuda-graph-modules attn,mlp"),
        ("--cuda-graph-scope attn moe_router --x 1", "--cuda-graph-modules attn moe_router --x 1"),
        ("--cuda-graph-scope mlp --cuda-graph-scope attn", "--cuda-graph-modules attn"),
        ("--a 1 --cuda-graph-scope full --b 2", "--a 1 --b 2"),
        ("--cuda-graph-modules full", ""),
        ("--cuda-graph-modules=full --a", "--a"),
        ("--enable-cuda-graph --cuda-graph-scope full", "--cuda-graph-impl local"),
        ("--cuda-graph-impl full_iteration --cuda-graph-scope full", "--cuda-graph-impl full_iteration"),
        ("--cuda-graph-modules full_iteration", "--cuda-graph-impl full_iteration"),
        ("--cuda-graph-scope=full_iteration", "--cuda-graph-impl=full_iteration"),
        ("--cuda-graph-impl local --a --cuda-graph-scope full_iteration", "--cuda-graph-impl full_iteration --a"),
        ("--cuda-graph-impl=local --cuda-graph-scope full_iteration", "--cuda-graph-impl=full_iteration"),
        ("--enable-cuda-graph --cuda-graph-modules full_iteration", "--cuda-graph-impl full_iteration"),
        (f"--cuda-graph-modules {FULL_INFERENCE}", ""),
        (
            f"--cuda-graph-impl none --cuda-graph-modules {FULL_INFERENCE} attn",
            "--cuda-graph-impl none --cuda-graph-modules attn",
        ),
        (
            f"--cuda-graph-impl local --cuda-graph-modules {FULL_INFERENCE}",
            "--cuda-graph-impl local --inference-cuda-graph-scope block",
        ),
        (
            f"--enable-cuda-graph --cuda-graph-scope {FULL_INFERENCE} attn --x",
            "--cuda-graph-impl local --cuda-graph-modules attn --inference-cuda-graph-scope block --x",
        ),
        (
            f"--cuda-graph-scope attn,{FULL_INFERENCE},mlp --cuda-graph-impl local",
            "--cuda-graph-modules attn,mlp --inference-cuda-graph-scope block --cuda-graph-impl local",
        ),
        (
            f"--cuda-graph-impl local --inference-cuda-graph-scope block --cuda-graph-scope {FULL_INFERENCE}",
            "--cuda-graph-impl local --inference-cuda-graph-scope block",
        ),
        ("--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"),
        ("--hybrid-override-pattern M*-M", "--hybrid-layer-pattern M*-M"),
    ],
)
def test_rows_of_the_table(old: str, new: str) -> None:
    words, rewrite = migrate_argv(["torchrun", "pretrain.py", *old.split()])
    assert words == ["torchrun", "pretrain.py", *new.split()]
    assert rewrite.changes
    assert rewrite.left == ()
    assert migrate_argv(words)[0] == words


def test_every_row_has_a_case() -> None:
    (mark,) = test_rows_of_the_table.pytestmark
    lines = [old for old, _ in mark.args[1]]
    applied = {notice.code for line in lines for notice in migrate_argv(line.split())[1].changes}
    assert applied >= {row.code for row in MIGRATIONS}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "python train.py --num-layers 2 'a b' --x=--enable-cuda-graph",
        "--cuda-graph-impl local --cuda-graph-modules attn mlp --inference-cuda-graph-scope block",
        "--enable-cuda-graphs --no-enable-cuda-graph --cuda-graph-scopes full",
        "full full_iteration --name full",
    ],
)
def test_nothing_old_is_left_as_it_is(line: str) -> None:
    words, rewrite = migrate_argv(line.split(" "))
    assert words == line.split(" ")
    assert not rewrite.is_changed
    assert rewrite.diff() == ""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--enable-cuda-graph --external-cuda-graph", "old-two-implementations"),
        ("--enable-cuda-graph --cuda-graph-impl local", "old-and-new-implementation"),
        ("--cuda-graph-scope attn --cuda-graph-modules attn", "old-and-new-modules"),
        ("--cuda-graph-scope full attn", "old-full-mixed"),
        ("--cuda-graph-scope full_iteration attn", "old-full-iteration-mixed"),
        (f"--cuda-graph-scope full_iteration {FULL_INFERENCE}", "old-full-iteration-mixed"),
        ("--external-cuda-graph --cuda-graph-scope full_iteration", "old-full-iteration-implementation"),
        ("--cuda-graph-modules full_iteration --inference-cuda-graph-scope block", "old-full-iteration-scope"),
        (f"--external-cuda-graph --cuda-graph-scope {FULL_INFERENCE}", "old-full-iteration-inference-implementation"),
        (
            f"--enable-cuda-graph --cuda-graph-scope {FULL_INFERENCE} --inference-cuda-graph-scope layer",
            "old-full-iteration-inference-scope",
        ),
    ],
)
def test_ambiguous_mixes_are_refused(line: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate_argv(line.split())
    assert code in [problem.code for problem in caught.value.problems]
    assert all(problem.where and problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize(
    "line",
    [
        "--cuda-graph-scope atn",
        "--cuda-graph-scope module_scoped",
        "--cuda-graph-scope",
        "--enable-cuda-graph=1",
        "--cuda-graph-impl --enable-cuda-graph",
    ],
)
def test_what_cannot_be_read_is_left_alone_and_said(line: str) -> None:
    words, rewrite = migrate_argv(line.split())
    assert words == line.split()
    assert [notice.code for notice in rewrite.left] == ["left-alone"]


def test_a_command_inside_quotes_is_left_alone() -> None:
    words = ["bash", "-c", "train --enable-cuda-graph"]
    new, rewrite = migrate_argv(words)
    assert new == words
    assert "inside quotes" in rewrite.left[0].what
    assert "--cuda-graph-impl local" in rewrite.left[0].fix


def test_the_diff_shows_one_option_a_line() -> None:
    _, rewrite = migrate_argv(["train", "--a", "1", "--enable-cuda-graph", "--b", "x y"])
    assert "-    --enable-cuda-graph \\\n+    --cuda-graph-impl local \\\n     --b 'x y'\n" in rewrite.diff()


OPTIONS = st.one_of(
    st.sampled_from([["--enable-cuda-graph"], ["--external-cuda-graph"], ["--bf16"], ["--x", "1"], ["word"]]),
    st.tuples(
        st.sampled_from(["--cuda-graph-scope", "--cuda-graph-modules"]),
        st.lists(st.sampled_from([*sorted(MODULE_WORDS), "attn,mlp", "full,", "bogus"]), max_size=3),
    ).map(lambda pair: [pair[0], *pair[1]]),
    st.tuples(st.just("--cuda-graph-impl"), st.sampled_from(["none", "local", "full_iteration", "x"])).map(list),
    st.tuples(st.just("--inference-cuda-graph-scope"), st.sampled_from(["none", "layer", "block"])).map(list),
    st.sampled_from([["--cuda-graph-scope=full"], ["--cuda-graph-impl=local"], ["--cuda-graph-scope=attn,mlp"]]),
    st.sampled_from([["--hybrid-override-pattern"], ["--hybrid-override-pattern=M"], ["--hybrid-layer-pattern"]]),
    st.sampled_from([["--num-layers"], ["--data-path", "a"], ["--moe-router-padding-for-fp8"], ["--cuda-graph-impl"]]),
)


@pytest.mark.parametrize(
    "line",
    [
        "--hybrid-override-pattern --cuda-graph-scope=full word",
        "--hybrid-layer-pattern --cuda-graph-scope=full word",
        "--num-layers --cuda-graph-scope=full 3",
        "--data-path a --cuda-graph-scope=full b",
        "--cuda-graph-modules attn --moe-router-padding-for-fp8 mlp --moe-router-padding-for-fp8",
    ],
)
def test_no_option_takes_the_word_behind_a_removed_one(line: str) -> None:
    words, rewrite = migrate_argv(line.split())
    assert words == line.split()
    assert any("would take" in notice.what for notice in rewrite.left)


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("t.py --cuda-graph-scope=full word", "t.py word"),
        ("--bf16 --cuda-graph-scope=full word", "--bf16 word"),
        ("--num-layers 3 --cuda-graph-scope=full word", "--num-layers 3 word"),
        (f"--cuda-graph-scope attn {FULL_INFERENCE} mlp", "--cuda-graph-modules attn mlp"),
    ],
)
def test_words_that_no_option_waits_for_stay_behind_a_removed_one(line: str, new: str) -> None:
    assert migrate_argv(line.split())[0] == new.split()


@given(st.lists(OPTIONS, max_size=5))
def test_migrating_twice_is_migrating_once(options: list[list[str]]) -> None:
    argv = [word for option in options for word in option]
    try:
        once, first = migrate_argv(argv)
    except ConfigError:
        return
    twice, second = migrate_argv(once)
    assert twice == once
    assert second.left == first.left or len(second.left) == len(first.left)


@pytest.mark.parametrize(
    ("old", "fixes"),
    [
        ({"enable_cuda_graph": True}, ["write --cuda-graph-impl local"]),
        ({"enable_cuda_graph": False}, ["leave it out"]),
        (
            {"enable_cuda_graph": True, "cuda_graph_scope": ("full_iteration",)},
            ["leave it out", "leave it out", "write --cuda-graph-impl full_iteration"],
        ),
        ({"cuda_graph_scope": ("full",)}, ["leave it out", "leave it out"]),
        ({"cuda_graph_scope": ("attn", "full_iteration_inference")}, ["write --cuda-graph-modules", "leave it out"]),
    ],
)
def test_notices_name_what_is_there_in_the_end(old: dict[str, object], fixes: list[str]) -> None:
    assert [row.fix for row in migrate(old).applied] == fixes
