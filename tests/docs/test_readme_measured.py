"""Commands beside figures in README.md are those that a file of benchmarks/results records, with their environment."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = README.partition("## Measured\n")[2].partition("\n## ")[0]
COMMAND = re.compile(r"`((?:[A-Z_]+=\S+\s+)*python\s+benchmarks/(\w+)\.py[^`]*)`.*?commit\s+([0-9a-f]{7})", re.DOTALL)
FOUND = [(" ".join(command.split()), name, commit) for command, name, commit in COMMAND.findall(MEASURED)]


def words_of(command: str) -> list[str]:
    """What decides a command: not where the sources are, which Python it is, and where results go."""
    plain = re.sub(r"PYTHONPATH=\S+|--output \S+", "", command)
    return sorted(re.sub(r"python3[.0-9]*", "python", plain).split())


def recorded(benchmark: str, commit: str) -> list[list[str]]:
    records = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob(f"{benchmark}-*.json")]
    return [words_of(each["command"]) for each in records if each["commit"]["commit"].startswith(commit)]


def test_the_readme_has_commands_beside_its_figures() -> None:
    assert len(FOUND) >= 12
    assert len(FOUND) == len(re.findall(r"benchmarks/\w+\.py", MEASURED))


@pytest.mark.parametrize(("command", "benchmark", "commit"), FOUND)
def test_a_file_of_results_has_the_command(command: str, benchmark: str, commit: str) -> None:
    assert words_of(command) in recorded(benchmark, commit)
