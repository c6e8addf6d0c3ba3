"""docs/fp8.md runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fp8.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "fp8"}
    for code in BLOCKS:
        exec(compile(code, "fp8.md", "exec", dont_inherit=True), names)
    assert capsys.readouterr().out.splitlines() == [text for code in BLOCKS for text in PRINTED.findall(code)]
    assert len(BLOCKS) == 3
