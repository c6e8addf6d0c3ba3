"""docs/local-graphs.md: its Python runs and prints what the page says, and its table has every reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphstep.capture.reasons import EagerReason
from graphstep.config import CapturePolicy, CudaGraphConfig, CudaGraphImpl, MismatchPolicy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "local-graphs.md").read_text(encoding="utf-8")
FIRST, *OTHERS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "local-graphs.md", "exec", dont_inherit=True), names)


@pytest.mark.parametrize("code", ["", *OTHERS], ids=lambda code: code.split("\n", maxsplit=1)[0])
def test_python(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block runs after the first one, and prints what its comments say."""
    if "torch.distributed" in code and not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "local_graphs"}
    run(FIRST, names)
    run(code, names)
    expected = [text for block in (FIRST, code) for text in PRINTED.findall(block)]
    assert capsys.readouterr().out.splitlines() == expected
    assert expected


def test_the_table_has_every_reason() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| `[a-z]+(-[a-z]+)*` \|.*\|.*\|", line)]
    assert rows == [f"| `{reason.code}` | {reason} | {reason.advice} |" for reason in EagerReason]


def test_defaults_and_words_are_as_the_page_says() -> None:
    config = CudaGraphConfig(impl=CudaGraphImpl.local)
    assert f"| `{config.policy}` (default) |" in PAGE
    assert f"| `{config.on_mismatch}` (default) |" in PAGE
    for word in (*CapturePolicy, *MismatchPolicy):
        assert re.search(rf"^\| `{word}`( \(default\))? \|", PAGE, re.MULTILINE), word
    assert f"`capture_after` steps ({config.capture_after})" in PAGE
    assert f"`max_signatures` ({config.max_signatures})" in PAGE
    assert f"(`warmup_steps`, {config.warmup_steps} of each region)" in PAGE
