"""``graphstep advise``: every recommendation is a command line that parses and obeys the rules."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys

import pytest

from graphstep.cli import main as cli
from graphstep.cli.advise import command_line
from graphstep.config import from_argv
from graphstep.config.advice import ADVICE, Facts, Scenario, advise

ALL_FACTS = [
    Facts(scenario=s, dynamic_shapes=d, pipeline=p, experts_parallel=e, drop_and_pad=c)
    for s, d, p, e, c in itertools.product(Scenario, (False, True), (1, 4), (1, 8), (False, True))
]


@pytest.mark.parametrize("scenario", Scenario)
def test_every_recommendation_is_valid_and_captures_something(scenario: Scenario) -> None:
    for facts in ALL_FACTS:
        if facts.scenario is scenario:
            config = from_argv(command_line(facts, advise(facts)), {})
            assert config.graphs.impl != "none"
            assert [notice for notice in config.notices if notice.what.startswith("--cuda-graph")] == []


def test_every_row_is_used_and_one_implementation_is_named() -> None:
    used = [row for facts in ALL_FACTS for row in advise(facts)]
    assert all(row in used for row in ADVICE)
    for facts in ALL_FACTS:
        assert command_line(facts, advise(facts)).count("--cuda-graph-impl") == 1


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--scenario dense", "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"),
        ("--scenario dense --dynamic-shapes", "--cuda-graph-impl local"),
        (
            "--scenario=moe",
            "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad "
            "--moe-grouped-gemm --disable-bias-linear --bf16",
        ),
        (
            "--scenario moe --experts-parallel 8",
            "--cuda-graph-impl local --cuda-graph-modules attn moe_router moe_preprocess "
            "--moe-token-dispatcher-type alltoall --moe-pad-experts-for-cuda-graph-inference",
        ),
        (
            "--scenario moe --experts-parallel 8 --pipeline 4",
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess "
            "--moe-token-dispatcher-type alltoall",
        ),
        ("--scenario hybrid", "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"),
        ("--scenario hybrid --dynamic-shapes", "--cuda-graph-impl local --cuda-graph-modules mamba attn"),
        (
            "--scenario inference",
            "--cuda-graph-impl local --inference-cuda-graph-scope block --decode-only-cuda-graphs",
        ),
        ("--scenario own-loop", "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"),
    ],
)
def test_scenarios(line: str, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", *line.split(), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert " ".join(word for row in content["options"] for word in row["argv"]) == options
    assert all(row["reason"] for row in content["options"])
    assert content["argv"][-len(options.split()) :] == options.split()


def test_the_text_has_options_reasons_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--scenario", "rl"]) == 0
    captured = capsys.readouterr()
    assert "--rl-persist-cuda-graphs\n    the graphs of the rollout are kept" in captured.out
    assert captured.out.splitlines()[-1].startswith("graphstep config --perform-rl-step --cuda-graph-impl local")
    assert "not available yet in graphstep train" in captured.err


@pytest.mark.parametrize(
    ("argv", "codes"),
    [
        ([], ["advise-scenario"]),
        (["--scenario", "mo"], ["unknown-choice"]),
        (["--scenario"], ["unknown-choice"]),
        (["--scenario", "moe", "--pipeline", "0", "--experts-parallel=x"], ["malformed-value", "malformed-value"]),
        (["--scenario", "moe", "--pipelines", "2"], ["unknown-option", "unknown-option"]),
        (["--json=1"], ["unknown-option"]),
    ],
)
def test_bad_input(argv: list[str], codes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.rsplit("[", 1)[1] for line in captured.err.splitlines() if line.startswith("- ")] == [
        f"{code}]" for code in codes
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_asks_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("tank\n2\ny\nmany\n2\n\n"))
    asked = Terminal()
    monkeypatch.setattr(sys, "stderr", asked)
    assert cli.main(["advise", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["scenario"] == "moe"
    assert content["facts"] == {"dynamic_shapes": True, "pipeline": 2, "experts_parallel": 1, "drop_and_pad": False}
    assert "expected one of dense" in asked.getvalue()
    assert "expected a whole number" in asked.getvalue()


def test_an_input_that_ends_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("1\n"))
    asked = Terminal()
    monkeypatch.setattr(sys, "stderr", asked)
    assert cli.main(["advise"]) == 2
    assert "[advise-scenario]" in asked.getvalue()


def test_torch_is_not_loaded() -> None:
    program = (
        "import sys\nimport graphstep.cli.main as m\n"
        "m.main(['advise', '--scenario', 'dense'])\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(("scenario", "is_missing"), [("inference", False), ("rl", True), ("dense", False)])
def test_reinforcement_learning_is_not_available_yet(
    scenario: str, is_missing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", "--scenario", scenario, "--json"]) == 0
    missing = json.loads(capsys.readouterr().out)["not_available_yet"]
    assert any("reinforcement learning" in text for text in missing) is is_missing
