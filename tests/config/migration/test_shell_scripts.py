"""Shell scripts: only old options change, and everything else stays to the byte."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.config.migration import migrate_shell
from graphstep.errors import ConfigError


def migrated(text: str) -> str:
    rewrite = migrate_shell(text, "run.sh")
    assert rewrite.left == ()
    again = migrate_shell(rewrite.after, "run.sh")
    assert not again.is_changed
    return rewrite.after


SCRIPT = r"""#!/bin/bash
set -euo pipefail   # --enable-cuda-graph in a comment stays
export CUDA_DEVICE_MAX_CONNECTIONS=1
NAME='it''s'; OUT="$HOME/runs/${NAME}"

GPT_ARGS=(
    --num-layers 24   # layers
    --enable-cuda-graph
    --cuda-graph-scope attn full_iteration_inference  # what is captured
    --lr 1e-4
)
DATA_ARGS=(--data-path "$DATA" --split '949,50,1')

torchrun --nproc-per-node 8 pretrain_gpt.py \
    ${GPT_ARGS[@]} \
    "${DATA_ARGS[@]}" \
    --save "$OUT/x y" 2>&1 | tee "log $(date +%s).txt"

python first.py \
    --external-cuda-graph \
    --cuda-graph-scope \
        attn \
        moe_router \
    --bf16 && python second.py --cuda-graph-impl=local \
    --tag "--enable" \
    --cuda-graph-scope full

cat <<'EOF' > usage.txt
  some text
EOF
python third.py --cuda-graph-scope full_iteration; echo "done"
"""

EXPECTED = r"""#!/bin/bash
set -euo pipefail   # --enable-cuda-graph in a comment stays
export CUDA_DEVICE_MAX_CONNECTIONS=1
NAME='it''s'; OUT="$HOME/runs/${NAME}"

GPT_ARGS=(
    --num-layers 24   # layers
    --cuda-graph-impl local
    --cuda-graph-modules attn --inference-cuda-graph-scope block  # what is captured
    --lr 1e-4
)
DATA_ARGS=(--data-path "$DATA" --split '949,50,1')

torchrun --nproc-per-node 8 pretrain_gpt.py \
    ${GPT_ARGS[@]} \
    "${DATA_ARGS[@]}" \
    --save "$OUT/x y" 2>&1 | tee "log $(date +%s).txt"

python first.py \
    --cuda-graph-impl transformer_engine \
    --cuda-graph-modules \
        attn \
        moe_router \
    --bf16 && python second.py --cuda-graph-impl=local \
    --tag "--enable"

cat <<'EOF' > usage.txt
  some text
