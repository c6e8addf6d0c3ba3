"""Read the arguments in a checkpoint of Megatron-LM without running anything that is pickled in it."""

from __future__ import annotations

import argparse
import os
import pickle
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from graphstep.config.old_checkpoints import STAND_INS, CheckpointSwitches, switches_of
from graphstep.errors import CheckpointError, Problem

_NAMESPACE = "argparse.Namespace"
_GETATTR = ("__builtin__.getattr", "builtins.getattr")
"""Some releases of Python 3.11 pickle a member of an enum as ``getattr(enum, name)``."""


class Unknown:
    """Stands for an object whose class is not needed here. Building one does nothing with what it is given."""

    def __init__(self, *arguments: object, **more: object) -> None:
        del arguments, more

    def __setstate__(self, state: object) -> None:
        del state


def read_switches(path: str | os.PathLike[str]) -> CheckpointSwitches:
    """Return what the arguments in a checkpoint say about CUDA graphs, in the new form.

    Every class that torch does not know as safe is replaced while the file is read: Megatron-LM's enums by our own with
    the same numbers, all others by one that does nothing. No module is imported for the file; afterwards torch's list
    of safe classes is as before. Tensors are mapped, not read.

    Args:
        path: a file that ``torch.save`` wrote, such as ``mp_rank_00/model_optim_rng.pt``, with a key ``args``.

    Raises:
        CheckpointError: it cannot be read, or holds no arguments.
        ConfigError: the arguments contradict each other.
    """
    content = _load(os.fspath(path))
    arguments = content.get("args") if isinstance(content, dict) else None
    if not isinstance(arguments, argparse.Namespace | dict):
        what = "expected a checkpoint with the arguments of the run under args"
        raise CheckpointError(Problem("checkpoint-no-args", what, os.fspath(path), "name a checkpoint of Megatron-LM"))
    values = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    return switches_of(values, os.fspath(path))


def _load(path: str) -> Any:
    try:
        with safe_globals(_stand_ins(path)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, pickle.UnpicklingError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "name a whole file that torch.save wrote"
        if isinstance(error, pickle.UnpicklingError) and "weights_only" in reason:
            # torch advises to run what is in the file; we do not.
            reason = "it holds something else than plain data and tensors, which was not run"
            fix = "name a file that Megatron-LM wrote"
        what = f"cannot read the checkpoint: {reason}"
        raise CheckpointError(Problem("checkpoint-unreadable", what, path, fix)) from error


def _stand_ins(path: str) -> list[Any]:
    """Return classes of our own for all that torch does not know as safe, with the names they have in the file."""
    found: list[Any] = []
    for name in get_unsafe_globals_in_checkpoint(path):
        if name == _NAMESPACE:
            stand_in: Any = argparse.Namespace
        elif name in _GETATTR:
            stand_in = _member
        else:
            stand_in = STAND_INS.get(name) or type(name.rpartition(".")[2], (Unknown,), {})
        found.append((stand_in, name))
    return found


def _member(kind: object, name: object) -> object:
    """Return the member of one of our enums, and nothing of anything else."""
    is_ours = isinstance(kind, type) and kind in STAND_INS.values()
    return getattr(kind, "__members__", {}).get(name, Unknown()) if is_ours else Unknown()
