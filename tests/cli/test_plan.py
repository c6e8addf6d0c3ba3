"""``graphstep plan`` from the command line to the recommendation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphstep.cli.main import main
from graphstep.cli.plan_options import read_plan_options, size_of
from graphstep.errors import ConfigError

TINY = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
    *("--micro-batch-size", "2", "--device", "cpu", "--mock-data"),
)
TARGET = """
import torch

def setup():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    return step, model
"""


def test_it_recommends_switches_and_shows_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY, "--measure"]) == 0
    output = capsys.readouterr().out
    assert "counted-operations" in output
    assert "predicted / measured" in output
    assert "recommended: full_iteration, optimizer" in output
    assert "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --optimizer-cuda-graph" in output


def test_data_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY, "--json", "--memory-budget", "1KiB", "--cuda-graph-impl", "local"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["budget_bytes"] == 1024
    assert plan["model"] == "counted-operations"
    assert plan["eager"]["num_launches"] > 50
    assert any(not each["fits"] for each in plan["candidates"])
    fitting = [each["name"] for each in plan["candidates"] if each["fits"]]
    assert plan["recommended"] in [*fitting, None]


def test_a_step_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(TARGET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "mine.py:setup", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    names = [each["name"] for each in plan["candidates"]]
    assert names == ["whole layers", "forward and backward", "whole step"]
    assert plan["candidates"][0]["regions"] == {"*": "layer"}
    assert plan["recommended"] == "whole step"
    assert main(["plan", "mine.py:setup", "--measure"]) == 2
    assert "captured by your own code" in capsys.readouterr().err


def test_wrong_words_are_answered_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan_options(["mine", "--memory-budget", "much", "--num-layers", "2"])
    assert [problem.code for problem in caught.value.problems] == [
        "memory-budget",
        "target-form",
        "target-and-options",
    ]


def test_wrong_options_of_train_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--num-layer", "2"]) == 2
    assert "--num-layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("1.5g", 3 * 2**29),
        ("64 kb", 2**16),
        ("1000", 1000),
        ("1TiB", 2**40),
        ("x", None),
        ("9" * 400, None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert size_of(text) == size


def test_the_help_names_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    output = "".join(capsys.readouterr().out.split())  # Long words are wrapped at their hyphens.
    for word in ("--memory-budget", "--measure", "--measure-all", "--json", "module:function", "--num-layers"):
        assert word in output


def test_a_step_that_fails_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(TARGET.replace("torch.ones(2, 4)", "torch.ones(2, 5)"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "mine.py:setup"]) == 2
    error = capsys.readouterr().err
    assert "the step of mine.py:setup raised RuntimeError" in error
    assert "mine.py:10 in step" in error
