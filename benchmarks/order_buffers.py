"""Do graphs for a pipeline schedule take more static buffer sets with more microbatches?

For each rank of a pipeline (1F1B; one process stands for one rank after the other) and each number of microbatches, the
layers of a small GPT are captured twice: by `graphstep.make_graphed_callables` with
`_reuse_graph_input_output_buffers`, and by `graphstep.TECudaGraphHelper`. Counted are the pairs of graphs of a layer,
each with static buffers of its own, beside the most microbatches that the schedule has in flight; static bytes (copies
of arguments), bytes of the graph pool, and seconds of warmup and capture. Nothing is replayed.

Prints a table and one line of JSON, and writes `order_buffers-<device>-<date>-<commit>.json`. The exit code is 1 if a
number of buffer sets is not the number in flight.

Usage: PYTHONPATH=src python benchmarks/order_buffers.py [--output DIR] [--num-stages N] [--num-microbatches N ...]
           [--device cpu|cuda] [model options of graphstep train]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common.environment import command_line, commit, describe_machine
from common.record import rounded, write_results
from rich.console import Console
from rich.table import Table
from torch import nn

import graphstep
from graphstep.capture.report import CaptureReport
from graphstep.config import CudaGraphConfig, CudaGraphImpl, ModelConfig, from_argv
from graphstep.models import GPTModel
from graphstep.strategies.order_steps import max_in_flight, steps_of
from graphstep.strategies.pipeline_order import pipeline_order

_DEFAULTS = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32")


class Rank:
    """A model of one rank, and a microbatch for it."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = GPTModel(config).to(device)
        self.config = config
        drawn = torch.randint(config.vocab_size, (1, config.seq_length + 1), device=device)
        self.batch = drawn[:, :-1], drawn[:, 1:]

    def step(self) -> None:
        """One microbatch, forward and backward."""
        self.model(*self.batch).backward()

    def calls(self) -> tuple[list[nn.Module], list[tuple[Any, ...]], list[dict[str, Any]]]:
        """The layers, and the arguments that each is called with."""
        layers, arguments, named = list(self.model.layers), list[tuple[Any, ...]](), list[dict[str, Any]]()

        def note(_module: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            arguments.append(tuple(_detached(value) for value in given))
            named.append({name: _detached(value) for name, value in keywords.items()})

        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        self.step()
        for handle in handles:
            handle.remove()
        return layers, arguments, named


def _detached(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def with_callables(rank: Rank, order: Sequence[int], num_microbatches: int) -> tuple[CaptureReport, Callable[[], None]]:
    """Capture by hand; returns the report and what frees the graphs."""
    layers, arguments, named = rank.calls()
    made = graphstep.make_graphed_callables(
        tuple(layers),
        tuple(arguments * num_microbatches),
        sample_kwargs=tuple(named * num_microbatches),
        num_warmup_iters=1,
        _order=order,
        _num_layers_per_chunk=[len(layers)],
        _reuse_graph_input_output_buffers=True,
    )
    return made[0].report(), made[0].reset


def with_helper(rank: Rank, order: Sequence[int], num_microbatches: int) -> tuple[CaptureReport, Callable[[], None]]:
    """Capture by the helper; returns the report and what frees the graphs."""
    del num_microbatches
    config = CudaGraphConfig(impl=CudaGraphImpl.transformer_engine, warmup_steps=1)
    helper = graphstep.TECudaGraphHelper(rank.model, config, rank.config.seq_length, 1, order=order)
    rank.step()
    helper.create_cudagraphs()
    return helper.report(), helper.delete_cuda_graphs


ARMS = {"make_graphed_callables": with_callables, "TECudaGraphHelper": with_helper}


def measure(
    arm: str, config: ModelConfig, device: torch.device, num_stages: int, rank: int, num_microbatches: int
) -> dict[str, Any]:
    """Capture for one rank and number of microbatches."""
    order = pipeline_order(num_microbatches, pipeline_size=num_stages, pipeline_rank=rank)
    report, free = ARMS[arm](Rank(config, device), order, num_microbatches)
    found = {
        "arm": arm,
        "rank": rank,
        "num_microbatches": num_microbatches,
        "num_in_flight": max(max_in_flight(steps_of(order, num_chunks=1)).values()),
        "num_buffer_sets": max(row.num_recordings // 2 for row in report.rows),
        "static_bytes": sum(row.static_bytes for row in report.rows),
        "pool_bytes": report.pool_bytes,
        "capture_seconds": report.capture_seconds,
    }
    free()
    gc.collect()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; exit code 1 if buffer sets depend on the number of microbatches."""
    words = list(sys.argv[1:] if argv is None else argv)
    started = datetime.now(UTC)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--num-stages", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    own, model_options = parser.parse_known_args(words)
    device = torch.device(own.device)
    config = from_argv([*_DEFAULTS, *model_options, "--vocab-size", "64"]).model
    runs = [
        measure(arm, config, device, own.num_stages, rank, number)
        for arm in ARMS
        for rank in range(own.num_stages)
        for number in own.num_microbatches
    ]
    record = rounded(
        {
            "benchmark": "order_buffers",
            "started": started.isoformat(timespec="seconds"),
            "command": command_line("benchmarks/order_buffers.py", words),
            "commit": commit(),
            "machine": describe_machine(device),
            "num_stages": own.num_stages,
            "num_layers": config.num_layers,
            "runs": runs,
        }
    )
    Console().print(_table(runs))
    print(f"results: {write_results(record, own.output, now=started)}", file=sys.stderr)
    print(json.dumps(record, separators=(",", ":")))
    return 0 if all(found["num_buffer_sets"] == found["num_in_flight"] for found in runs) else 1


def _table(runs: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="static buffer sets of a layer", title_justify="left")
    for name in ("arm", "rank", "microbatches", "in flight", "buffer sets", "static KiB", "pool MiB", "capture s"):
        table.add_column(name)
    for found in runs:
        table.add_row(
            *(str(found[key]) for key in ("arm", "rank", "num_microbatches", "num_in_flight", "num_buffer_sets")),
            f"{found['static_bytes'] / 2**10:.1f}",
            f"{found['pool_bytes'] / 2**20:.2f}",
            f"{found['capture_seconds']:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
