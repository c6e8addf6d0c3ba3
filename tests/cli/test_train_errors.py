"""Bad input of ``graphstep train``: exit code 2, what, where and how to fix it, and nothing created."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graphstep.cli.main import main
from graphstep.training.data import IndexedDatasetWriter

TINY = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
    *("--micro-batch-size", "2", "--train-iters", "2", "--eval-iters", "0", "--device", "cpu"),
)
MOCK = (*TINY, "--mock-data")
OUTPUTS = ("--save", "out/checkpoints", "--log-jsonl", "out/log.jsonl", "--tensorboard-dir", "out/board")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder: Path) -> list[tuple[str, int]]:
    # The cache of tokenised text is no output of a run: it may stay.
    kept = (p for p in folder.rglob("*") if p.relative_to(folder).parts[0] != "cached")
    return sorted((str(p.relative_to(folder)), p.stat().st_mtime_ns) for p in kept)


def refused(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Run, require a clean refusal, and return the message."""
    before = listing(Path.cwd())
    capsys.readouterr()
    code = main(["train", *argv])
    output = capsys.readouterr()
    assert code == 2, output.err
    assert "fix:" in output.err
    assert "Traceback" not in output.err
    assert listing(Path.cwd()) == before, "something was created or changed"
    return output.err


def trained(*argv: str) -> None:
    assert main(["train", *MOCK, "--save", "run", *argv]) == 0


def test_unknown_options_and_contradictions_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused((*MOCK, *OUTPUTS, "--hiden-size", "3", "--global-batch-size", "3", "--lr", "much"), capsys)
    assert "3 problems" in text
    assert all(option in text for option in ("--hiden-size", "--global-batch-size", "--lr"))


LOCAL = ("--cuda-graph-impl", "local")


