"""``graphstep train`` on a CUDA device: graphs equal eager training, and a resumed run equals the uninterrupted one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from graphstep.cli.train import run

pytestmark = pytest.mark.gpu

SMALL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "32"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "12", "--eval-iters", "1"),
    *("--log-interval", "4", "--device", "cuda", "--mock-data", "--cuda-graph-warmup-steps", "2"),
)
FULL = ("--cuda-graph-impl", "full_iteration", "--no-check-for-nan-in-loss-and-grad")
LOCAL = ("--cuda-graph-impl", "local")
TE = ("--cuda-graph-impl", "transformer_engine")


def output_of(*argv: str) -> str:
    text = io.StringIO()
    assert run([*SMALL, *argv], console=Console(file=text, width=200)) == 0, text.getvalue()
    return text.getvalue()


@pytest.mark.parametrize("precision", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("impl", [FULL, LOCAL, TE], ids=["full_iteration", "local", "transformer_engine"])
def test_graphed_training_equals_eager_training(impl: tuple[str, ...], precision: tuple[str, ...]) -> None:
    output = output_of(*impl, *precision, "--compare-with-eager", "10")
    assert "equal: all losses of 10 steps and all weights after them" in output
    assert "x as fast" in output
    assert "MiB allocated" in output


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    output_of(*FULL, "--save", str(whole), "--save-interval", "6")
    output_of(*FULL, "--save", str(again), "--load", str(whole / "iter_0000006"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (folder / "iter_0000012" / name for folder in (whole, again))
        assert first.read_bytes() == second.read_bytes()