EOF
python third.py --cuda-graph-impl full_iteration; echo "done"
"""


def test_a_whole_script() -> None:
    assert migrated(SCRIPT) == EXPECTED
    assert migrated(SCRIPT.replace("\n", "\r\n")) == EXPECTED.replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("run --cuda-graph-scope full --b\n", "run --b\n"),
        ("run --b --cuda-graph-scope full", "run --b"),
        ("run \\\n  --cuda-graph-scope full \\\n  --b\n", "run \\\n  --b\n"),
        ("run \\\n  --b \\\n  --cuda-graph-scope full\n", "run \\\n  --b\n"),
        ("run \\\n  --b \\\n  --cuda-graph-scope full", "run \\\n  --b"),
        ("run \\\n  --cuda-graph-scope full --b\n", "run \\\n  --b\n"),
        ("run \\\n  --b --cuda-graph-scope full \\\n  --c\n", "run \\\n  --b \\\n  --c\n"),
        ("run \\\n  --cuda-graph-scope \\\n    full \\\n  --c\n", "run \\\n  --c\n"),
        ("A=(--cuda-graph-scope full)\nrun ${A[@]}\n", "A=()\nrun ${A[@]}\n"),
        ("A=(--cuda-graph-scope full --b)\nrun ${A[@]}\n", "A=(--b)\nrun ${A[@]}\n"),
        ("A=(\n  --b\n  --cuda-graph-scope full\n)\nrun ${A[@]}\n", "A=(\n  --b\n)\nrun ${A[@]}\n"),
        ("A=(\n  --cuda-graph-scope full # all\n)\nrun ${A[@]}\n", "A=(\n  # all\n)\nrun ${A[@]}\n"),
        (
            "run '--enable-cuda-graph' \"--cuda-graph-scope\" 'attn'\n",
            "run '--cuda-graph-impl' 'local' \"--cuda-graph-modules\" 'attn'\n",
        ),
        ("A+=(--enable-cuda-graph)\n", "A+=(--cuda-graph-impl local)\n"),
        (
            "if x; then\n\tA+=(--enable-cuda-graph)\nfi\nrun ${A[@]}\n",
            "if x; then\n\tA+=(--cuda-graph-impl local)\nfi\nrun ${A[@]}\n",
        ),
        ("f() { run --enable-cuda-graph; }\n", "f() { run --cuda-graph-impl local; }\n"),
        ("(cd x && run --enable-cuda-graph) &\n", "(cd x && run --cuda-graph-impl local) &\n"),
        ("run <(sort x) --enable-cuda-graph 2>/dev/null\n", "run <(sort x) --cuda-graph-impl local 2>/dev/null\n"),
        ("X=1 run --cuda-graph-scope attn 2>&1\n", "X=1 run --cuda-graph-modules attn 2>&1\n"),
        ("x=$((1 << 3)); run --enable-cuda-graph\n", "x=$((1 << 3)); run --cuda-graph-impl local\n"),
        ("(( n << 1 ))\nrun --enable-cuda-graph\n", "(( n << 1 ))\nrun --cuda-graph-impl local\n"),
        ("case $x in a|b) run --enable-cuda-graph ;; esac\n", "case $x in a|b) run --cuda-graph-impl local ;; esac\n"),
        ("run <<< 'x' --enable-cuda-graph\n", "run <<< 'x' --cuda-graph-impl local\n"),
        (
            "x=$(cat <<E\n it's )\nE\n)\nrun --enable-cuda-graph\n",
            "x=$(cat <<E\n it's )\nE\n)\nrun --cuda-graph-impl local\n",
        ),
        ("x=$(y # it's\n)\nrun --enable-cuda-graph\n", "x=$(y # it's\n)\nrun --cuda-graph-impl local\n"),
        (
            "cat <<-'E'\n\tit's\n\tE\nrun --enable-cuda-graph\n",
            "cat <<-'E'\n\tit's\n\tE\nrun --cuda-graph-impl local\n",
        ),
        ("run --hybrid-override-pattern 'M*-M'\n", "run --hybrid-layer-pattern 'M*-M'\n"),
        (
            'A=(--enable-cuda-graph)\nB=(--cuda-graph-scope full_iteration)\nrun "${A[@]}" "${B[@]}"\n',
            'A=(--cuda-graph-impl full_iteration)\nB=()\nrun "${A[@]}" "${B[@]}"\n',
        ),
        (
            "A=(--cuda-graph-scope full_iteration_inference)\nB=(--cuda-graph-impl local)\nrun ${A[*]} ${B[*]}\n",
            "A=(--inference-cuda-graph-scope block)\nB=(--cuda-graph-impl local)\nrun ${A[*]} ${B[*]}\n",
        ),
        (
            "B='--cuda-graph-impl local'\nrun $B --cuda-graph-scope full_iteration_inference $ARGS\n",
            "B='--cuda-graph-impl local'\nrun $B --inference-cuda-graph-scope block $ARGS\n",
        ),
        (
            "if x; then G=(--enable-cuda-graph); else G=(--cuda-graph-scope full_iteration); fi\nrun ${G[@]}\n",
            "if x; then G=(--cuda-graph-impl local); else G=(--cuda-graph-impl full_iteration); fi\nrun ${G[@]}\n",
        ),
    ],
)
def test_forms(old: str, new: str) -> None:
    if "full_iteration_inference $ARGS" in old:
        assert migrate_shell(old).left  # the value may go on behind it
        old = "ARGS='--x 1'\n" + old
        new = "ARGS='--x 1'\n" + new
    assert migrated(old) == new


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("\nA='--x --enable-cuda-graph'\nrun $A\n", 2, "inside a variable"),
        ("export A=--enable-cuda-graph\n", 1, ""),
        ("run $(extra --enable-cuda-graph)\n", 1, "inside an expansion"),
        ("run `extra --enable-cuda-graph`\n", 1, "inside an expansion"),
        ("run ${A:---enable-cuda-graph}\n", 1, "inside an expansion"),
        ("bash -c 'x\nrun --enable-cuda-graph'\n", 2, "inside quotes"),
        ("case $1 in\n  --enable-cuda-graph) X=1;;\nesac\n", 2, "no program"),
        ("[ $1 = --enable-cuda-graph ] && x\n", 1, "no program"),
        ("[[ $1 == --enable-cuda-graph && $2 ]]\n", 1, "no program"),
        ("for o in --enable-cuda-graph; do x; done\n", 1, "no program"),
        ("ssh x <<EOF\n\nrun --enable-cuda-graph\nEOF\n", 3, "here-document"),
        ("run --cuda-graph-scope $SCOPE\n", 1, "only when the script runs"),
        ("run --cuda-graph-scope=$SCOPE\n", 1, "only when the script runs"),
        ('run "--cuda-graph-scope=${SCOPE}" --x\n', 1, "only when the script runs"),
        ("run --enable-cuda-graph --cuda-graph-impl=$IMPL\n", 1, "depends on an option"),
        ("run --cuda-graph-scope full $REST\n", 1, "may take more values"),
        ("run --enable-cuda-graph --cuda-graph-impl $IMPL\n", 1, "depends on an option"),
        ('run --cuda-graph-scope full_iteration_inference "$@"\n', 1, ""),
        ("run --cuda-graph-scope atn\n", 1, "did you mean attn?"),
        ("run '--cuda-graph-modules full'\n", 1, "inside quotes"),
        ("run --inference-full-iteration-cuda-graph '--inference-full-iteration-cuda-graph '\n", 1, "inside quotes"),
    ],
)
def test_what_is_not_safe_is_left_alone_with_its_line(text: str, line: int, reason: str) -> None:
    rewrite = migrate_shell(text, "run.sh")
    assert not rewrite.is_changed
    (notice,) = rewrite.left
    assert notice.where == f"run.sh:{line}"
    assert reason in notice.what
    assert notice.fix


@pytest.mark.parametrize(
    "text",
    [
        "echo --enable-cuda-graph\n",
        "grep -- --enable-cuda-graph x\n",
        "# --enable-cuda-graph\n",
        "x # --cuda-graph-scope full\n",
    ],
)
def test_words_that_are_only_text_are_no_business_of_ours(text: str) -> None:
    rewrite = migrate_shell(text)
    assert not rewrite.is_changed
    assert rewrite.left == ()


def test_ambiguous_mixes_are_refused_all_at_once_with_their_lines() -> None:
    text = "\nrun --enable-cuda-graph \\\n --external-cuda-graph\n\nrun --cuda-graph-scope full attn\n"
    with pytest.raises(ConfigError) as caught:
        migrate_shell(text, "run.sh")
    assert [problem.where.split(": ")[0] for problem in caught.value.problems] == ["run.sh:2", "run.sh:5"]
    assert all(problem.fix for problem in caught.value.problems)


def test_no_part_of_an_option_is_renamed_without_the_others() -> None:
    rewrite = migrate_shell("run --cuda-graph-scope=attn --cuda-graph-scope=$SCOPE\n", "run.sh")
    assert not rewrite.is_changed
    assert len(rewrite.left) == 2


def test_an_array_that_two_commands_need_in_two_forms_is_refused() -> None:
    text = (
        "A=(--cuda-graph-scope full_iteration_inference)\n"
        "run ${A[@]} --cuda-graph-impl local\nrun ${A[@]} --cuda-graph-impl none\n"
    )
    with pytest.raises(ConfigError) as caught:
        migrate_shell(text, "run.sh")
    assert {problem.code for problem in caught.value.problems} == {"old-shared-array"}


@pytest.mark.parametrize("text", ["run 'x", 'run "x', "run $(x", "A=(x", "run `x", "run ${x", "run $'x", "\n\n((1"])
def test_what_is_never_closed_is_said(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate_shell(text, "run.sh")
    (problem,) = caught.value.problems
    assert problem.code == "shell-unclosed"
    assert problem.where == f"run.sh:{text.count(chr(10)) + 1}"


def test_hostile_texts_end_soon() -> None:
    with pytest.raises(ConfigError) as caught:
        migrate_shell('"$(' * 5000)
    assert caught.value.problems[0].code == "shell-nesting"
    for text in ("x '--cuda-graph-modules " + ", " * 5000 + "y'", "a" * 100_000, "(" * 10_000 + "x" + ")" * 10_000):
        assert not migrate_shell(text).is_changed


LINES = st.sampled_from(
    [
        "run",
        "--enable-cuda-graph",
        "--external-cuda-graph",
        "--cuda-graph-scope",
        "--cuda-graph-scope=full",
        "--cuda-graph-modules",
        "--cuda-graph-impl local",
        "attn",
        "full",
        "full_iteration",
        "full_iteration_inference",
        "'attn'",
        "A=(",
        "A+=(",
        ")",
        "${A[@]}",
        "$A",
        '"$@"',
        "A='--enable-cuda-graph'",
        "$(x)",
        "if x; then",
        "fi",
        "case $x in",
        "esac",
        ";;",
        "# comment",
        "<<E",
        "E",
        "{",
        "}",
        "(",
        "&&",
        "|",
        "\\",
        "'",
        "\r",
    ]
)
SPACES = st.sampled_from([" ", "\n", " \\\n  ", "", ";", "\t"])


@given(st.lists(st.tuples(LINES, SPACES), max_size=14))
def test_migrating_twice_is_migrating_once(parts: list[tuple[str, str]]) -> None:
    text = "".join(part for pair in parts for part in pair)
    try:
        once = migrate_shell(text)
    except ConfigError:
        return
    twice = migrate_shell(once.after)
    assert twice.after == once.after


@given(st.text(alphabet="ab-= \n\\'\"$(){}`#<>;&|[]@\r\t", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        after = migrate_shell(text).after
    except ConfigError as error:
        after = text if error.problems[0].code == "shell-unclosed" else str(error)
    assert after == text


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_gives_the_program_the_words_that_were_meant() -> None:
    text = """\
