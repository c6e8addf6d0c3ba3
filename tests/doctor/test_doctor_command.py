"""``graphstep doctor``: exit codes, forms of output, and what it says about bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.programs import CATALOGUE

from graphstep.cli.main import main
from graphstep.doctor.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
ITEM = CATALOGUE / "broken" / "item_in_forward.py"
CLOCK = CATALOGUE / "broken" / "timed_inside.py"
NOTE = CATALOGUE / "broken" / "lengths_in_place.py"
MLP = CATALOGUE / "right" / "mlp.py"


def written(folder: Path, text: str, name: str = "target.py") -> Path:
    path = folder / name
    path.write_text("import torch\nfrom torch import nn\n\nlayer = nn.Linear(4, 4)\n" + text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("path", "options", "code"),
    [
        (MLP, [], 0),
        (ITEM, [], 1),
        (CLOCK, [], 3),
        (NOTE, [], 0),
        (NOTE, ["--fail-on", "note"], 3),
        (CLOCK, ["--fail-on=error"], 0),
        (ITEM, ["--fail-on", "never"], 0),
    ],
)
def test_exit_code_is_that_of_the_worst(path: Path, options: list[str], code: int) -> None:
    assert main(["doctor", f"{path}:step", *options]) == code


def test_table_names_line_reason_and_fix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(ROOT)
    assert main(["doctor", f"{ITEM.relative_to(ROOT)}:step"]) == 1
    shown = capsys.readouterr().out
    (line,) = (n for n, text in enumerate(ITEM.read_text().splitlines(), 1) if "expect" in text)
    assert "GS-H001" in shown
    assert f"broken/item_in_forward.py:{line}" in shown.replace("\n", "")
    assert "capture fails" in shown
    assert "keep the value in a tensor" in shown
    assert "1 error, 0 warnings, 0 notes in 3 runs" in shown


def test_json_is_the_only_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "batches = [torch.randn(8, 4)]\n\ndef step(x):\n    print('hello')\n    layer(x).sum()\n")
    assert main(["doctor", f"{path}:step", "--json"]) == 3
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "hello" in captured.err
    assert found["counts"] == {"error": 0, "warning": 1, "note": 0}
    (finding,) = found["findings"]
    assert (finding["code"], finding["line"], finding["function"]) == ("GS-Y005", 8, "step")
    assert finding["file"] == str(path)
    assert finding["text"] == "print('hello')"
    assert {"severity", "effect", "why", "fix", "operation", "part", "has_run"} <= finding.keys()


def sarif_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["doctor", *argv, "--sarif", "-"])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_sarif_points_into_the_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    log = sarif_of([f"{ITEM}:step"], capsys)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(KINDS)
    (result,) = run["results"]
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "GS-H001"
    assert result["level"] == "error"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == ITEM.relative_to(ROOT).as_posix()
    assert "expect" in ITEM.read_text().splitlines()[place["region"]["startLine"] - 1]


def test_sarif_of_a_variable_is_at_the_head_of_the_target(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code hosts refuse a file in which a result has no place."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (result,) = sarif_of([f"{MLP}:step"], capsys)["runs"][0]["results"]
    assert result["ruleId"] == "GS-E002"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == MLP.relative_to(ROOT).as_posix()
    assert place["region"] == {"startLine": 1}
    assert "CUDA_LAUNCH_BLOCKING=1" in result["message"]["text"]


def test_sarif_file_beside_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.sarif"
    assert main(["doctor", f"{ITEM}:step", "--sarif", str(path)]) == 1
    assert json.loads(path.read_text())["runs"][0]["results"]
    assert "GS-H001" in capsys.readouterr().out


def test_codes_print_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--codes"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is no target"),
        (["nowhere.py:step"], "there is no file nowhere.py"),
        (["nowhere.module:step"], "there is no module nowhere.module"),
        (["nowhere"], "there is no nowhere"),
        ([str(MLP)], "names no function"),
        ([f"{MLP}:stepp"], "did you mean step?"),
        ([f"{MLP}:model.0.weights"], "has no weights"),
        ([f"{MLP}:__doc__"], "cannot be called"),
        ([f"{MLP}:step", "--batches", "batch"], "has no batch"),
        ([f"{MLP}:step", "--runs", "1"], "a number from 2 to 1000"),
        ([f"{MLP}:step", "--fail-on", "fatal"], "expected one of error, warning, note, never"),
        ([f"{MLP}:step", "--sarf"], "did you mean --sarif?"),
        ([f"{MLP}:step", f"{ITEM}:step"], "there are two targets"),
        ([f"{MLP}:step", "--", "--num-layers", "2"], "there is a target, and there are options"),
        ([f"{MLP}:step", "--json", "--sarif", "-"], "both --json and --sarif print"),
        ([f"{MLP}:step", "--sarif", "/nowhere/found.sarif"], "there is no folder /nowhere"),
        ([f"{MLP}:step", "--sarif", str(ROOT)], "is a folder"),
        (["--", "--num-layer", "2"], "--num-layer"),
        (["json:dumps"], "takes arguments, and json has no batches"),
        ([str(ROOT)], "has no config.json"),
        ([f"{MLP}:stepp"], "mlp.py has no stepp"),
        (["torch.nn:Linear"], "is a class that is built with arguments"),
    ],
)
def test_bad_input_is_one_message(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


def test_failing_step_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "batches = [torch.randn(8, 3)]\n\ndef step(x):\n    layer(x).sum().backward()\n")
    assert main(["doctor", f"{path}:step"]) == 2
    shown = capsys.readouterr().err
    assert "RuntimeError: mat1 and mat2" in shown
    assert f"{path}:8 in step: layer(x).sum().backward()" in shown


def test_failing_import_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "print(1 / 0)\n")
    assert main(["doctor", f"{path}:step"]) == 2
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert f"{path}:5" in shown


def test_mistake_in_the_file_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "def step(x)\n    return x\n")
    assert main(["doctor", f"{path}:step"]) == 2
    assert f"where: {path}:5" in capsys.readouterr().err


def test_script_that_exits_is_told_about_the_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "raise SystemExit(0)\n")
    assert main(["doctor", f"{path}:step"]) == 2
    assert 'if __name__ == "__main__"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def step(x):\n    raise SystemExit(0)\n", "raised SystemExit"),
        ("def step(x):\n    yield layer(x)\n", "calling it runs none of it"),
        ("async def step(x):\n    layer(x)\n", "calling it runs none of it"),
        ("def step(x):\n    return None\n", "runs no operation of torch"),
        ("batches = []\n\ndef step(x):\n    layer(x)\n", "there is no batch"),
        ("batches = 3\n\ndef step(x):\n    layer(x)\n", "the batches are int 3"),
        ("from .layers import norm\n", "name the file as a module of its package"),
        (
            "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\n\ndef step(x):\n    raise Odd\n",
            "raised Odd",
        ),
    ],
)
def test_step_that_shows_nothing_is_no_clean_one(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "batches = [torch.randn(8, 4)]\n\n" + text)
    assert main(["doctor", f"{path}:step"]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


def test_script_reads_none_of_the_words_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.5)
rate = parser.parse_args().rate


def step():
    (layer.weight * rate).sum().backward()
"""
    path = written(tmp_path, text)
    words = ["doctor", f"{path}:step"]
    monkeypatch.setattr("sys.argv", ["graphstep", *words])
    assert main(words) == 0
    assert sys.argv == ["graphstep", *words]


