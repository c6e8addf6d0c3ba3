"""Files and folders that appear complete or not at all, also after a crash or a power cut."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from graphstep.checkpoint_folders import REPLACED_SUFFIX

TEMPORARY_PREFIX = "."
TEMPORARY_SUFFIX = ".partial"


def temporary_name(target: Path) -> Path:
    """Return the name beside ``target`` under which it is written."""
    return target.with_name(f"{TEMPORARY_PREFIX}{target.name}{TEMPORARY_SUFFIX}")


def sync(path: Path) -> None:
    """Wait until a file's data, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomically(target: Path, text: str) -> None:
    """Write a file under a temporary name and rename it over ``target``."""
    temporary = temporary_name(target)
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(target)
    sync(target.parent)


def publish_folder(temporary: Path, target: Path) -> None:
    """Rename a finished temporary folder to ``target``; a folder of that name is replaced.

    If there was one before, then at every moment ``target`` or ``target`` with the suffix ``.replaced`` is complete.
    """
    for path in sorted(temporary.iterdir()):
        sync(path)
    sync(temporary)
    replaced = target.with_name(target.name + REPLACED_SUFFIX)
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    temporary.rename(target)
    sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def remove_leftovers(root: Path) -> None:
    """Delete what an interrupted write left in ``root``; complete folders stay."""
    for path in root.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def unwritable_reason(path: Path, *, is_folder: bool) -> str | None:
    """Return why ``path`` cannot be created or written to, or None.

    Missing folders are created to find out, and removed again: permissions do not tell of a read-only file system, of
    one that takes no folders, or of a name that is too long. Files are not touched.
    """
    try:
        return _unwritable_reason(path, is_folder=is_folder) or _uncreatable_reason(path if is_folder else path.parent)
    except OSError as error:  # a folder above may not be entered, or a name is too long
        return f"{path}: {error.strerror or error}"


def _unwritable_reason(path: Path, *, is_folder: bool) -> str | None:
    if path.exists() and path.is_dir() != is_folder:
        return f"{path} is a {'file' if is_folder else 'folder'}"
    nearest = path if path.exists() else path.parent
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if nearest != path and not nearest.is_dir():
        return f"{nearest} is not a folder"
    if not os.access(nearest, os.W_OK | (os.X_OK if nearest.is_dir() else 0)):
        return f"no permission to write to {nearest}"
    return None


def _uncreatable_reason(folder: Path) -> str | None:
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    created: list[Path] = []
    try:
        for path in reversed(missing):
            try:
                path.mkdir()
            except FileExistsError:  # another run has made it meanwhile, or it is ``..``
                continue
            except OSError as error:
                return f"{path} cannot be created: {error.strerror or error}"
            created.append(path)
    finally:
        for path in reversed(created):
            with contextlib.suppress(OSError):  # not empty: another run writes there
                path.rmdir()
    return None
