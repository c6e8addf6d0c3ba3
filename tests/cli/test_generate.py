"""``graphstep generate`` from the command line to the table at the end."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.inference.hugging_face import build, save, write_tokenizer

from graphstep.cli.generate_options import read_generate_options
from graphstep.cli.loaded_engine import memory_needed
from graphstep.cli.main import main
from graphstep.cli.serve_options import read_serve_options
from graphstep.config import InferenceCudaGraphScope
from graphstep.errors import ConfigError, UserInputError

SMALL = shlex.split(
    "--inference-dynamic-batching-max-requests 2 --inference-dynamic-batching-max-tokens 16 "
    "--inference-dynamic-batching-block-size 8 --device cpu"
)
LOCAL = ("--cuda-graph-impl", "local", "--inference-dynamic-batching-num-cuda-graphs", "2")
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2"
    words = f"train {sizes} --train-iters 2 --eval-iters 0 --mock-data --device cpu --save {folder}"
    assert main(shlex.split(words)) == 0
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tokenizer(folder)
    return save(build("llama", vocab_size=270, eos_token_id=1), folder)


def rows(table: str) -> dict[str, str]:
    cells = [line.split("│") for line in table.splitlines() if line.startswith("│")]
    return {each[1].strip(): each[2].strip() for each in cells}


def generate(folder: Path, *argv: str, code: int = 0) -> None:
    assert main(["generate", "--model", str(folder), *SMALL, *argv]) == code


def as_json(folder: Path, capsys: Output, *argv: str) -> list[dict[str, Any]]:
    generate(folder, "--json", *argv)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_graphs_give_the_same_text_and_are_counted(scope: str, checkpoint: Path, capsys: Output) -> None:
    words = ("--prompt", "one", "two more", "--max-new-tokens", "9", "--ignore-eos")
    eager = as_json(checkpoint, capsys, *words)
    local = (*LOCAL, "--inference-cuda-graph-scope", scope)
    assert as_json(checkpoint, capsys, *words, *local) == eager
    assert [row["prompt"] for row in eager] == ["one", "two more"]
    assert [len(row["tokens"]) for row in eager] == [9, 9]
    assert {row["finish_reason"] for row in eager} == {"length"}
    assert all(token < 257 for row in eager for token in row["tokens"])
    generate(checkpoint, *words, *local)
    table = rows(capsys.readouterr().err)
    assert table["graph hits"].startswith("9 of 9 steps (100 %)")
    assert table["prompts"] == "2, 11 tokens"
    assert "tokens/s" in table["generated"]
    assert table["generated"].startswith("18 tokens in")


def test_places_and_shapes_are_for_the_prompts_there_are(checkpoint: Path, capsys: Output) -> None:
    words = ["generate", "--model", str(checkpoint), "--device", "cpu", "--max-new-tokens", "5", "--ignore-eos"]
    words += ["--cuda-graph-impl", "local", "--inference-cuda-graph-scope", "block"]
    tables = []
    for more in (["--prompt", "one"], ["--prompt", "one", "--lazy-cuda-graphs"], ["--prompt", "one", "two", "three"]):
        assert main([*words, *more]) == 0
        tables.append(rows(capsys.readouterr().err))
    assert tables[0]["graphs"].startswith("6 of 6 shapes")
    assert tables[1]["graphs"].startswith("2 of 6 shapes"), "the prompt, and one token at a time"
    assert tables[2]["graphs"].startswith("22 of 22 shapes")
    assert tables[0]["graph memory"].endswith("MiB")
    assert tables[0]["cache"].startswith("2 blocks of 256 tokens")
    assert all(table["graph hits"].startswith("5 of 5 steps") for table in tables)


def test_text_of_one_prompt_alone(llama: Path, capsys: Output) -> None:
    words = ("--prompt", "hello there", "--max-new-tokens", "6", "--temperature", "0", "--ignore-eos")
    [row] = as_json(llama, capsys, *words)
    generate(llama, *words)
    shown = capsys.readouterr()
    assert shown.out == row["text"] + "\n"
    assert rows(shown.err)["graph hits"].startswith("none of 6 steps")


def test_texts_of_several_prompts_come_in_their_order(llama: Path, capsys: Output) -> None:
    words = ("--prompt", "hello", "there", "world", "--max-new-tokens", "3", "--ignore-eos")
    found = as_json(llama, capsys, *words)
    generate(llama, *words)
    expected = [f">>> {row['prompt']}\n{row['text']}\n" for row in found]
    assert capsys.readouterr().out == "\n".join(expected)


def test_greedy_tokens_are_those_of_transformers(llama: Path, capsys: Output) -> None:
    import transformers

    theirs = transformers.LlamaForCausalLM.from_pretrained(llama)
    [row] = as_json(llama, capsys, "--prompt", "hello world", "--max-new-tokens", "8", "--temperature", "0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(llama / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("hello world")])
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert row["tokens"] == expected[0, ids.shape[1] :].tolist()


def test_a_seed_decides_and_each_prompt_has_its_own(checkpoint: Path, capsys: Output) -> None:
    words = ("--max-new-tokens", "8", "--ignore-eos", "--prompt", "same")
    first, second = as_json(checkpoint, capsys, *words, "same")
    assert first["tokens"] != second["tokens"]
    assert as_json(checkpoint, capsys, *words, "--seed", "1235") == [second]


def test_it_stops_at_the_end_of_a_text(llama: Path, capsys: Output, tmp_path: Path) -> None:
    words = ("--prompt", "hello", "--temperature", "0", "--max-new-tokens", "6")
    [row] = as_json(llama, capsys, *words, "--ignore-eos")
    last = row["tokens"][3]
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [last]}))
    [stopped] = as_json(tmp_path, capsys, *words)
    end = row["tokens"].index(last) + 1
    assert stopped["tokens"] == row["tokens"][:end]
    assert stopped["finish_reason"] == "stop"
    assert row["text"].startswith(stopped["text"])


def test_prompts_of_a_file_and_of_standard_input(
    checkpoint: Path, capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"one\r\n\n  two\n"
    (tmp_path / "prompts.txt").write_bytes(content)
    words = ("--max-new-tokens", "2")
    of_file = as_json(checkpoint, capsys, *words, "--prompt-file", str(tmp_path / "prompts.txt"))
    assert [row["prompt"] for row in of_file] == ["one", "  two"]
    for source in ((), ("--prompt-file", "-")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert as_json(checkpoint, capsys, *words, *source) == of_file


def test_seeds_go_on_at_the_first_behind_the_last(checkpoint: Path, capsys: Output) -> None:
    words = ("--max-new-tokens", "8", "--ignore-eos", "--prompt", "same")
    both = as_json(checkpoint, capsys, *words, "same", "--seed", str(2**63 - 1))
    assert as_json(checkpoint, capsys, *words, "--seed", str(2**63 - 1)) == both[:1]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_prompts_that_cannot_be_written(
    encoding: str, llama: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters that the terminal does not have, and bytes of a command line that are no text."""
    for folder in (llama, checkpoint):
        content = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding=encoding))
        generate(folder, "--prompt", "naïve", "\udcff", "--max-new-tokens", "2")
        sys.stdout.flush()
        said = content.getvalue().decode(encoding)
        assert ("naïve" if encoding == "utf-8" else "na?ve") in said
        assert ">>> ?\n" in said


