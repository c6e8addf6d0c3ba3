"""What the environment of a run says: variables that rules look at, and what is installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphstep.config.words import shown, word_of
from graphstep.errors import Problem

VARIABLES: Mapping[str, str] = {
    "world_size": "WORLD_SIZE",
    "rank": "RANK",
    "expandable_segments": "PYTORCH_CUDA_ALLOC_CONF",
    "nccl_graph_register": "NCCL_GRAPH_REGISTER",
    "cuda_device_max_connections": "CUDA_DEVICE_MAX_CONNECTIONS",
    "nvte_cpu_offload_v1": "NVTE_CPU_OFFLOAD_V1",
    "cuda_graphs_use_node_priority": "CUDA_GRAPHS_USE_NODE_PRIORITY",
    "cuda_graph_capture_freeze_gc": "CUDA_GRAPH_CAPTURE_FREEZE_GC",
}
"""Name that rules know it by -> environment variable."""

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = re.compile(r"(^|,)\s*expandable_segments\s*:\s*true\s*(,|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The variables, read once. Only their content counts, not whether they were set to the default."""

    world_size: int = 1
    """Ranks of the run, >= 1."""
    rank: int = 0
    """This one, in [0, world_size)."""
    expandable_segments: bool = False
    """The CUDA allocator grows its segments (``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF``)."""
    nccl_graph_register: str = ""
    """``0``: NCCL does not register the buffers of graphs."""
    cuda_device_max_connections: str = ""
    """Hardware queues of the device."""
    nvte_cpu_offload_v1: str = ""
    """``1``: offloading leaves weights alone."""
    cuda_graphs_use_node_priority: str = ""
    """``1``: kernels in graphs keep the priority of their stream."""
    cuda_graph_capture_freeze_gc: str = ""
    """Megatron-LM's switch for Python's garbage collection while capturing."""

    def options(self) -> dict[str, Any]:
        """Return the values under the names that rules know them by."""
        return {name: getattr(self, name) for name in VARIABLES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a configuration is checked for. ``None``: not known, and no reason to refuse anything.

    Nothing is imported to find out.
    """

    te_version: str | None = None
    """Version of Transformer Engine. graphstep needs none; an old one is refused where Megatron-LM would refuse it."""
    gpu_arch: int | None = None
    """Major compute capability of the device."""
    torch_memory_saver: bool | None = None
    """Is that package installed? None: look."""
    flashinfer_version: str | None = None
    """Version of FlashInfer. None: look."""


def read_environment(env: Mapping[str, str]) -> tuple[Environment, list[Problem]]:
    """Return what the variables say.

    Args:
        env: environment variables; numbers and paths count as words.

    Returns:
        The environment, with the default for what cannot be read, and problems.
    """
    problems: list[Problem] = []
    env = _texts(env, problems)
    world_size = _whole(env, "WORLD_SIZE", 1, 1, problems)
    rank = _whole(env, "RANK", 0, 0, problems)
    if rank >= world_size and not problems:
        what = f"RANK={rank} is not below WORLD_SIZE={world_size}"
        problems.append(Problem("rank-range", what, "RANK", "launch with torchrun, which sets both"))
    strings = {
        name: env.get(variable, "")
        for name, variable in VARIABLES.items()
        if name not in ("world_size", "rank", "expandable_segments")
    }
    expandable = any(_EXPANDABLE.search(env.get(name, "")) for name in ALLOCATOR_VARIABLES)
    return Environment(world_size=world_size, rank=rank, expandable_segments=expandable, **strings), problems


def machine_facts(machine: Machine, *, look: bool) -> dict[str, Any]:
    """Return what is installed, under the names that rules know it by.

    Args:
        machine: what is known already.
        look: find out the rest. Costs milliseconds: only where an option asks for it.
    """
    saver, flashinfer = machine.torch_memory_saver, machine.flashinfer_version
    if look and saver is None:
        saver = _is_installed("torch_memory_saver")
    if look and flashinfer is None:
        flashinfer = _version("flashinfer-python")
    return {
        "te_version": as_version(machine.te_version or ""),
        "gpu_arch": machine.gpu_arch,
        "torch_memory_saver": bool(saver),
        "flashinfer_version": as_version(flashinfer or ""),
    }


def as_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what follows them: ``0.6.4rc1`` -> ``(0, 6, 4)``."""
    return tuple(int(number) for number in re.findall(r"\d{1,9}", text)[:3])


def _texts(env: object, problems: list[Problem]) -> dict[str, str]:
    """Return the variables that are looked at as text."""
    if not isinstance(env, Mapping):
        fix = "give a dictionary such as {'WORLD_SIZE': '1'}"
        problems.append(Problem("env-type", f"expected variables and their values, got {shown(env)}", "env", fix))
        return {}
    texts = {}
    for name in sorted({*VARIABLES.values(), *ALLOCATOR_VARIABLES}.intersection(env)):
        word = word_of(env[name])
        if word is None:
            what = f"{name}: expected text, got {shown(env[name])}"
            problems.append(Problem("env-type", what, name, "give a str, or leave the variable out"))
        else:
            texts[name] = word
    return texts


def _whole(env: Mapping[str, str], name: str, default: int, least: int, problems: list[Problem]) -> int:
    word = env.get(name, "").strip()
    if not word:
        return default
    if word.isascii() and word.isdigit() and len(word) < 10 and int(word) >= least:
        return int(word)
    what = f"{name}: expected a whole number of at least {least}, got {word!r}"
    fix = "launch with torchrun, which sets it, or unset it"
    problems.append(Problem(f"{name.lower().replace('_', '-')}-range", what, name, fix))
    return default


def _is_installed(name: str) -> bool:
    import sys
    from importlib.util import find_spec

    return name in sys.modules or find_spec(name) is not None


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
