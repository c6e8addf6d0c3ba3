"""The command ``graphstep``: dispatch, messages, exit codes."""

from __future__ import annotations

import errno
import json
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from graphstep.cli import main as cli
from graphstep.config import from_argv
from graphstep.errors import CaptureError, DataError, Problem
from graphstep.version import __version__

PROGRAM = [sys.executable, "-m", "graphstep"]
TrainPart = Callable[[Callable[[Sequence[str]], int]], None]


@pytest.fixture
def train_part(monkeypatch: pytest.MonkeyPatch) -> TrainPart:
    """Put a function in the place of ``graphstep.cli.train.run``."""

    def install(run: Callable[[Sequence[str]], int]) -> None:
        module = types.ModuleType("graphstep.cli.train")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "graphstep.cli.train", module)

    return install


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"graphstep {__version__}\n"


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_lists_the_commands(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 0
    out = capsys.readouterr().out
    assert all(name in out and command.summary in out for name, command in cli.COMMANDS.items())


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: graphstep COMMAND" in captured.err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--num-layers", "x", "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"usage: graphstep {name} [options]")
    assert "--cuda-graph-impl" in captured.out
    assert captured.err == ""


def test_an_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "graphstep: 1 problem\n"
        "- there is no command trian [unknown-command]\n"
        "  where: graphstep trian\n"
        "  fix:   did you mean train?\n"
    )
    assert cli.main(["--frobnicate"]) == 2
    assert "graphstep --help" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "config"])
def test_bad_options_are_all_printed_once_and_exit_with_2(
    name: str, capsys: pytest.CaptureFixture[str], train_part: TrainPart
) -> None:
    train_part(lambda argv: pytest.fail("train must not start"))
    assert cli.main([name, "--num-layer", "3", "--cuda-graph-impl", "full_iteration"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("graphstep: 2 problems\n")
    assert captured.err.count("did you mean --num-layers?") == 1
    assert captured.err.count("  fix:   add --no-check-for-nan-in-loss-and-grad\n") == 1


def test_train_refuses_what_is_not_available_yet(capsys: pytest.CaptureFixture[str], train_part: TrainPart) -> None:
    train_part(lambda argv: pytest.fail("train must not start"))
    argv = ["--fp16", "--cuda-graph-impl", "local", "--cuda-graph-retain-backward-graph"]
    assert cli.main(["train", *argv]) == 2
    assert capsys.readouterr().err.count("is not available yet in graphstep train") == 2
    assert cli.main(["config", *argv]) == 0


def test_train_gets_its_words_and_gives_the_exit_code(
    capsys: pytest.CaptureFixture[str], train_part: TrainPart
) -> None:
    seen: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> int:
        seen.append(argv)
        return 3

    train_part(run)
    assert cli.main(["train", "--save-interval", "3"]) == 3
    assert list(seen[0]) == ["--save-interval", "3"]
    captured = capsys.readouterr()
    assert captured.err.startswith("note: --save-interval has no effect")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError(Problem("data-missing", "no such file", "--data-path x", "name a file")), 2, "graphstep: 1 problem"),
        (CaptureError("item() reads a value", where="model.py:3", fix="keep it on the device"), 1, "graphstep: failed"),
        (PermissionError(errno.EACCES, "Permission denied", "x/log.jsonl"), 1, "graphstep: failed"),
        (KeyboardInterrupt(), 130, "graphstep: interrupted"),
    ],
)
def test_errors_of_a_command(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], train_part: TrainPart
) -> None:
    def run(argv: Sequence[str]) -> int:
        raise error

    train_part(run)
    assert cli.main(["train"]) == code
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert "Traceback" not in err
    if not isinstance(error, KeyboardInterrupt):
        assert "  where: " in err
        assert "  fix:   " in err


def test_other_errors_are_ours_and_stay_visible(train_part: TrainPart) -> None:
    def run(argv: Sequence[str]) -> int:
        raise ZeroDivisionError

    train_part(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_config_prints_values_and_where_they_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    argv = ["--num-layers", "3", "--disable-bias-linear", "--cuda-graph-impl", "local", "--rotary-base", "7"]
    assert cli.main(["config", *argv]) == 0
    captured = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in captured.out.splitlines() if line.strip().startswith("--")}
    assert rows["--num-layers"] == ["3", "option"]
    assert rows["--hidden-size"] == ["128", "default"]
    assert rows["--kv-channels"] == ["32", "derived"]
    assert rows["--disable-bias-linear"] == ["yes", "option"]
    assert rows["--swiglu"] == ["no", "default"]
    assert rows["--no-check-for-nan-in-loss-and-grad"] == ["no", "default"]
    assert rows["--inference-cuda-graph-scope"] == ["layer", "derived"]
    assert captured.out.splitlines()[-1].startswith("graphstep train --num-layers 3")
    assert captured.err.startswith("note: --rotary-base")


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--save-interval", "3", "--num-layers", "3"]
    assert cli.main(["config", *argv, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["model"]["num_layers"] == 3
    assert content["origins"]["num_layers"] == "option"
    assert content["origins"]["lr"] == "default"
    assert [notice["code"] for notice in content["notices"]] == ["save-interval-without-save"]
    assert from_argv(content["argv"]) == from_argv(argv)


def test_config_prints_file_names_that_are_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--save", "a\udcffb"]) == 0
    assert "a\\udcffb" in capsys.readouterr().out


def test_python_m() -> None:
    done = subprocess.run([*PROGRAM, "--version"], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("graphstep ")


@pytest.mark.parametrize("words", [["config"], ["config", "--json"], ["train", "--help"]])
def test_a_closed_pipe_is_no_traceback(words: list[str]) -> None:
    with subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["config"], ["config", "--json"], ["migrate", "--", "--enable-cuda-graph"]])
def test_a_full_disk_is_no_traceback(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert "the system refused: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("target", ["&-", "/dev/full"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("config --foo", 2),
        ("", 2),
        ("nonsense", 2),
        ("migrate none.sh", 2),
        ("config --enable-cuda-graph", 0),
        ("migrate --check -- run --enable-cuda-graph", 1),
    ],
)
def test_a_standard_error_that_takes_nothing_keeps_the_exit_code(words: str, code: int, target: str) -> None:
    if target == "/dev/full" and not Path(target).exists():
        pytest.skip("needs /dev/full")
    line = f"{shlex.join(PROGRAM)} {words} 2>{target}"
    done = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert "problem" not in done.stdout
    assert "note:" not in done.stdout


