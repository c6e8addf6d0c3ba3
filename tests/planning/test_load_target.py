"""Steps of one's own by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from graphstep.errors import UserInputError
from graphstep.planning.load_target import load_target

GOOD = """
import torch
from helper import WIDTH

def setup():
    model = torch.nn.Linear(WIDTH, 1)
    return (lambda: model(torch.ones(1, WIDTH)).sum().backward()), model

def wrong():
    return torch.nn.Linear(1, 1)

def failing():
    raise RuntimeError("no data")
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(GOOD, encoding="utf-8")
    (tmp_path / "helper.py").write_text("WIDTH = 3\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_and_its_neighbours_are_found(files: Path) -> None:
    step, model = load_target(f"{files / 'mine.py'}:setup")
    assert isinstance(model, nn.Linear)
    step()
    assert model.weight.grad is not None


def test_a_module_is_found_in_this_folder() -> None:
    _, model = load_target("mine:setup")
    assert isinstance(model, nn.Linear)


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("mine.py:set_up", "target-name"),
        ("mine.py:wrong", "target-result"),
        ("mine.py:failing", "target-failed"),
        ("missing.py:setup", "target-file"),
        ("no.such.module:setup", "target-import"),
        ("broken.py:setup", "target-import"),
    ],
)
def test_what_is_wrong_is_named(word: str, code: str) -> None:
    with pytest.raises(UserInputError) as caught:
        load_target(word)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert problem.fix
    if word.endswith("set_up"):
        assert "setup" in problem.fix
