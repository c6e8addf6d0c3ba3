"""``graphstep migrate``: what is printed, written, and with which exit code."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from graphstep.cli import main as cli
from graphstep.config.text_files import replace_file
from graphstep.errors import ConfigError

OLD, NEW = "run \\\n  --enable-cuda-graph # x\n", "run \\\n  --cuda-graph-impl local # x\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(OLD)
    path.chmod(0o750)
    return path


def test_a_file_is_shown_and_not_written(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", str(script)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"--- {script} (old)",
        f"+++ {script} (new)",
        "@@ -1,2 +1,2 @@",
        " run \\",
        "-  --enable-cuda-graph # x",
        "+  --cuda-graph-impl local # x",
    ]
    assert captured.err.startswith(f"note: {script}:2: --enable-cuda-graph is the old form of --cuda-graph-impl local")
    assert script.read_text() == OLD


def test_in_place_keeps_mode_and_link_and_is_done_once(script: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.sh"
    link.symlink_to(script)
    assert cli.main(["migrate", "--in-place", str(link)]) == 0
    assert link.is_symlink()
    assert script.read_text() == NEW
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.sh", "run.sh"]
    before = script.stat().st_ino
    assert cli.main(["migrate", str(script), "--in-place"]) == 0
    assert script.stat().st_ino == before


def test_bytes_that_are_no_text_survive(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(b"# \xff\xfe\r\nrun --enable-cuda-graph\r\n")
    assert cli.main(["migrate", "--in-place", str(path)]) == 0
    assert path.read_bytes() == b"# \xff\xfe\r\nrun --cuda-graph-impl local\r\n"


def test_an_interrupted_write_leaves_the_old_file_alone(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError) as caught:
        replace_file(str(script), NEW)
    assert caught.value.problems[0].code == "file-unwritable"
    assert script.read_text() == OLD
    assert [path.name for path in script.parent.iterdir()] == ["run.sh"]


def test_check_writes_nothing_and_tells_by_its_exit_code(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "--check", str(script)]) == 1
    assert script.read_text() == OLD
    assert "+  --cuda-graph-impl local" in capsys.readouterr().out
    script.write_text(NEW)
    assert cli.main(["migrate", "--check", str(script)]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["migrate", "--check", "--", "run", "--enable-cuda-graph"]) == 1
    assert capsys.readouterr().out == ""


def test_check_fails_while_old_options_are_left_alone(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text('OLD="--enable-cuda-graph"\n' + NEW)
    assert cli.main(["migrate", "--check", str(script)]) == 1
    assert "--check: 1 old option is left alone" in capsys.readouterr().err
    assert cli.main(["migrate", str(script)]) == 0


def test_if_one_file_is_refused_none_is_written(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = script.with_name("other.yml")
    other.write_text("enable_cuda_graph: true\nexternal_cuda_graph: true\n")
    assert cli.main(["migrate", "--in-place", str(script), str(other), str(script.with_name("none.sh"))]) == 2
    assert script.read_text() == OLD
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("graphstep: 2 problems\n")
    assert f"  where: {other}:1: " in captured.err
    assert "[file-unreadable]" in captured.err


def test_yaml_is_told_by_the_name_or_by_the_option(tmp_path: Path) -> None:
    for name, more in (("a.yaml", []), ("b.yml", []), ("c.conf", ["--kind", "yaml"]), ("d", ["--kind=yaml"])):
        path = tmp_path / name
        path.write_text("enable_cuda_graph: true\n")
        assert cli.main(["migrate", "--in-place", *more, str(path)]) == 0
        assert path.read_text() == "cuda_graph_impl: local\n"


def test_standard_input_goes_to_standard_output() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "graphstep", "migrate", "-"], input=OLD.encode(), capture_output=True, check=True
    )
    assert done.stdout.decode() == NEW
    assert "+  --cuda-graph-impl local # x" in done.stderr.decode()


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_a_command_line(dashes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*dashes, "torchrun", "t.py", "--name", "a b", "--enable-cuda-graph", "--cuda-graph-scope", "attn"]
    assert cli.main(["migrate", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.out == "torchrun t.py --name 'a b' --cuda-graph-impl local --cuda-graph-modules attn\n"
    assert "-    --enable-cuda-graph" in captured.err
    assert captured.err.count("note: ") == 2


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (
            ["--enable-cuda-graph", "--cuda-graph-scope", "full_iteration"],
            [
                "--enable-cuda-graph is the old form of --cuda-graph-impl local (leave it out)",
                "--cuda-graph-scope is the old name of --cuda-graph-modules (leave it out)",
                "--cuda-graph-scope: module full_iteration is the old form of --cuda-graph-impl full_iteration "
                "(write --cuda-graph-impl full_iteration)",
            ],
        ),
        (
            ["--external-cuda-graph", "--cuda-graph-scope=attn"],
            [
                "--external-cuda-graph is the old form of --cuda-graph-impl transformer_engine "
                "(write --cuda-graph-impl transformer_engine)",
                "--cuda-graph-scope is the old name of --cuda-graph-modules (write --cuda-graph-modules)",
            ],
        ),
        (
            ["--enable-cuda-graph", "--cuda-graph-scope", "attn,full_iteration_inference"],
            [
                "--enable-cuda-graph is the old form of --cuda-graph-impl local (write --cuda-graph-impl local)",
                "--cuda-graph-scope is the old name of --cuda-graph-modules (write --cuda-graph-modules)",
                "--cuda-graph-scope: module full_iteration_inference is the old form of "
                "--inference-cuda-graph-scope block (write --inference-cuda-graph-scope block)",
            ],
        ),
    ],
)
def test_notes_of_a_command_line_name_an_option_once_and_agree(
    words: list[str], notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["migrate", "--", *words]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("note: ") for line in lines if line.startswith("note: ")] == notes


def test_options_without_a_program_are_a_command_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "--external-cuda-graph", "--check"]) == 0
    assert capsys.readouterr().out == "--cuda-graph-impl transformer_engine --check\n"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([], "migrate-nothing"),
        (["--inplace", "x.sh"], "unknown-option"),
        (["x.sh", "--chek"], "unknown-option"),
        (["--kind", "yml", "x"], "unknown-choice"),
        (["--kind"], "unknown-choice"),
        (["--in-place", "--", "x"], "migrate-no-file"),
        (["--in-place", "-"], "migrate-stdin"),
        (["-"], "migrate-stdin"),
        (["--in-place", "--check", "x"], "migrate-contradiction"),
        (["none.sh"], "file-unreadable"),
        (["pyproject.toml"], "migrate-kind"),
        (["tests"], "file-unreadable"),
        (["--enable-cuda-graph", "--external-cuda-graph"], "old-two-implementations"),
    ],
)
def test_bad_input(
    argv: list[str], code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("sys.stdin", None)  # as with a standard input that the shell closed
    assert cli.main(["migrate", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"[{code}]" in captured.err
    assert "  fix: " in captured.err


def test_torch_is_not_loaded() -> None:
    program = (
        "import sys\nimport graphstep.cli.main as m\n"
        "m.main(['migrate', '--enable-cuda-graph'])\nprint('torch' in sys.modules, 'yaml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False False"
