"""Every shell command that the documentation shows exists, and its options parse."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))

FENCE = re.compile(r"^```(?:bash|sh|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
SEPARATORS = {"&&", "||", ";", "|", "&"}
REDIRECTIONS = {">", ">>", "<"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in the fenced shell blocks, without assignments before it and redirections after it."""
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words: list[str] = []
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            for word in [*lexer, ";"]:
                if word in SEPARATORS:
                    yield from filter(None, [command_of(words)])
                    words = []
                else:
                    words.append(word)


def command_of(words: list[str]) -> list[str]:
    end = next((i for i, word in enumerate(words) if word in REDIRECTIONS), len(words))
    start = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word)), len(words))
    return words[start:end]


def fault_of(command: list[str]) -> str:
    """Why a command of the documentation does not work; empty if it does."""
    program, *rest = command
    name = Path(program).name
    if name == "make":
        return fault_of_make(rest)
    if name == "graphstep":
        return fault_of_graphstep(rest)
    if name in ("python", "python3"):
        return fault_of_python(rest)
    if name == "torchrun":
        return fault_of_python([word for word in rest if not word.startswith("-")])
    if name == "pip":
        return fault_of_pip(rest)
    return "" if name in ("cd", "git", "source") else f"unknown program {program}"


def fault_of_make(words: list[str]) -> str:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    targets = [word for word in words if not ASSIGNMENT.match(word) and not word.startswith("-")]
    unknown = [target for target in targets if target not in known]
    return f"no such target: {unknown}" if unknown else ""


def fault_of_graphstep(words: list[str]) -> str:
    from graphstep.config import from_argv
    from graphstep.errors import ConfigError

    if not words or words[0].startswith("-") or "--help" in words:
        return ""
    if words[0] in ("migrate", "advise"):
        return fault_of_running(words)
    checks = {"generate": fault_of_generate, "serve": fault_of_serve, "doctor": fault_of_doctor, "plan": fault_of_plan}
    if words[0] in checks:
        return checks[words[0]](words[1:])
    if words[0] not in ("train", "config"):
        return f"unknown command {words[0]}"
    try:
        with contextlib.chdir(ROOT):
            from_argv([word for word in words[1:] if (words[0], word) != ("config", "--json")])
    except ConfigError as error:
        return str(error)
    return ""


def fault_of_doctor(words: list[str]) -> str:
    from graphstep.cli.doctor import read_doctor_options
    from graphstep.config import from_argv
    from graphstep.errors import ConfigError

    try:
        options = read_doctor_options(words)
        if options.train is not None:
            from_argv(options.train)
    except ConfigError as error:
        return str(error)
    path = (options.target or "").partition(":")[0]
    return f"no such file: {path}" if path and not (ROOT / path).exists() else ""


def fault_of_generate(words: list[str]) -> str:
    from graphstep.cli.generate_options import read_generate_options
    from graphstep.errors import ConfigError

    try:
        read_generate_options(words)
    except ConfigError as error:
        return str(error)
    return ""


def fault_of_plan(words: list[str]) -> str:
    from graphstep.cli.plan_options import read_plan_options
    from graphstep.config import from_argv
    from graphstep.errors import ConfigError

    try:
        from_argv(read_plan_options(words).train, {}, for_training=True)
    except ConfigError as error:
        return str(error)
    return ""


def fault_of_serve(words: list[str]) -> str:
    from graphstep.cli.serve_options import read_serve_options
    from graphstep.errors import ConfigError

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("key.txt").write_text("0123456789abcdef0123456789abcdef\n", encoding="utf-8")
        try:
            read_serve_options(words, {})
        except ConfigError as error:
            return str(error)
    return ""


def fault_of_running(words: list[str]) -> str:
    """Runs a command that is over at once, among copies of the examples."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        done = subprocess.run(
            [sys.executable, "-m", "graphstep", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    good = (0, 1) if "--check" in words else (0,)
    return "" if done.returncode in good and done.stdout else f"exit code {done.returncode}: {done.stderr}"


def fault_of_python(words: list[str]) -> str:
    if words[:2] == ["-m", "pytest"]:
        paths = [word.split("::")[0] for word in words[2:] if "/" in word or word == "tests"]
    elif words and not words[0].startswith("-"):
        paths = words[:1]
    else:
        return f"neither pytest nor a file: {words}"
    missing = [path for path in paths if not (ROOT / path).exists()]
    return f"no such file: {missing}" if missing else ""


def fault_of_pip(words: list[str]) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {extra for word in words for found in re.findall(r"\[(.+)\]", word) for extra in found.split(",")}
    unknown = wanted - set(project["optional-dependencies"])
    return f"no such extra: {sorted(unknown)}" if unknown else ""


def test_quick_start_has_two_commands() -> None:
    shown = list(commands((ROOT / "README.md").read_text(encoding="utf-8")))
    assert ["make", "train"] in shown
    assert ["make", "test"] in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_work(page: Path) -> None:
    found = list(commands(page.read_text(encoding="utf-8")))
    faults = {shlex.join(command): fault for command in found if (fault := fault_of(command))}
    assert faults == {}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_train_has_options_that_parse() -> None:
    printed = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    block = f"```bash\n{printed}```"
    trains = [command for command in commands(block) if Path(command[0]).name == "graphstep"]
    assert len(trains) == 1
    assert fault_of(trains[0]) == ""


def test_faults_are_seen() -> None:
    block = (
        "Text\n```bash\n# comment\nA=1 make nothing X=2 && make test # why\nls\npython missing.py \\\n  --x | tee log\n"
        'pip install -e ".[none]"\npython -m pytest tests -m gpu > log\n```\n```python\nprint()\n```\n'
    )
    found = list(commands(block))
    assert [bool(fault_of(command)) for command in found] == [True, False, True, True, True, True, False]
    assert found[0] == ["make", "nothing", "X=2"]
    assert found[-1] == ["python", "-m", "pytest", "tests", "-m", "gpu"]
    lines = "graphstep advise --scenario x", "graphstep migrate none.sh", "graphstep migrate -- --enable-cuda-graph"
    assert [bool(fault_of(shlex.split(line))) for line in lines] == [True, True, False]