@pytest.mark.parametrize("in_file", [False, True])
def test_a_refusal_says_how_old_options_were_read(in_file: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cuda-graph-scope", "full_iteration", "--cuda-graph-on-mismatch", "eager", "--num-layers", "1")
    if in_file:
        Path("run.toml").write_text('cuda_graph_scope = ["full_iteration"]\n')
        words = ("--config", "run.toml", *words[2:])
    lines = refused((*MOCK, *LOCAL, *words), capsys).splitlines()
    assert lines[:3] == [
        "note: --cuda-graph-scope is the old name of --cuda-graph-modules (leave it out)",
        "note: module full_iteration is the old form of --cuda-graph-impl full_iteration "
        "(write --cuda-graph-impl full_iteration)",
        "graphstep: 1 problem",
    ]
    assert "[full-iteration-nan-check]" in lines[3]


def test_a_refusal_keeps_other_notices_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused((*MOCK, "--cuda-graph-modules", "attn", "--lr", "1e-4", "--lr", "-1"), capsys)
    assert text.startswith("graphstep: 1 problem\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--num-experts 4 --moe-router-topk 5", "topk-exceeds-experts"),
        ("--num-experts 1", "topk-exceeds-one-expert"),
        ("--num-experts 4 --cuda-graph-modules moe --moe-expert-capacity-factor 1", "moe-needs-static-shapes"),
        ("--num-experts 4 --cuda-graph-modules mlp", "mlp-needs-dense-layers"),
        ("--num-experts 4", "whole-layers-need-static-experts"),
        ("--num-layers 2 --hybrid-layer-pattern MX", "hybrid-layer-pattern-range"),
        ("--num-layers 2 --hybrid-layer-pattern *G", "not-available-pattern-letter"),
        ("--num-layers 2 --hybrid-layer-pattern *E", "pattern-needs-experts"),
        ("--num-layers 2 --hybrid-layer-pattern M*", "mamba-head-dim-divides"),
        ("--num-layers 2 --hybrid-layer-pattern M* --mamba-head-dim 8", "mamba-groups-divide-heads"),
        ("--num-layers 2 --cuda-graph-modules attn mamba", "module-in-no-layer"),
        ("--num-experts 4 --moe-grouped-gemm", "moe-grouped-gemm-bias"),
    ],
)
def test_layers_that_do_not_fit(words: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused((*MOCK, *OUTPUTS, *LOCAL, *words.split()), capsys)
    assert f"[{code}]" in text


def make_missing() -> tuple[str, ...]:
    return ("--data-path", "nowhere.txt")


def make_empty() -> tuple[str, ...]:
    Path("empty.txt").write_text("")
    return ("--data-path", "empty.txt", "--data-cache-path", "cached")


def make_truncated_index() -> tuple[str, ...]:
    with IndexedDatasetWriter("tokens", dtype=np.uint16) as writer:
        writer.add_document(np.arange(200))
    index = Path("tokens.idx")
    index.write_bytes(index.read_bytes()[:-9])
    return ("--data-path", "tokens")


def make_tokens_outside_the_vocabulary() -> tuple[str, ...]:
    with IndexedDatasetWriter("tokens", dtype=np.uint16) as writer:
        writer.add_document(np.arange(2000))
    return ("--data-path", "tokens")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (make_missing, "nowhere.txt"),
        (make_empty, "empty.txt"),
        (make_truncated_index, "tokens.idx"),
        (make_tokens_outside_the_vocabulary, "vocabulary"),
    ],
)
def test_data(make: Callable[[], tuple[str, ...]], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused((*TINY, *OUTPUTS, *make()), capsys)


def test_a_sequence_longer_than_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("short.txt").write_text("a few words")
    argv = (*TINY, *OUTPUTS, "--data-path", "short.txt", "--data-cache-path", "cached", "--seq-length", "64")
    assert "--seq-length 64 needs 65" in refused(argv, capsys)


def test_a_vocabulary_smaller_than_the_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused((*MOCK, *OUTPUTS, "--vocab-size", "100"), capsys)
    assert "only 128: --vocab-size rounded up to a multiple of 128" in text


def test_no_cuda_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device" in refused((*MOCK, *OUTPUTS, "--device", "cuda"), capsys)


def test_outputs_that_cannot_be_written_are_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    Path("folder").mkdir()
    argv = ("--save", "file", "--log-jsonl", "folder", "--tensorboard-dir", "file/below")
    text = refused((*MOCK, *argv), capsys)
    assert "3 problems" in text
    assert all(option in text for option in ("--save", "--log-jsonl", "--tensorboard-dir"))


@pytest.mark.parametrize("option", ["--save", "--log-jsonl", "--tensorboard-dir"])
def test_a_folder_that_no_look_shows_to_be_impossible(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"missing/{'a' * 300}/file"
    text = refused((*MOCK, option, path), capsys)
    assert "cannot be created: File name too long [output-path]" in text
    assert f"where: {option}" in text


def test_every_folder_made_to_find_out_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("there").mkdir()
    # What comes after the look at folders fails: nothing is left of them.
    assert "nowhere.txt" in refused((*TINY, "--save", "one/two/three", "--data-path", "nowhere.txt"), capsys)
    assert "nowhere.txt" in refused((*TINY, "--save", "there", "--data-path", "nowhere.txt"), capsys)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that takes no folders")
def test_a_file_system_that_takes_no_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert "output-path" in refused((*MOCK, "--save", "/proc/graphstep/run"), capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(capsys: pytest.CaptureFixture[str]) -> None:
    Path("locked").mkdir(mode=0o500)
    assert "no permission" in refused((*MOCK, "--save", "locked/run"), capsys)


def test_problems_of_folders_and_data_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("x")
    words = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "none.json")
    text = refused((*TINY, "--save", "file", "--load", "nowhere", "--data-path", "nothing.txt", *words), capsys)
    assert "4 problems" in text
    assert all(code in text for code in ("output-path", "checkpoint-missing", "tokenizer-missing", "data-missing"))


@pytest.mark.parametrize(
    "size",
    [
        ("--hidden-size", str(2**60)),
        ("--vocab-size", str(2**62)),
        ("--ffn-hidden-size", str(2**62)),
        ("--seq-length", str(2**62)),
        ("--micro-batch-size", str(2**62)),
    ],
    ids=lambda size: size[0],
)
def test_sizes_that_no_memory_holds(size: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "out-of-memory" in refused((*MOCK, *size), capsys)


@pytest.mark.parametrize("option", ["--data-path", "--load", "--save", "--log-jsonl", "--tensorboard-dir"])
@pytest.mark.parametrize("name", ["a" * 300, "closed/inside"], ids=["too-long", "closed"])
def test_paths_that_cannot_be_looked_at(option: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    closed = Path("closed")
    closed.mkdir(mode=0o000)
    try:
        if name.startswith("closed") and os.access(closed, os.R_OK):
            pytest.skip("this user may read every folder")
        text = refused((*TINY, option, name), capsys)
    finally:
        closed.chmod(0o700)
    assert option in text or name in text


def test_a_tokenizer_that_cannot_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "a" * 300)
    assert "tokenizer-missing" in refused((*MOCK, *words), capsys)


def test_tensorboard_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    assert "graphstep[report]" in refused((*MOCK, *OUTPUTS), capsys)


def test_no_checkpoint_to_load(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert "does not exist" in refused((*MOCK, *OUTPUTS, "--load", "nowhere"), capsys)
    assert "holds no checkpoint" in refused((*MOCK, *OUTPUTS, "--load", "empty"), capsys)


def test_a_checkpoint_of_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    argv = (*MOCK, "--load", "run", "--save", "run", "--train-iters", "4")
    text = refused((*argv, "--hidden-size", "32"), capsys)
    assert "1 problem\n" in text
    assert "--hidden-size is 32 here and 16 in the checkpoint" in text
    assert "fix:   use --hidden-size 16" in text
    text = refused((*argv, "--num-attention-heads", "4", "--bf16"), capsys)
    assert "2 problems\n" in text
    assert "--num-attention-heads is 4 here and 2 in the checkpoint" in text
    assert "--bf16 is on here and off in the checkpoint" in text
    assert "seed" in refused((*argv, "--seed", "7"), capsys)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
def test_a_damaged_checkpoint(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    path = Path("run", "iter_0000002", name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert name in refused((*MOCK, "--load", "run", "--save", "run", "--train-iters", "4"), capsys)


def test_determinism_on_cuda_needs_the_workspace_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphstep.config import TrainingConfig
    from graphstep.errors import UserInputError
    from graphstep.training.setup import preflight

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    config = TrainingConfig(deterministic_mode=True)
    with pytest.raises(UserInputError, match="export CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        preflight(config, {})
    device, _ = preflight(config, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert device.type == "cuda"
