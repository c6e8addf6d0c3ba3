"""One decision for all ranks of a job: what one of them does, all have to do, or their collectives would not meet."""

from __future__ import annotations

import torch
from torch import distributed


def num_ranks() -> int:
    """Ranks of this job; 1 without process groups."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def on_any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank. Every rank has to ask."""
    if num_ranks() == 1:
        return flag
    is_on_device = distributed.get_backend() == distributed.Backend.NCCL
    found = torch.tensor([int(flag)], device=device if is_on_device else torch.device("cpu"))
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return bool(found.item())