show() { printf '%s|' "$@"; }
A=(--enable-cuda-graph --x 'a b')
show "${A[@]}" \\
  --cuda-graph-scope full \\
  --z
"""
    done = subprocess.run(["bash", "-c", migrated(text)], capture_output=True, text=True, check=True)
    assert re.split(r"\|", done.stdout) == ["--cuda-graph-impl", "local", "--x", "a b", "--z", ""]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x --cuda-graph-impl none\\\n --enable-cuda-graph\necho hi\n", "x --cuda-graph-impl local\necho hi\n"),
        ("x --cuda-graph-impl=none\\\r\n --enable-cuda-graph\r\ny\r\n", "x --cuda-graph-impl=local\r\ny\r\n"),
        ("A=(--cuda-graph-impl 'none'\\\n --enable-cuda-graph\n)\n", "A=(--cuda-graph-impl 'local'\n)\n"),
        ("x --enable-cuda-graph\\\n --lr 1\n", "x --cuda-graph-impl local\\\n --lr 1\n"),
        ("x --lr 1\\\n --cuda-graph-scope full\\\n --foo\ny\n", "x --lr 1\\\n --foo\ny\n"),
    ],
)
def test_line_continuations_without_a_blank_before_them(text: str, expected: str) -> None:
    assert migrated(text) == expected
