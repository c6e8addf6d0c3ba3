"""Prints the section "Files" of docs/architecture.md: one line a file, from the first sentence of its docstring.

Usage: python scripts/list_files.py [--write]
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "graphstep"
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "## Files\n"


def first_sentence(path: Path) -> str:
    """The docstring's first sentence, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)])\. ", paragraph)[0].rstrip(".").replace("``", "`")


def section() -> str:
    """The whole section, heading included."""
    lines = [HEADING]
    folder = None
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda p: (p.parent.as_posix(), p.name)):
        if path.name == "__init__.py" and path.parent != PACKAGE:
            continue
        if path.parent != folder:
            folder = path.parent
            lines.append(f"\n**{folder.relative_to(ROOT / 'src').as_posix()}/**\n")
        lines.append(f"- `{path.name}`: {first_sentence(path)}")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the section brought up to date."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(HEADING)] + section()


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(section(), end="")
