"""Builds the compiled part in the background, once for each version of torch and Python, and loads it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from graphstep.cache_folder import default_cache_folder
from graphstep.errors import CaptureError
from graphstep.native.interface import FastPath

VARIABLE: Final = "GRAPHSTEP_FAST_PATH"
"""``auto`` (default): build it while the program runs, use it when it is there. ``off``. ``required``: wait for it."""
_CHOICES: Final = ("auto", "off", "required")
_NAME: Final = "fast_path"
_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = ("facts.hpp", "pattern.hpp", "relay.hpp", "node.hpp", "passage.hpp", f"{_NAME}.cpp")
_MOST_SECONDS: Final = 300.0
_SECONDS_BETWEEN_LOOKS: Final = 0.2
_IN_BACKGROUND: Final = """
(
  if "$@" > "$MADE.log" 2>&1; then mv -f "$MADE" "$TARGET"; rm -f "$MADE.log"
  else mv -f "$MADE.log" "$FAILED"; rm -f "$MADE"; fi
) &
"""
_FLAGS: Final = ("-O2", "-std=c++20", "-fPIC", "-shared", "-w")


class Build:
    """The compiled part: there, under way, or out of reach.

    Nothing is downloaded. The compiler is the one named in ``CXX``, or ``c++`` or ``g++``. The result lies in the
    user's folder for caches, by a name that tells the source, torch, Python and the flags.

    Args:
        environment: of the process.

    Raises:
        CaptureError: ``GRAPHSTEP_FAST_PATH`` is none of its choices; or it is ``required``, and the part cannot be
            built or loaded.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._choice = environment.get(VARIABLE, "").strip().lower() or "auto"
        self.why_not = ""
        """Why it is out of reach; empty while it is not."""
        self._module: FastPath | None = None
        self._compiler: str | None = None
        self._environment = dict(environment)
        self._target: Path | None = None
        self._since = time.monotonic()
        self._next_look = self._since
        if self._choice not in _CHOICES:
            raise CaptureError(
                f"{VARIABLE}={environment[VARIABLE]!r} is not one of {', '.join(_CHOICES)}",
                where="environment",
                fix=f"set {VARIABLE} to one of these, or unset it",
            )
        if self._choice == "off":
            self.why_not = f"{VARIABLE} is off"
            return
        self._begin(environment)
        if self._choice == "required":
            self.wait()
            if self._module is None:
                raise CaptureError(
                    f"{VARIABLE}=required, and the compiled part cannot be had: {self.why_not}",
                    where="environment",
                    fix=f"install a C++20 compiler and Python's headers, or set {VARIABLE} to auto",
                )

    @property
    def is_under_way(self) -> bool:
        """True until it is loaded, or known to be out of reach."""
        return self._module is None and not self.why_not

    def poll(self) -> FastPath | None:
        """The compiled part, if it is there by now. Does not wait."""
        if self.is_under_way:
            self._look()
        return self._module

    def wait(self) -> FastPath | None:
        """The compiled part, or ``None`` if it is out of reach. Waits for the compiler."""
        while self.is_under_way:
            self._look()
            if self.is_under_way:
                time.sleep(0.05)
        return self._module

    def _begin(self, environment: Mapping[str, str]) -> None:
        self._compiler = _compiler(environment)
        folder = default_cache_folder(environment)
        headers = Path(sysconfig.get_paths()["include"], "Python.h")
        if folder is None:
            self.why_not = "there is no home folder for a cache"
            return
        self._target = (
            folder / _NAME / _fingerprint(self._compiler) / f"{_NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
        )
        if self._target.exists():
            return
        if self._compiler is None:
            self.why_not = "no C++ compiler was found (c++, g++, or CXX in the environment)"
        elif not headers.exists():
            self.why_not = "the headers of Python are not installed (Python.h)"
        else:
            self._look()

    def _compile(self) -> None:
        """Start the compiler in the background, unless somebody's is running: it has the lock as long as it runs.

        It goes on when this process ends; the next one has use for what it makes.
        """
        target, compiler = cast(Path, self._target), cast(str, self._compiler)
        made = target.with_name(f"made-{os.getpid()}.so")
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (target.parent / "lock").open("ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return
                if target.exists():
                    return
                subprocess.run(
                    ["/bin/sh", "-c", _IN_BACKGROUND, "sh", *_command(compiler, made)],
                    env={**self._environment, "MADE": str(made), "TARGET": str(target), "FAILED": str(self._failed())},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(lock.fileno(),),
                    start_new_session=True,
                    check=True,
                )
        except (OSError, subprocess.SubprocessError) as error:
            self.why_not = f"{target.parent}: {error}"

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        if cast(Path, self._target).exists():
            self._load()
        elif self._failed().exists():
            self.why_not = self._what_failed()
        elif time.monotonic() - self._since > _MOST_SECONDS:
            self.why_not = f"the compiler took longer than {_MOST_SECONDS:.0f} s"
        else:
            self._compile()

    def _failed(self) -> Path:
        """What the compiler said where it failed. Nobody tries again."""
        return cast(Path, self._target).with_name("failed.log")

    def _what_failed(self) -> str:
        lines = self._failed().read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines
        return f"the compiler failed ({self._failed()}): {errors[0][:300] if errors else 'it said nothing'}"

    def _load(self) -> None:
        target = str(self._target)
        loaded = sys.modules.get(f"graphstep.native.{_NAME}")
        if loaded is None:
            try:
                spec = importlib.util.spec_from_file_location(f"graphstep.native.{_NAME}", target)
                if spec is None or spec.loader is None:
                    raise ImportError("not a module")
                loaded = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(loaded)
                sys.modules[spec.name] = loaded
            except ImportError as error:
                cast(Path, self._target).unlink(missing_ok=True)  # Another process may make a better one.
                self.why_not = f"{target} cannot be loaded: {error}"
                return
        self._module = cast(FastPath, cast(Any, loaded))


def _compiler(environment: Mapping[str, str]) -> str | None:
    named = environment.get("CXX", "").split()
    names = (named[-1:] if len(named) == 1 else []) + ["c++", "g++"]
    return next((found for found in map(shutil.which, names) if found), None)


def _fingerprint(compiler: str | None) -> str:
    facts = (
        *((_FOLDER / name).read_text() for name in _SOURCES),
        torch.__version__,
        sys.version,
        sysconfig.get_platform(),
        compiler or "",
        *_FLAGS,
    )
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:16]


def _command(compiler: str, made: Path) -> list[str]:
    base = Path(torch.__file__).parent
    include = base / "include"
    headers = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    old_strings = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    return [
        compiler,
        *_FLAGS,
        old_strings,
        *(f"-I{folder}" for folder in headers),
        str(_FOLDER / _SOURCES[-1]),
        "-o",
        str(made),
        f"-L{base / 'lib'}",
        *libraries,
    ]
