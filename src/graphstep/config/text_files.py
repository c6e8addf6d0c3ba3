"""Read text files to the byte, and replace them in one step."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

from graphstep.errors import ConfigError, Problem


def read_text(path: str) -> str:
    """Return a file as text; line ends and bytes that are no UTF-8 survive :func:`replace_file`.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return decoded(file.read())
    except OSError as error:
        what = f"cannot read the file: {error.strerror or error}"
        raise ConfigError(Problem("file-unreadable", what, path, "name a file that can be read")) from error


def decoded(content: bytes) -> str:
    """Return bytes as text; :func:`encoded` gives them back."""
    return content.decode("utf-8", "surrogateescape")


def encoded(text: str) -> bytes:
    """Return text as bytes."""
    return text.encode("utf-8", "surrogateescape")


def replace_file(path: str, text: str) -> None:
    """Write a file so that others see the old or the new content, never a part; permissions and links stay.

    The new content is written to a file beside it, forced to disk, and renamed. After an error the old file is
    untouched and the other one is gone.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(target)}.", dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(encoded(text))
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        _force_folder(folder)
    except OSError as error:
        what = f"cannot replace the file: {error.strerror or error}"
        raise ConfigError(Problem("file-unwritable", what, path, "make its folder writable")) from error


def _force_folder(folder: str) -> None:
    """Force the new name to disk, where folders can be opened."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
