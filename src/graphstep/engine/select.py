"""The engine that fits a device."""

from __future__ import annotations

import torch

from graphstep.engine.cuda import CudaEngine
from graphstep.engine.protocol import Engine
from graphstep.engine.tape import TapeEngine
from graphstep.errors import ConfigError, Problem


def engine_for(device: torch.device | str) -> Engine:
    """A new engine for ``device``: CUDA graphs on a GPU, the tape on the CPU.

    Raises:
        ConfigError: there is no engine for this kind of device, or no such GPU on this machine.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return CudaEngine(device)
    if device.type == "cpu":
        return TapeEngine()
    raise ConfigError(
        Problem(
            code="device-unsupported",
            what=f"no engine for device {device}",
            where="device",
            fix="use a 'cuda' device, or 'cpu' for the tape engine",
        )
    )
