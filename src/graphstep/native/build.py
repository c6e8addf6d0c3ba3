"""Builds the compiled part in the background, once for each version of torch and Python, and loads it."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from graphstep.errors import CaptureError
from graphstep.native.interface import FastPath

VARIABLE: Final = "GRAPHSTEP_FAST_PATH"
"""``auto`` (default): build it while the program runs, use it when it is there. ``off``. ``required``: wait for it."""
_CHOICES: Final = ("auto", "off", "required")
_NAME: Final = "fast_path"
_SOURCE: Final = Path(__file__).with_name(f"{_NAME}.cpp")
_MOST_SECONDS: Final = 300.0
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
        self._process: subprocess.Popen[bytes] | None = None
        self._made: Path | None = None
        self._target: Path | None = None
        self._since = time.monotonic()
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
        compiler = _compiler(environment)
        folder = _cache_folder(environment)
        headers = Path(sysconfig.get_paths()["include"], "Python.h")
        if folder is None:
            self.why_not = "there is no home folder for a cache"
            return
        self._target = folder / _fingerprint(compiler) / f"{_NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
        if self._target.exists():
            return
        if compiler is None:
            self.why_not = "no C++ compiler was found (c++, g++, or CXX in the environment)"
        elif not headers.exists():
            self.why_not = "the headers of Python are not installed (Python.h)"
        else:
            self._compile(compiler)

    def _compile(self, compiler: str) -> None:
        target = cast(Path, self._target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
            os.close(handle)
            self._made = Path(name)
            log = self._made.with_suffix(".log")
            with log.open("wb") as output:
                self._process = subprocess.Popen(_command(compiler, self._made), stdout=output, stderr=output)
        except OSError as error:
            self.why_not = f"{target.parent}: {error.strerror or error}"

    def _look(self) -> None:
        if self._process is not None:
            code = self._process.poll()
            if code is None and time.monotonic() - self._since < _MOST_SECONDS:
                return
            self._finish(code)
        if not self.why_not:
            self._load()

    def _finish(self, code: int | None) -> None:
        process, self._process = self._process, None
        made = cast(Path, self._made)
        log = made.with_suffix(".log")
        if code is None and process is not None:
            process.kill()
            process.wait()
            self.why_not = f"the compiler took longer than {_MOST_SECONDS:.0f} s"
        elif code != 0:
            lines = log.read_text(errors="replace").strip().splitlines()
            errors = [line for line in lines if "error" in line] or lines
            self.why_not = f"the compiler failed: {errors[0][:300] if errors else f'exit code {code}'}"
        else:
            # Several processes may build at once; each puts a whole file there, and they are the same.
            os.replace(made, cast(Path, self._target))
        made.unlink(missing_ok=True)
        log.unlink(missing_ok=True)

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
                self.why_not = f"{target} cannot be loaded: {error}"
                return
        self._module = cast(FastPath, cast(Any, loaded))

    def close(self) -> None:
        """Stop a build that is under way. May be called twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.why_not = "the build was stopped"
            made = cast(Path, self._made)
            made.unlink(missing_ok=True)
            made.with_suffix(".log").unlink(missing_ok=True)


def _compiler(environment: Mapping[str, str]) -> str | None:
    named = environment.get("CXX", "").split()
    names = (named[-1:] if len(named) == 1 else []) + ["c++", "g++"]
    return next((found for found in map(shutil.which, names) if found), None)


def _cache_folder(environment: Mapping[str, str]) -> Path | None:
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # The XDG specification: a relative path is ignored.
        return Path(base, "graphstep", _NAME)
    home = environment.get("HOME", "")
    return Path(home, ".cache", "graphstep", _NAME) if home else None


def _fingerprint(compiler: str | None) -> str:
    facts = (_SOURCE.read_text(), torch.__version__, sys.version, sysconfig.get_platform(), compiler or "", *_FLAGS)
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
        str(_SOURCE),
        "-o",
        str(made),
        f"-L{base / 'lib'}",
        *libraries,
    ]
