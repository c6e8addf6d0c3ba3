"""Runs the Python blocks of a page, one after another, and tells what they should print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
_BLOCKS = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def text_of(name: str) -> str:
    """The text of a page in docs."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def run_blocks(name: str) -> tuple[int, list[str]]:
    """Run them in one namespace. Returns how many there are, and the lines that they say they print."""
    torch.manual_seed(0)
    blocks = _BLOCKS.findall(text_of(name))
    names: dict[str, Any] = {"__name__": name.removesuffix(".md").replace("-", "_")}
    for code in blocks:
        exec(compile(code, name, "exec", dont_inherit=True), names)
    return len(blocks), [text for code in blocks for text in _PRINTED.findall(code)]
