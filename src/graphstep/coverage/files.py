"""Documents and traces in files, by the ending of their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphstep.coverage.page import html_page
from graphstep.errors import Problem, UserInputError


def document_kind(path: str | Path) -> str | None:
    """``html`` or ``json``, by the ending of a name; None for another one."""
    ending = Path(path).suffix.lower()
    return {".html": "html", ".htm": "html", ".json": "json"}.get(ending)


def write_document(document: Mapping[str, Any], path: str | Path) -> None:
    """Write a document as a page (``.html``) or as plain data (``.json``); a file of that name is replaced.

    Raises:
        UserInputError: another ending, or the file cannot be written.
    """
    kind = document_kind(path)
    if kind is None:
        raise UserInputError(
            Problem("report-ending", f"{path} is neither .html nor .json", str(path), "give it one of these endings")
        )
    write_text(path, html_page(document) if kind == "html" else json.dumps(document, indent=1))


def write_text(path: str | Path, text: str) -> None:
    """Write a file whose name a user gave; folders on the way to it are made.

    Raises:
        UserInputError: it cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Names of files on a command line, and of modules, may hold what no UTF-8 has: shown as an escape.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserInputError(
            Problem(
                "report-path",
                f"{path} cannot be written: {error.strerror or error}",
                str(path),
                "name a file in a folder that can be written to",
            )
        ) from error
