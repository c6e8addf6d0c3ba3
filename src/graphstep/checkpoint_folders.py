"""Where the checkpoints of training lie in a folder, for those who write them and those who read them.

A checkpoint is a folder ``iter_0000100``; ``latest_checkpointed_iteration.txt`` beside it names the newest.
"""

from __future__ import annotations

from pathlib import Path

from graphstep.errors import CheckpointError, Problem

FORMAT = 1
TRACKER = "latest_checkpointed_iteration.txt"
STATE = "state.json"
MODEL = "model.safetensors"
REPLACED_SUFFIX = ".replaced"
"""A folder that is being replaced has this name between two renames; it is complete, and is removed afterwards."""

_MAX_DIGITS = 18
"""Longest iteration number that a pointer can hold: longer ones are damage, and no name of a folder."""


def folder_name(iteration: int) -> str:
    """Return the folder name of a checkpoint, such as ``iter_0000100``."""
    return f"iter_{iteration:07d}"


def find_checkpoint(path: Path, *, otherwise: str = "leave --load out to start afresh") -> Path:
    """Return the checkpoint folder that ``path`` means: itself, or the latest below it.

    Args:
        path: as a user names it.
        otherwise: what a user can do who has no other folder, for errors.

    Raises:
        CheckpointError: there is none, or it may not be read.
    """
    try:
        return _find_checkpoint(path, otherwise)
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror or error}"
        fix = f"name a folder that you may read, or {otherwise}"
        raise CheckpointError(
            Problem("checkpoint-missing", what, where=str(error.filename or path), fix=fix)
        ) from error


def _find_checkpoint(path: Path, otherwise: str) -> Path:
    if (path / STATE).is_file():
        return path
    if not path.is_dir():
        raise _missing(f"{path} does not exist" if not path.exists() else f"{path} is not a folder", path, otherwise)
    tracker = path / TRACKER
    if not tracker.is_file():
        raise _missing(f"{path} holds no checkpoint: neither {STATE} nor {TRACKER}", path, otherwise)
    text = _tracked(tracker)
    if not _is_iteration(text):
        raise _missing(f"{tracker.name} should hold an iteration number, and holds {text[:40]!r}", tracker, otherwise)
    folder = path / folder_name(int(text))
    for candidate in (folder, folder.with_name(folder.name + REPLACED_SUFFIX)):
        if candidate.is_dir():
            return candidate
    raise _missing(f"{tracker.name} names {folder.name}, which does not exist", path, otherwise)


def latest_iteration(root: Path) -> int | None:
    """Return the iteration that the pointer below ``root`` names; None if there is no pointer that can be read."""
    try:
        text = _tracked(root / TRACKER)
    except OSError:
        return None
    return int(text) if _is_iteration(text) else None


def _tracked(tracker: Path) -> str:
    return tracker.read_text(encoding="utf-8", errors="replace").strip()


def _is_iteration(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def _missing(what: str, where: Path, otherwise: str) -> CheckpointError:
    root = where if where.is_dir() else where.parent
    others = sorted(p.name for p in root.glob("iter_*") if (p / STATE).is_file())
    fix = f"name one of: {', '.join(others)}" if others else f"check the path, or {otherwise}"
    return CheckpointError(Problem("checkpoint-missing", what, where=str(where), fix=fix))
