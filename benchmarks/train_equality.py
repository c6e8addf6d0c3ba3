"""Do graphed runs of ``graphstep train`` equal eager ones, bit for bit, on this machine?

Every combination of strategy, precision, dropout and number of microbatches is trained for some steps and compared with
an eager run from the same seed: the losses of all steps and all weights after the last. Kernels are deterministic ones
(``--deterministic-mode``): the fused attention's backward is otherwise not even equal to itself.

What is measured: equality, and beside it the median time of a whole training step of either run, in milliseconds,
optimizer and host included (a smoke figure: `train_step.py` is the benchmark). Prints a table and one line of JSON, and
writes `train_equality-<device>-<date>-<commit>.json`.

Usage: PYTHONPATH=src CUBLAS_WORKSPACE_CONFIG=:4096:8 python benchmarks/train_equality.py [--output DIR] [--num-steps N]
           [--quick] [model and training options of graphstep train]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common.environment import command_line, commit, describe_machine
from common.record import write_results
from rich.console import Console
from rich.table import Table

from graphstep.config import from_argv
from graphstep.training.compare import StepTrace, compare_with_eager
from graphstep.training.loop import Trainer

STRATEGIES = (
    ("--cuda-graph-impl", "full_iteration"),
    ("--cuda-graph-impl", "local"),
    ("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn"),
    ("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn", "mlp"),
)
PRECISIONS = ((), ("--bf16",))
DROPOUTS = (0.0, 0.1)
MICROBATCHES = (1, 4)


def run(options: list[str], num_steps: int) -> dict[str, Any]:
    """Train once graphed and once eagerly; returns what was found."""
    config = from_argv(options)
    trace = StepTrace(num_steps)
    with Trainer(config, on_step=trace.observe) as trainer:
        result = trainer.train(num_steps)
        trace.finish(trainer)
        report = trainer.strategy.report().to_json()
    gc.collect()
    comparison = compare_with_eager(config, trace)
    return {
        "command": "graphstep train " + " ".join(options),
        "num_steps": comparison.num_steps,
        "is_equal": comparison.is_equal,
        "difference": None if comparison.difference is None else str(comparison.difference),
        "first_loss": result.first_loss,
        "last_loss": result.last_loss,
        "graphed_step_ms": result.step_ms,
        "eager_step_ms": comparison.eager_step_ms,
        "num_recordings": report["num_recordings"],
        "num_replays": sum(region["num_replays"] for region in report["regions"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all combinations; exit code 1 if one differs."""
    words = list(sys.argv[1:] if argv is None else argv)
    started = datetime.now(UTC)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--num-steps", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="one combination of each strategy")
    own, model_options = parser.parse_known_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console, runs = Console(), []
    with tempfile.TemporaryDirectory() as cache:
        for strategy, precision, dropout, num in itertools.product(STRATEGIES, PRECISIONS, DROPOUTS, MICROBATCHES):
            if own.quick and (precision, dropout, num) != ((), 0.1, 4):
                continue
            options = [
                *model_options,
                *("--train-iters", str(own.num_steps), "--eval-iters", "0", "--data-cache-path", cache),
                *("--micro-batch-size", "1", "--global-batch-size", str(num)),
                *("--attention-dropout", str(dropout), "--hidden-dropout", str(dropout)),
                *precision,
                *("--deterministic-mode", "--no-check-for-nan-in-loss-and-grad"),
                *strategy,
            ]
            found = run(options, own.num_steps)
            found["command"] = found["command"].replace(f" --data-cache-path {cache}", "")
            runs.append(found)
            console.print("equal    " if found["is_equal"] else "DIFFERENT", found["command"], soft_wrap=True)
    record = {
        "benchmark": "train_equality",
        "started": started.isoformat(timespec="seconds"),
        "command": command_line("benchmarks/train_equality.py", words),
        "commit": commit(),
        "machine": describe_machine(device),
        "runs": runs,
    }
    console.print(_table(runs))
    print(f"results: {write_results(record, own.output, now=started)}", file=sys.stderr)
    print(json.dumps(record, separators=(",", ":")))
    return 0 if all(found["is_equal"] for found in runs) else 1


def _table(runs: list[dict[str, Any]]) -> Table:
    table = Table(title="graphed against eager training, bit for bit", title_justify="left")
    for name in ("strategy and options", "equal", "eager ms", "graphed ms"):
        table.add_column(name)
    for found in runs:
        options = found["command"].split("--global-batch-size ")[1]
        times = [f"{found[key]:.2f}" if found[key] else "-" for key in ("eager_step_ms", "graphed_step_ms")]
        table.add_row(f"microbatches {options}", "yes" if found["is_equal"] else found["difference"], *times)
    return table


if __name__ == "__main__":
    sys.exit(main())
