"""Where the number format is chosen by the code, not by autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Turn autocast off for the device of ``tensor``, where it is on: operators then compute in the dtypes they get."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