@pytest.mark.parametrize("words", [["config"], ["migrate", "--cuda-graph-impl", "local"], ["migrate", "-"]])
def test_a_closed_standard_output_is_no_traceback(words: list[str]) -> None:
    line = shlex.join([*PROGRAM, *words]) + " </dev/null >&-"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_config_says_what_is_captured_and_where_values_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["--enable-cuda-graph", "--cuda-graph-scope", "attn", "--num-experts", "4"]
    assert cli.main(["config", *argv]) == 0
    captured = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in captured.out.splitlines() if line.strip()}
    assert rows["--cuda-graph-impl"] == ["local", "migrated"]
    assert rows["--cuda-graph-modules"] == ["attn", "migrated"]
    assert rows["--num-experts"] == ["4", "option"]
    assert rows["--global-batch-size"] == ["8", "environment"]
    assert rows["WORLD_SIZE"] == ["2", "environment"]
    assert "--moe-router-topk" not in rows
    assert (
        "training: a forward and a backward graph of attn in 4 layers, in the order of the first step" in captured.out
    )
    assert captured.err.count("note: ") == 2
    assert cli.main(["config", "--all", *argv]) == 0
    assert "--moe-router-topk" in capsys.readouterr().out


def test_config_as_json_says_what_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["config", "--json", "--cuda-graph-scope", "full_iteration", "--no-check-for-nan-in-loss-and-grad"])
        == 0
    )
    content = json.loads(capsys.readouterr().out)
    assert content["captured"][:2] == [
        "training: forward and backward of 1 microbatch as one graph, after 3 eager steps",
        "validation: the forward as one graph",
    ]
    assert content["origins"]["cuda_graph_impl"] == "migrated"
    assert content["argv"] == ["--no-check-for-nan-in-loss-and-grad", "--cuda-graph-impl", "full_iteration"]


REFUSED = (
    ("--num-experts 8 --cuda-graph-impl local", ["whole-layers-need-static-experts"]),
    ("--num-experts 8 --moe-grouped-gemm --cuda-graph-impl local", ["moe-grouped-gemm-bias"]),
    ("--cuda-graph-impl local --cuda-graph-modules attn mamba", ["module-in-no-layer"]),
    (
        "--hybrid-layer-pattern M*EG --cuda-graph-impl local",
        [
            "not-available-pattern-letter",
            "pattern-needs-experts",
            "whole-layers-need-static-experts",
            "mamba-groups-divide-heads",
        ],
    ),
    ("--tensor-model-parallel-size 1 --optimizer sgd", ["not-available-optimizer"]),
)


@pytest.mark.parametrize(("words", "codes"), REFUSED)
def test_config_says_what_train_refuses(words: str, codes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever train refuses is told, with the same words, and no command is printed that would not run."""
    argv = [*words.split(), "--mock-data"]
    assert cli.main(["train", *argv]) == 2
    told_by_train = capsys.readouterr().err.splitlines()[1:-1]
    assert cli.main(["config", *argv]) == 0
    out = capsys.readouterr().out
    shown = out.partition("refused by graphstep train\n")[2].splitlines()
    assert [line.removeprefix("  ") for line in shown] == told_by_train
    assert [line.rpartition("[")[2].rstrip("]") for line in shown if line.startswith("  - ")] == codes
    assert "graphstep train --" not in out
    assert cli.main(["config", "--json", *argv]) == 0
    refused = json.loads(capsys.readouterr().out)["refused_by_train"]
    assert [problem["code"] for problem in refused] == codes
    assert all(problem["where"] and problem["fix"] for problem in refused)


def test_config_prints_the_command_of_what_train_takes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--num-experts", "8", "--cuda-graph-impl", "local", "--cuda-graph-policy", "auto"]
    assert cli.main(["config", *argv]) == 0
    captured = capsys.readouterr()
    assert "refused" not in captured.out
    assert captured.out.splitlines()[-1].startswith("graphstep train --")
    assert "will run eagerly" in captured.err, "notices of train are given too"
    assert cli.main(["config", "--json", *argv]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["refused_by_train"] == []
    assert "dynamic-experts-stay-eager" in {notice["code"] for notice in content["notices"]}


def test_config_prints_the_page_of_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--rules"]) == 0
    assert "### full-iteration-nan-check" in capsys.readouterr().out


def test_only_the_first_rank_prints_notices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["config", "--enable-cuda-graph"]) == 0
    assert capsys.readouterr().err == ""


def test_broken_rules_come_with_the_way_to_their_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--cuda-graph-impl", "full_iteration"]) == 2
    assert "graphstep config --rules" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "is_rule"), [(["--no-such-option"], False), (["--num-layers", "0"], True)])
def test_rules_are_pointed_to_where_they_explain(
    argv: list[str], is_rule: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", *argv]) == 2
    assert ("--rules explains" in capsys.readouterr().err) is is_rule
