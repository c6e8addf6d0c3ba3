"""The compiled part: when it is built, and what is said where it cannot be."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from graphstep.errors import CaptureError
from graphstep.native.build import VARIABLE, Build


def environment(folder: Path, **more: str) -> dict[str, str]:
    """An environment with a cache of its own."""
    return {**os.environ, "XDG_CACHE_HOME": str(folder), **more}


def compiler(folder: Path, script: str) -> str:
    """A program in place of a compiler."""
    found = folder / "compiler"
    found.write_text(f"#!/bin/sh\necho called >> {folder}/calls\n{script}\n")
    found.chmod(found.stat().st_mode | stat.S_IXUSR)
    return str(found)


def test_it_can_be_left_out(tmp_path: Path) -> None:
    build = Build(environment(tmp_path, **{VARIABLE: "off"}))
    assert build.wait() is None
    assert "off" in build.why_not
    assert not list(tmp_path.iterdir())


def test_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="GRAPHSTEP_FAST_PATH='maybe' is not one of auto, off, required"):
        Build(environment(tmp_path, **{VARIABLE: "maybe"}))


def test_what_the_compiler_says_is_told_and_nobody_tries_again(tmp_path: Path) -> None:
    program = compiler(tmp_path, "echo 'x.cpp:1: error: no such thing' >&2; exit 1")
    given = environment(tmp_path, CXX=program, **{VARIABLE: "auto"})
    build = Build(given)
    assert build.wait() is None
    assert "error: no such thing" in build.why_not
    again = Build(given)
    assert again.wait() is None
    assert "error: no such thing" in again.why_not
    assert (tmp_path / "calls").read_text().count("called") == 1
    with pytest.raises(CaptureError, match="no such thing"):
        Build({**given, VARIABLE: "required"})


def test_one_compiler_runs_for_all_that_ask(tmp_path: Path) -> None:
    program = compiler(tmp_path, "sleep 1; exit 1")
    builds = [Build(environment(tmp_path, CXX=program, **{VARIABLE: "auto"})) for _ in range(4)]
    assert all(build.poll() is None for build in builds)
    assert all(build.wait() is None for build in builds)
    assert (tmp_path / "calls").read_text().count("called") == 1


def test_what_is_no_module_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "graphstep.native.fast_path", raising=False)
    script = 'while [ "$1" != "-o" ]; do shift; done; echo nonsense > "$2"'
    build = Build(environment(tmp_path, CXX=compiler(tmp_path, script), **{VARIABLE: "auto"}))
    assert build.wait() is None
    assert "cannot be loaded" in build.why_not


def test_without_a_home_there_is_none() -> None:
    build = Build({"PATH": os.environ.get("PATH", ""), VARIABLE: "auto"})
    assert build.wait() is None
    assert "no home folder" in build.why_not
