"""CUDA graphs for transformer training and inference on plain PyTorch.

Importing this package does nothing to the process and loads no torch: a public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphstep.version import __version__

if TYPE_CHECKING:
    from graphstep.capture.report import CaptureReport
    from graphstep.capture.session import GraphSession
    from graphstep.doctor import Diagnosis, diagnose
    from graphstep.engine import CudaEngine, Engine, Recording, TapeEngine, engine_for
    from graphstep.errors import (
        CaptureError,
        CheckpointError,
        ConfigError,
        DataError,
        GraphstepError,
        InputMismatchError,
        LifecycleError,
        PlanError,
        StaleAddressError,
        UserInputError,
        VerificationError,
    )
    from graphstep.planning import plan_step
    from graphstep.strategies import (
        CudaGraphManager,
        FullCudaGraphWrapper,
        GraphedStep,
        LocalGraphs,
        OptimizerGraph,
        TECudaGraphHelper,
        attach,
        build_strategy,
        clip_grad_norm_,
        graph_step,
        make_graphed_callables,
    )
    from graphstep.verification import Tolerance, VerifyReport, shadow, verify

__all__ = [
    "CaptureError",
    "CaptureReport",
    "CheckpointError",
    "ConfigError",
    "CudaEngine",
    "CudaGraphManager",
    "DataError",
    "Diagnosis",
    "Engine",
    "FullCudaGraphWrapper",
    "GraphSession",
    "GraphedStep",
    "GraphstepError",
    "InputMismatchError",
    "LifecycleError",
    "LocalGraphs",
    "OptimizerGraph",
    "PlanError",
    "Recording",
    "StaleAddressError",
    "TECudaGraphHelper",
    "TapeEngine",
    "Tolerance",
    "UserInputError",
    "VerificationError",
    "VerifyReport",
    "__version__",
    "attach",
    "build_strategy",
    "clip_grad_norm_",
    "diagnose",
    "engine_for",
    "graph_step",
    "make_graphed_callables",
    "plan_step",
    "shadow",
    "verify",
]

_HOMES: Mapping[str, str] = {
    "UserInputError": "graphstep.errors",
    "VerificationError": "graphstep.errors",
    "StaleAddressError": "graphstep.errors",
    "PlanError": "graphstep.errors",
    "LifecycleError": "graphstep.errors",
    "InputMismatchError": "graphstep.errors",
    "GraphstepError": "graphstep.errors",
    "DataError": "graphstep.errors",
    "ConfigError": "graphstep.errors",
    "CheckpointError": "graphstep.errors",
    "CaptureError": "graphstep.errors",
    "CaptureReport": "graphstep.capture.report",
    "CudaEngine": "graphstep.engine",
    "CudaGraphManager": "graphstep.strategies",
    "Diagnosis": "graphstep.doctor",
    "Engine": "graphstep.engine",
    "FullCudaGraphWrapper": "graphstep.strategies",
    "GraphedStep": "graphstep.strategies",
    "GraphSession": "graphstep.capture.session",
    "LocalGraphs": "graphstep.strategies",
    "OptimizerGraph": "graphstep.strategies",
    "Recording": "graphstep.engine",
    "TECudaGraphHelper": "graphstep.strategies",
    "TapeEngine": "graphstep.engine",
    "attach": "graphstep.strategies",
    "build_strategy": "graphstep.strategies",
    "clip_grad_norm_": "graphstep.strategies",
    "diagnose": "graphstep.doctor",
    "engine_for": "graphstep.engine",
    "graph_step": "graphstep.strategies",
    "make_graphed_callables": "graphstep.strategies",
    "plan_step": "graphstep.planning",
    "Tolerance": "graphstep.verification",
    "VerifyReport": "graphstep.verification",
    "shadow": "graphstep.verification",
    "verify": "graphstep.verification",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