def test_step_that_wants_a_gpu_is_told_how_to_do_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "batches = [torch.randn(8, 4)]\n\ndef step(x):\n    raise RuntimeError('No CUDA GPUs are available')\n"
    assert main(["doctor", f"{written(tmp_path, text)}:step"]) == 2
    assert "torch.cuda.is_available()" in capsys.readouterr().err


def test_other_name_of_the_batches(tmp_path: Path) -> None:
    text = "loader = [torch.randn(8, 4)]\n\ndef step(x):\n    layer(x).sum().item()\n"
    path = written(tmp_path, text)
    assert main(["doctor", f"{path}:step", "--batches", "loader"]) == 1


def test_module_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "batches = [torch.randn(8, 4)]\n\ndef step(x):\n    layer(x).sum().item()\n", "doctored.py")
    assert main(["doctor", "doctored:step"]) == 1


def test_options_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    assert main(["doctor", "--json", "--", *small.split()]) == 0
    assert json.loads(capsys.readouterr().out)["num_operations"] > 100


def test_options_of_train_take_one_thread_and_no_compiler() -> None:
    """On a busy machine threads that wait for each other make it many times slower; the compiler takes seconds."""
    code = """
import sys
import torch
from graphstep.doctor.examination import examine
from graphstep.doctor.train_options import options_target

torch.set_num_threads(2)
target = options_target(["--num-layers=1", "--hidden-size=16", "--num-attention-heads=2"], {})
step, seen = target.step, set()
target.step = lambda tokens, labels: (seen.add(torch.get_num_threads()), step(tokens, labels))
examine(target)
print(seen, torch.get_num_threads(), "torch._dynamo" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split("\n")[-2] == "{1} 2 False"


@pytest.mark.skipif("transformers" not in os.listdir(Path(pytest.__file__).parents[1]), reason="needs transformers")
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3", "mamba2"])
def test_model_of_hugging_face(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    main(["doctor", str(tmp_path), "--json", "--runs", "2"])
    found = json.loads(capsys.readouterr().out)
    assert "ForCausalLM of" in found["target"]
    assert found["num_operations"] > 300
    assert all("site-packages" in finding["file"] for finding in found["findings"])


def test_model_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    assert main(["doctor", str(tmp_path)]) == 2
    assert "transformers cannot build the model" in capsys.readouterr().err
