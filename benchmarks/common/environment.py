"""Where a number comes from: machine, versions, commit, command."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
COMMIT_VARIABLE = "GRAPHSTEP_COMMIT"
"""Environment variable that names the commit where there is no git checkout, as ``<hash>`` or ``<hash>-dirty``."""

_ENVIRONMENT = re.compile(r"CUDA_|CUBLAS|NVIDIA_TF32|PYTORCH_|TORCH_|TORCHINDUCTOR_|NCCL_|OMP_NUM_THREADS|MKL_NUM")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])/(?:[^\s/:'\"]+/)+")


def provenance(
    benchmark: str, argv: Sequence[str], device: torch.device, *, started: datetime, gpu_before: Mapping[str, str]
) -> dict[str, Any]:
    """Return what the results of every program begin with, as plain data.

    Args:
        benchmark: name of the program, without its ending.
        argv: words after it.
        device: where it ran.
        started: when it began.
        gpu_before: :func:`gpu_state` of that moment; that of now is added.
    """
    return {
        "schema": 1,
        "benchmark": benchmark,
        "started": started.isoformat(timespec="seconds"),
        "command": command_line(f"benchmarks/{benchmark}.py", argv),
        "commit": commit(),
        "machine": describe_machine(device),
        "gpu_before": dict(gpu_before),
        "gpu_after": gpu_state(device),
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return names and versions of everything below the benchmark, as plain data."""
    facts: dict[str, Any] = {
        "device": device.type,
        "gpu": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "environment": {k: without_paths(v) for k, v in sorted(os.environ.items()) if _ENVIRONMENT.match(k)},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "driver": gpu_state(device).get("driver_version"),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def gpu_state(device: torch.device) -> dict[str, str]:
    """Return driver, clocks, temperature and power as ``nvidia-smi`` tells them, empty where it fails; reads only."""
    if device.type != "cuda":
        return {}
    names = ("driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "power.limit")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    chosen = [] if uuid is None else ["-i", f"GPU-{uuid}"]
    query = [f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    answer = _output_of(["nvidia-smi", *chosen, *query]) or _output_of(["nvidia-smi", *query])
    if answer is None:
        return {}
    values = [value.strip() for value in answer.splitlines()[0].split(",")]
    return dict(zip(names, values, strict=False))


def commit() -> dict[str, Any]:
    """Return the commit and whether tracked files differ from it (None: unknown)."""
    named = os.environ.get(COMMIT_VARIABLE, "").strip()
    if named:
        return {"commit": named.removesuffix("-dirty"), "is_dirty": named.endswith("-dirty")}
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    top = _output_of([*git, "rev-parse", "--show-toplevel"])
    head = _output_of([*git, "rev-parse", "HEAD"])
    if head is None or top is None or Path(top).resolve() != ROOT:
        return {"commit": "unknown", "is_dirty": None}
    changes = _output_of([*git, "status", "--porcelain", "--untracked-files=no"], allow_empty=True)
    return {"commit": head, "is_dirty": None if changes is None else bool(changes)}


def command_line(program: str, argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the command that repeats this run from the root of the source tree.

    Args:
        program: path below the root.
        argv: words after it.
        environment: variables of this process.
    """
    variables = ["PYTHONPATH=src"]
    variables += [
        f"{name}={environment[name]}"
        for name in ("CUBLAS_WORKSPACE_CONFIG", "GRAPHSTEP_FAST_PATH")
        if name in environment
    ]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return f"{' '.join(variables)} {version} {program} {without_paths(shlex.join(argv))}".rstrip()


def without_paths(text: str) -> str:
    """Shorten absolute paths to their last part: results say nothing about the folders of a machine."""
    return _ABSOLUTE_PATH.sub("", text)


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


def _output_of(words: Sequence[str], *, allow_empty: bool = False) -> str | None:
    """Standard output of a command, or None if it fails, is missing, or (unless allowed) says nothing."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = done.stdout.strip()
    return answer if done.returncode == 0 and (answer or allow_empty) else None
