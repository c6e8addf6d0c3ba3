"""Importing graphstep does nothing to the process. Each check runs in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"

# What is compared before and after the import, in the child.
PROCESS_STATE = """
import atexit, gc, logging, os, random, signal, sys, threading, warnings

def process_state():
    return {
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "Python threads": threading.active_count(),
        "system threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "excepthook": repr((sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook)),
        "warning filters": repr(warnings.filters) + repr(warnings.showwarning),
        "garbage collection": repr((gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.callbacks)),
        "calls at exit": atexit._ncallbacks(),
        "signal handlers": {int(s): repr(signal.getsignal(s)) for s in signal.valid_signals()},
        "import system": repr((sys.path, sys.meta_path, sys.path_hooks)),
        "tracing": repr((sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), sys.getswitchinterval())),
        "root logger": repr((logging.root.level, logging.root.handlers, logging.getLoggerClass())),
        "random": hash(random.getstate()),
    }
"""

TORCH_STATE = """
def torch_state():
    module = torch.nn.modules.module
    hooks = [n for n in sorted(vars(module)) if n.startswith("_global_") and hasattr(getattr(module, n), "__len__")]
    return {
        "default dtype": repr((torch.get_default_dtype(), torch.get_default_device())),
        "number of threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "cudnn": [
            getattr(torch.backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic", "allow_tf32")
        ],
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "CUDA": torch.cuda.is_initialized(),
        "module hooks": {n: len(getattr(module, n)) for n in hooks},
        "dispatch modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "random": torch.initial_seed(),
        "random state": hash(bytes(torch.get_rng_state().numpy())),
        "numpy random": repr(numpy.random.get_state()[2:]) + str(hash(numpy.random.get_state()[1].tobytes())),
        "numpy errors": repr(numpy.geterr()),
        "patched": [
            n for n in ("is_current_stream_capturing", "synchronize", "current_stream", "graph")
            if getattr(torch.cuda, n).__module__.split(".")[0] != "torch"
        ],
    }
"""

# Loaded before the first look: what they do to the process is theirs.
LIBRARIES = """
import concurrent.futures.thread, multiprocessing, torch, torch.distributed, torch.utils._python_dispatch
import contextlib, numpy, rich.live, safetensors.torch
for name in ("triton", "starlette.applications", "uvicorn", "uvicorn.protocols.http.h11_impl"):
    with contextlib.suppress(ModuleNotFoundError):
        __import__(name)
"""

# Not needed by most of the package, and not installed everywhere.
OPTIONAL = ("triton", "starlette", "uvicorn", "h11")

REPORT = """
import json
changed = {n: [repr(before[n]), repr(after[n])] for n in before if before[n] != after[n]}
print(json.dumps(changed))
"""


def module_names() -> list[str]:
    # Modules that run something when imported as a program are no part of the library.
    found = pkgutil.walk_packages([str(SRC / "graphstep")], prefix="graphstep.", onerror=lambda name: None)
    names = [module.name for module in found if not module.name.endswith("__main__")]
    # Only some builds of PyTorch bring Triton along; only modules named for it need it.
    has_triton = importlib.util.find_spec("triton") is not None
    return ["graphstep", *(name for name in names if has_triton or ".triton_" not in name)]


def run(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"the child process failed:\n{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


def changes(code: str, *, libraries: str, state: str) -> dict[str, list[str]]:
    """What `code` changes of `state`: before and after, by name."""
    lines = [libraries, PROCESS_STATE, TORCH_STATE, f"before = {state}", code, f"after = {state}", REPORT]
    return json.loads(run("\n".join(lines)))


def test_importing_the_package_changes_nothing() -> None:
    assert changes("import graphstep", libraries="", state="process_state()") == {}


def test_importing_every_module_changes_nothing() -> None:
    code = "\n".join(
        f"try: import {name}\nexcept ModuleNotFoundError as error:\n    if error.name not in {OPTIONAL}: raise"
        for name in module_names()
    )
    assert changes(code, libraries=LIBRARIES, state="{**process_state(), **torch_state()}") == {}


def test_a_change_is_noticed() -> None:
    code = "gc.disable(); torch.set_num_threads(torch.get_num_threads() + 1); os.environ['A_FAULT'] = '1'"
    found = changes(code, libraries=LIBRARIES, state="{**process_state(), **torch_state()}")
    assert set(found) >= {"environment", "garbage collection", "number of threads"}


@pytest.mark.parametrize("name", ["graphstep", "graphstep.errors", "graphstep.config", "graphstep.cli.main"])
def test_light_modules_load_no_torch(name: str) -> None:
    heavy = ("torch", "numpy", "safetensors", "tokenizers", "tensorboard")
    loaded = run(f"import sys, {name}; print([n for n in {heavy!r} if n in sys.modules])")
    assert loaded == "[]"
