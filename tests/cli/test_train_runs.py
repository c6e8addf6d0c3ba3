"""``graphstep train`` from the command line to the table at the end."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from graphstep.cli.main import main
from graphstep.cli.train import run
from graphstep.models.mlp import MLP
from graphstep.training import compare
from graphstep.training.compare import Difference
from graphstep.training.loop import Trainer

TINY = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
    *("--micro-batch-size", "2", "--train-iters", "6", "--eval-iters", "1", "--log-interval", "2"),
    *("--device", "cpu", "--mock-data"),
)
FULL = ("--cuda-graph-impl", "full_iteration", "--no-check-for-nan-in-loss-and-grad", "--cuda-graph-warmup-steps", "1")
LOCAL = ("--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1")
TE = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "1")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output_of(*argv: str, code: int = 0) -> str:
    text = io.StringIO()
    assert run([*TINY, *argv], console=Console(file=text, width=200)) == code
    return text.getvalue()


def row(output: str, name: str) -> str:
    """Return the second column of a row of the last table."""
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return next(cells[2].strip() for cells in reversed(rows) if cells[1].strip() == name)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
@pytest.mark.parametrize("impl", [FULL, LOCAL, TE], ids=["full_iteration", "local", "transformer_engine"])
def test_graphed_training_equals_eager_training(impl: tuple[str, ...], dropout: str, microbatches: int) -> None:
    output = output_of(
        *impl,
        *("--attention-dropout", dropout, "--hidden-dropout", dropout),
        *("--global-batch-size", str(2 * microbatches), "--compare-with-eager", "5"),
    )
    assert row(output, "eager, bit for bit") == "equal: all losses of 5 steps and all weights after them"
    assert "before" in row(output, "loss")
    assert "before" in row(output, "validation loss")
    assert row(output, "step time, eager").endswith("ms")
    assert row(output, "step time, graphed").split()[0] != "too"
    assert int(row(output, "captured").split()[0]) > 0
    assert "MiB" in row(output, "peak memory")


def test_layers_of_a_schedule_without_warmup() -> None:
    te = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "0")
    with pytest.warns(UserWarning, match="--cuda-graph-warmup-steps 0"):
        output = output_of(*te, "--cuda-graph-modules", "attn", "mlp", "--compare-with-eager", "5")
    assert "transformer_engine of attn, mlp, after 0 warmup steps" in output
    assert row(output, "eager, bit for bit").startswith("equal")
    assert int(row(output, "captured").split()[0]) > 0


def test_experts_and_patterns_are_in_the_summary_and_equal_eager() -> None:
    experts = ("--num-experts", "4", "--moe-grouped-gemm", "--disable-bias-linear", "--moe-aux-loss-coeff", "0.01")
    output = output_of(*LOCAL, *experts, "--moe-shared-expert-intermediate-size", "16", "--compare-with-eager", "5")
    assert row(output, "experts") == "2 of 4 experts and a shared one a token in 1 layer"
    assert row(output, "eager, bit for bit").startswith("equal")
    assert "| balancing 1." in output


def test_a_hybrid_model_equals_eager() -> None:
    shape = ("--hybrid-layer-pattern", "M*-", "--num-layers", "3", "--mamba-head-dim", "8", "--mamba-num-groups", "2")
    output = output_of(*FULL, *shape, "--compare-with-eager", "5")
    assert "3 layers M*-, hidden 16" in row(output, "model")
    assert row(output, "eager, bit for bit").startswith("equal")


@pytest.mark.parametrize("impl", [FULL, LOCAL, TE], ids=["full_iteration", "local", "transformer_engine"])
def test_norms_of_queries_and_keys_equal_eager(impl: tuple[str, ...]) -> None:
    output = output_of(*impl, "--qk-layernorm", "--compare-with-eager", "5")
    assert row(output, "eager, bit for bit").startswith("equal")


def test_bf16_equals_eager_too() -> None:
    assert row(output_of(*FULL, "--bf16", "--compare-with-eager", "5"), "eager, bit for bit").startswith("equal")


def test_eager_training_prints_one_step_time_and_no_comparison() -> None:
    output = output_of()
    assert row(output, "step time").endswith("ms")
    assert "bit for bit" not in output


def test_the_time_of_eager_steps_is_not_made_up() -> None:
    assert row(output_of(*FULL), "step time, eager") == "not measured: use --compare-with-eager"


def test_the_summary_shows_what_counts() -> None:
    output = output_of(*FULL, "--bf16", "--global-batch-size", "4")
    assert "bf16 with fp32 main weights" in output
    assert "4 sequences a step: 2 microbatches of 2" in output
    assert "full_iteration, after 1 warmup step" in output
    assert "mock data" in output


@pytest.mark.parametrize(
    ("words", "graphs"),
    [
        ((*FULL, "--optimizer-cuda-graph"), "full_iteration with clipping and optimizer, after 1 warmup step"),
        (
            (*LOCAL, "--cuda-graph-modules", "attn", "--optimizer-cuda-graph"),
            "local of attn, after the first step; clipping and optimizer as a graph of their own, after 1 warmup step",
        ),
        (
            (*TE, "--optimizer-cuda-graph", "--clip-grad", "0"),
            "transformer_engine, after 1 warmup step; optimizer as a graph of its own, after 1 warmup step",
        ),
        (
            ("--optimizer-cuda-graph",),
            "none: forward and backward are eager; clipping and optimizer as a graph of their own, "
            "after 3 warmup steps",
        ),
    ],
)
def test_an_optimizer_in_a_graph_is_in_summary_and_result(words: tuple[str, ...], graphs: str) -> None:
    output = output_of(*words)
    assert row(output.partition("result")[0], "graphs") == graphs
    assert "captured: " in output
    assert int(row(output, "captured").split()[0]) > 0
    assert row(output, "step time, graphed").split()[1] == "ms"


@pytest.mark.parametrize("impl", [LOCAL, TE], ids=["local", "transformer_engine"])
def test_merged_layers_and_debug_are_for_both_kinds_of_layers_graphs(impl: tuple[str, ...]) -> None:
    words = (*impl, "--num-layers", "2", "--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0")
    assert row(output_of(*words), "captured").startswith("4 recordings")
    assert row(output_of(*words, "--cuda-graph-merge-layers", "0"), "captured").startswith("2 recordings")

    def num_operations(output: str) -> int:
        line = next(line for line in output.splitlines() if line.startswith("layers.0"))
        return int(line.split()[line.split().index("yes") + 4])

    assert num_operations(output_of(*words, "--cuda-graph-debug")) > num_operations(output_of(*words))


@pytest.mark.parametrize("impl", [FULL, LOCAL, TE, ("--optimizer-cuda-graph",)], ids=["full", "local", "te", "none"])
def test_a_run_that_is_switched_off_says_so(impl: tuple[str, ...]) -> None:
    output = output_of(*impl, "--cuda-graph-policy", "off")
    name = impl[1] if len(impl) > 1 else "none"
    assert row(output.partition("result")[0], "graphs") == f"{name}, switched off: eager"
    assert row(output, "captured") == "nothing: all of it ran eagerly"
    assert row(output, "step time").endswith(" ms")
    assert "graphed" not in output
    assert "graph pool" not in row(output, "peak memory")


def test_a_run_that_ends_before_its_capture_has_captured_nothing() -> None:
    output = output_of(*FULL, "--cuda-graph-warmup-steps", "6", "--eval-iters", "0")
    assert row(output, "captured") == "nothing: all of it ran eagerly"
    assert "step time" not in output
    compared = output_of(*FULL, "--cuda-graph-warmup-steps", "6", "--eval-iters", "0", "--compare-with-eager", "5")
    assert row(compared, "step time").endswith(" ms")


def test_a_difference_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = Difference(step=2, loss_error=0.5, tensor="head.norm.weight", weight_error=0.25, num_tensors=3)
    monkeypatch.setattr(compare, "first_difference", lambda *_: difference)
    verdict = row(output_of(*FULL, "--compare-with-eager", "4", code=3), "eager, bit for bit")
    assert verdict.startswith("DIFFERENT within 4 steps: losses first differ at step 2, by 0.5; 3 weights differ")


@pytest.mark.parametrize("impl", [FULL, LOCAL, TE], ids=["full_iteration", "local", "transformer_engine"])
def test_a_verified_and_shadowed_run_equals_eager(impl: tuple[str, ...]) -> None:
    proof = ("--cuda-graph-verify", "2", "--cuda-graph-shadow-interval", "2", "--hidden-dropout", "0.1")
    output = output_of(*impl, *proof, "--compare-with-eager", "5")
    assert "replay against eager: training steps of GPTModel" in output
    assert "equal bit for bit" in output
    assert "replay against eager at iteration 4 | equal bit for bit" in output
    assert row(output, "eager, bit for bit").startswith("equal: all losses of 5 steps")


def test_a_run_that_fails_its_verification_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = MLP.forward, [0]

    def counting(self: MLP, *arguments: torch.Tensor) -> torch.Tensor:
        # Found anew each time: no check before a replay sees it.
        calls_now = globals()["_CALLS"]
        calls_now[0] += 1
        return forward(self, *arguments) * (1 + 1 / calls_now[0])

    monkeypatch.setitem(globals(), "_CALLS", calls)
    monkeypatch.setattr(MLP, "forward", counting)
    output = output_of(*LOCAL, "--cuda-graph-verify", "2", code=3)
    assert "DIFFERENT" in output
    assert "layers.0.mlp, forward" in output
    assert "iteration" not in output.split("DIFFERENT")[1]


def test_ctrl_c_is_exit_code_130_and_keeps_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    after_step = Trainer._after_step

    def interrupt(trainer: Trainer) -> None:
        after_step(trainer)
        if trainer.iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "_after_step", interrupt)
    output = output_of(*FULL, "--save", "run", "--compare-with-eager", "2", code=130)
    assert row(output, "steps") == "3, interrupted"
    assert Path("run/iter_0000003/state.json").is_file()


def test_save_load_and_logs(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ("--save", "run", "--log-jsonl", "logs/run.jsonl")
    assert main(["train", *TINY, *FULL, *outputs, "--save-interval", "4"]) == 0
    whole = Path("run/iter_0000006/model.safetensors").read_bytes()
    assert main(["train", *TINY, *FULL, "--save", "again", "--load", "run/iter_0000004"]) == 0
    assert Path("again/iter_0000006/model.safetensors").read_bytes() == whole
    assert "after 4 steps" in capsys.readouterr().out
    events = [json.loads(line) for line in Path("logs/run.jsonl").read_text().splitlines()]
    assert [e["iteration"] for e in events if e["event"] == "train"] == [2, 4, 6]
    assert events[0]["config"]["graphs"]
    assert events[-1]["report"]["num_recordings"] == 2
    assert events[-1]["last_loss"] == next(e["loss"] for e in reversed(events) if e["event"] == "train")


def test_a_resumed_run_is_compared_from_where_it_started() -> None:
    output_of("--save", "run", "--save-interval", "3")
    output = output_of(*FULL, "--load", "run/iter_0000003", "--save", "run", "--compare-with-eager", "3")
    assert row(output, "eager, bit for bit").startswith("equal: all losses of 3 steps")


def test_nan_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--lr", "1e30", "--clip-grad", "0"]) == 1
    error = capsys.readouterr().err
    assert "iteration" in error
    assert "--lr" in error
    assert "clip gradients with --clip-grad 1.0" in error
    assert "lower --clip-grad" not in error


def test_data_of_another_run_is_said_in_options(capsys: pytest.CaptureFixture[str]) -> None:
    output_of("--save", "run")
    capsys.readouterr()
    assert main(["train", *TINY, "--load", "run", "--seed", "5"]) == 2
    error = capsys.readouterr().err
    assert "  where: --seed\n" in error
    assert "leave --load out" in error
    assert "iterator" not in error


def test_a_pointer_that_moves_back_is_noted() -> None:
    note = "--save run holds a run that is at iteration"
    assert note not in output_of("--save", "run", "--save-interval", "3")
    assert note not in output_of("--save", "run", "--load", "run")
    assert note in output_of("--save", "run", "--load", "run/iter_0000003")
    assert note in output_of("--save", "run", "--train-iters", "2")
    assert note not in output_of("--train-iters", "2")


@pytest.mark.parametrize("num_steps", ["2", "6"])
def test_a_checkpoint_that_has_all_steps_is_noted(num_steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    output_of("--save", "run")
    capsys.readouterr()
    output = output_of("--load", "run", "--train-iters", num_steps)
    assert row(output, "steps") == "0"
    assert capsys.readouterr().err == (
        f"note: the checkpoint is at iteration 6 and --train-iters is {num_steps}: no step is left to train "
        "(steps count from the first one of all: to go on, use --train-iters 7 or more)\n"
    )
    assert row(output_of("--load", "run", "--train-iters", "7"), "steps") == "1"
    assert capsys.readouterr().err == ""


def test_one_of_a_kind_has_no_plural() -> None:
    output = output_of("--num-layers", "1", "--global-batch-size", "1", "--micro-batch-size", "1")
    assert row(output, "model").count("1 layer, ") == 1
    assert row(output, "batch") == "1 sequence a step: 1 microbatch of 1"
