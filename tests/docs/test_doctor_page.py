"""docs/doctor.md runs, and its example has the findings that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, run_blocks, text_of

from graphstep.cli.main import main

PAGE = text_of("doctor.md")
EXAMPLE = "examples/step_to_mend.py"


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    number, expected = run_blocks("doctor.md")
    assert capsys.readouterr().out.splitlines() == expected
    assert number == 2


def test_the_example_has_what_the_page_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["doctor", f"{EXAMPLE}:train_step", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    lines = Path(EXAMPLE).read_text(encoding="utf-8").splitlines()
    texts = {finding["code"]: lines[finding["line"] - 1].strip() for finding in found["findings"]}
    assert texts == {
        "GS-Y001": "self.num_tokens += ids.numel()",
        "GS-T002": "positions = torch.arange(ids.shape[1])",
        "GS-S002": "loss = F.cross_entropy(logits[mask], ids[mask])",
        "GS-O001": "optimizer.step()",
        "GS-H001": "return loss.item()",
    }
    (line,) = {finding["line"] for finding in found["findings"] if finding["code"] == "GS-T002"}
    assert f"GS-T002   {EXAMPLE}:{line} " in PAGE
    assert f"{len(texts)} errors, 0 warnings, 0 notes" in PAGE


def test_the_options_of_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    shown = capsys.readouterr().out
    of_others = {"--num-layers"}
    assert [o for o in set(re.findall(r"`(--[a-z][\w-]+)", PAGE)) - of_others if o not in shown] == []