def message(capsys: Output) -> str:
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("graphstep: ")
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ("--prompt a --inference-max-seq-length 99", "positions for 32"),
        (f"--prompt {'a' * 40} b", "prompt 1: 40 tokens leave no room"),
        ("--prompt-file nowhere.txt", "No such file"),
        ("--prompt a --tokenizer-model nowhere.json", "No such file"),
        ("--prompt a --num-speculative-tokens 2", "guessed ahead"),
        ("--prompt a --inference-dynamic-batching-buffer-size-gb 0.000001", "hold no block"),
    ],
)
def test_bad_input_is_one_message(argv: str, what: str, checkpoint: Path, capsys: Output) -> None:
    generate(checkpoint, *shlex.split(argv), code=2)
    assert what in message(capsys)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
        ValueError("array is too big"),
    ],
)
def test_too_little_memory_is_one_message(error: Exception) -> None:
    with pytest.raises(UserInputError, match="not enough memory for this model and cache"), memory_needed():
        raise error


def test_other_errors_are_not_about_memory() -> None:
    with pytest.raises(ValueError, match="another"), memory_needed():
        raise ValueError("another")


def test_a_folder_that_is_not_there(capsys: Output) -> None:
    generate(Path("nowhere"), "--prompt", "a", code=2)
    assert "nowhere does not exist" in message(capsys)


def test_a_file_that_is_no_text(checkpoint: Path, capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    for content, what in ((b"\xff\xfe\x00", "not UTF-8"), (b" \n\n", "there are no prompts")):
        path.write_bytes(content)
        generate(checkpoint, "--prompt-file", str(path), code=2)
        assert what in message(capsys)


def test_a_tokenizer_that_is_larger_than_the_model(capsys: Output, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    save(build("llama"), tmp_path)
    capsys.readouterr()  # the progress of the other library
    generate(tmp_path, "--prompt", "a", code=2)
    assert "the tokenizer has 270 tokens, and the model 61" in message(capsys)


def test_logits_that_are_not_finite(capsys: Output, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model = build("llama", vocab_size=270)
    model.lm_head.weight.data.fill_(float("nan"))
    save(model, tmp_path)
    generate(tmp_path, "--prompt", "a", code=2)
    assert "not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ("", "--model says"),
        ("--model x --prompt a --prompt-file b", "of which one can be"),
        ("--model x --temperature -1 --top-p 0 --top-k=-3", "--top-k must be"),
        ("--model x --cuda-graph-impl full_iteration", "one of none, local"),
        ("--model x --lr 1", "graphstep generate --help"),
        ("--model x --inference-cuda-graph-scope block", "local makes inference graphs"),
        ("--model x --max-new-tokens 0", "above 0"),
        ("--model x --temperature 1e300", "--temperature must be 0 to 1e+06"),
    ],
)
def test_options_that_cannot_be(argv: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_generate_options(shlex.split(argv), {})
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "scope", "is_required"),
    [
        ("", "none", True),
        ("--cuda-graph-impl local", "layer", True),
        ("--cuda-graph-impl local --inference-cuda-graph-scope block --cuda-graph-policy auto", "block", False),
        ("--cuda-graph-impl local --cuda-graph-policy off", "none", False),
    ],
)
def test_what_is_captured(argv: str, scope: str, is_required: bool) -> None:
    options = read_generate_options(["--model", "x", *shlex.split(argv)], {})
    assert options.scope is InferenceCudaGraphScope(scope)
    assert options.is_required is is_required


@pytest.mark.parametrize("read", [read_generate_options, read_serve_options])
def test_laziness_without_graphs_is_noticed(read: Callable[..., Any]) -> None:
    words = ["--model", "x", "--lazy-cuda-graphs"]
    assert [notice.code for notice in read(words, {}).notices] == ["lazy-without-graphs"]
    options = read([*words, "--cuda-graph-impl", "local"], {})
    assert not options.notices
    assert options.lazy_cuda_graphs


def test_wrong_options_are_answered_before_torch_is_loaded() -> None:
    code = "import sys; from graphstep.cli.main import main; main(['generate']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
