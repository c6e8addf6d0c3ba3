"""docs/configuration-files.md: what it shows is read, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphstep.config import from_argv, from_file

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "configuration-files.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.parametrize("language", ["yaml", "toml"])
def test_both_forms_say_the_same(language: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.{language}"
    path.write_text(block(language), encoding="utf-8")
    argv = "--num-layers 2 --cuda-graph-impl local --cuda-graph-modules attn mlp --lr 1e-3"
    assert from_file(path, {}) == from_argv(argv.split(), {})


def test_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block("python"), "configuration-files.md", "exec"), {})
    assert capsys.readouterr().out.strip() == block("python").splitlines()[-1].split("# ")[1]
