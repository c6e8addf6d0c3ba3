"""``graphstep train``: train a model, say what was captured, and whether it equals eager training."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphstep.cli.problems import print_notices
from graphstep.config import CapturePolicy, CudaGraphImpl, RunConfig, from_argv
from graphstep.config.captured import layers_with
from graphstep.errors import GraphstepError, Problem, UserInputError

if TYPE_CHECKING:
    from torch import Tensor

    from graphstep.training.compare import Comparison
    from graphstep.training.loop import Trainer
    from graphstep.training.result import TrainResult

EXIT_OK, EXIT_DIFFERENT, EXIT_INTERRUPTED = 0, 3, 130


def run(argv: Sequence[str], *, console: Console | None = None) -> int:
    """Run the command.

    Args:
        argv: options, without the name of the command.
        console: where output goes; standard output if None.

    Returns:
        Exit code: 0; 3 when ``--compare-with-eager`` or ``--cuda-graph-verify`` found a difference; 130 after Ctrl-C.

    Raises:
        UserInputError: bad options, data or checkpoints: all problems at once, before anything was created.
        GraphstepError: training failed.
    """
    config = from_argv(argv, for_training=True)
    try:
        return _train(config, console or Console())
    except (MemoryError, RuntimeError, ValueError) as error:
        if not _is_out_of_memory(error):
            raise
        what = f"there is not enough memory for this model and batch: {str(error).splitlines()[0] or 'no memory left'}"
        where = "--num-layers, --hidden-size, --ffn-hidden-size, --vocab-size, --seq-length, --micro-batch-size"
        fix = "lower one of them; a smaller --micro-batch-size with the same --global-batch-size trains the same"
        raise UserInputError(Problem("out-of-memory", what, where, fix)) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether memory ran out, or no memory could hold the sizes. PyTorch has a type for it on devices only."""
    if isinstance(error, GraphstepError):
        return False
    import torch

    texts = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "array is too big")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in texts)


def _train(config: RunConfig, console: Console) -> int:
    # Only now: wrong options are answered before torch is loaded.
    from graphstep.cli.train_report import RunFiles
    from graphstep.training.compare import StepTrace, compare_with_eager
    from graphstep.training.loop import Trainer
    from graphstep.training.setup import finished_notice

    trace = StepTrace(config.training.compare_with_eager)
    is_compared = trace.num_steps > 0
    files = RunFiles(config)

    def on_step(trainer: Trainer, losses: Tensor) -> None:
        trace.observe(trainer, losses)
        files.observe(trainer, losses)

    trainer = Trainer(config, console=console, on_step=on_step if is_compared or files.are_wanted else None)
    with trainer, files:
        files.begin(trainer)
        _print_summary(trainer, console)
        if (proof := trainer.verify()) is not None:
            console.print(proof.render())
            if proof.num_replays and not proof.equal:
                return EXIT_DIFFERENT
        finished = finished_notice(config.training, trainer.iteration)
        print_notices([finished] if finished is not None else [])
        result = trainer.train()
        if result.report.rows or result.report.eager_parts:
            console.print(result.report.render())
        files.finish(trainer, result)
        if is_compared:
            trace.finish(trainer)
        config = _from_checkpoint(config, trainer.start_checkpoint)
    comparison = None
    # Recordings, model and optimizer go first, so that eager runs have their memory.
    del trainer
    gc.collect()
    if is_compared and not result.is_interrupted and trace.num_observed > 0:
        _say(console, f"training {_count(trace.num_steps, 'step')} eagerly from the same start, to compare ...")
        comparison = compare_with_eager(config, trace)
    console.print(_result_table(config, result, comparison))
    for line in files.write():
        _say(console, line)
    if result.is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_DIFFERENT if comparison is not None and not comparison.is_equal else EXIT_OK


def _from_checkpoint(config: RunConfig, folder: Path | None) -> RunConfig:
    """Return a configuration that starts where this run started, also after it has saved newer checkpoints."""
    load = None if folder is None else str(folder)
    return dataclasses.replace(config, training=dataclasses.replace(config.training, load=load))


def _print_summary(trainer: Trainer, console: Console) -> None:
    model, training = trainer.config.model, trainer.config.training
    pattern = f" {trainer.config.layers.hybrid_layer_pattern or ''}".rstrip()
    rows = [
        ("device", f"{trainer.device}, {'bf16 with fp32 main weights' if training.bf16 else 'fp32'}"),
        (
            "model",
            f"{trainer.model.num_parameters():,} parameters: {_count(model.num_layers, 'layer')}{pattern}, "
            f"hidden {model.hidden_size}, {_count(model.num_attention_heads, 'head')}, sequence {model.seq_length}, "
            f"vocabulary {model.vocab_size}",
        ),
        *_expert_rows(trainer.config),
        *(("data", line) for line in trainer.datasets.summary),
        (
            "batch",
            f"{_count(training.global_batch_size, 'sequence')} a step: "
            f"{_count(training.num_microbatches, 'microbatch', 'es')} of {training.micro_batch_size}",
        ),
        ("steps", f"{training.train_iters}, {training.lr_decay_style} learning rate {training.lr:g}"),
        ("graphs", _describe_graphs(trainer.config)),
    ]
    if trainer.start_checkpoint is not None:
        rows.append(("resumed", f"{trainer.start_checkpoint}, after {_count(trainer.iteration, 'step')}"))
    console.print(_table("graphstep train", rows))
    for notice in trainer.notices:
        _say(console, f"note: {notice}")


def _expert_rows(config: RunConfig) -> list[tuple[str, str]]:
    moe, num_layers = config.moe, layers_with(config, "moe")
    if moe.num_experts is None or not num_layers:
        return []
    shared = "" if moe.moe_shared_expert_intermediate_size is None else " and a shared one"
    of_tokens = f"{moe.moe_router_topk} of {_count(moe.num_experts, 'expert')}{shared} a token"
    return [("experts", f"{of_tokens} in {_count(num_layers, 'layer')}")]


def _describe_graphs(config: RunConfig) -> str:
    graphs = config.graphs
    is_none = graphs.impl is CudaGraphImpl.none
    if is_none and not graphs.optimizer:
        return "none: eager"
    if graphs.policy is CapturePolicy.off:
        return f"{graphs.impl}, switched off: eager"
    update = ("clipping and " if config.training.clip_grad > 0 else "") + "optimizer"
    modules = f" of {', '.join(graphs.modules)}" if graphs.modules else ""
    after = f", after {_count(graphs.warmup_steps, 'warmup step')}"
    if graphs.impl is CudaGraphImpl.full_iteration:
        return f"{graphs.impl}{f' with {update}' if graphs.optimizer else ''}{after}"
    layers = f"{graphs.impl}{modules}" + (", after the first step" if graphs.impl is CudaGraphImpl.local else after)
    own = f"; {update} as a graph of {'their' if ' and ' in update else 'its'} own{after}" if graphs.optimizer else ""
    return ("none: forward and backward are eager" if is_none else layers) + own


def _result_table(config: RunConfig, result: TrainResult, comparison: Comparison | None) -> Table:
    graphs, report = config.graphs, result.report
    is_eager = graphs.impl is CudaGraphImpl.none and not graphs.optimizer
    rows = [
        ("steps", f"{result.iteration - result.first_iteration}" + (", interrupted" if result.is_interrupted else "")),
        ("loss", _before_after(result.first_loss, result.last_loss)),
        ("validation loss", _before_after(result.first_validation_loss, result.last_validation_loss)),
        *(_time_rows(result, comparison) if report.num_recordings else _eager_time_rows(is_eager, result, comparison)),
    ]
    memory = _mib(result.peak_bytes) + (" resident" if result.device.type == "cpu" else " allocated")
    if is_eager:
        rows.append(("peak memory", memory))
    elif not report.num_recordings:
        rows += [("captured", "nothing: all of it ran eagerly"), ("peak memory", memory)]
    else:
        rows += [
            ("captured", f"{_count(report.num_recordings, 'recording')} in {report.capture_seconds:.2f} s"),
            ("peak memory", f"{memory}, of which graph pool {_mib(report.pool_bytes)}"),
        ]
    if comparison is not None:
        rows.append(("eager, bit for bit", _verdict(config, result, comparison)))
    return _table("result", rows)


def _eager_time_rows(is_eager: bool, result: TrainResult, comparison: Comparison | None) -> list[tuple[str, str]]:
    """Of a run without graphs. One that waited for graphs to the end has measured nothing itself."""
    eager_ms = result.step_ms
    if eager_ms is None and comparison is not None:
        eager_ms = comparison.eager_step_ms
    return [("step time", _ms(eager_ms))] if is_eager or eager_ms is not None else []


def _time_rows(result: TrainResult, comparison: Comparison | None) -> list[tuple[str, str]]:
    eager_ms = None if comparison is None else comparison.eager_step_ms
    eager = "not measured: use --compare-with-eager" if comparison is None else _ms(eager_ms)
    graphed = _ms(result.step_ms)
    if result.device.type == "cpu" and result.step_ms is not None:
        graphed += " (the tape of the CPU engine checks captures, it does not speed steps up)"
    elif eager_ms is not None and result.step_ms:
        graphed += f" ({eager_ms / result.step_ms:.2f}x as fast)"
    return [("step time, eager", eager), ("step time, graphed", graphed)]


def _verdict(config: RunConfig, result: TrainResult, comparison: Comparison) -> str:
    if comparison.difference is None:
        return f"equal: all losses of {_count(comparison.num_steps, 'step')} and all weights after them"
    text = f"DIFFERENT within {_count(comparison.num_steps, 'step')}: {comparison.difference}"
    if result.device.type == "cuda" and not config.training.deterministic_mode:
        text += " (some CUDA kernels differ from run to run: repeat with --deterministic-mode)"
    return text


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


def _before_after(before: float | None, after: float | None) -> str:
    return "not measured" if before is None or after is None else f"{before:.4f} before, {after:.4f} after"


def _ms(milliseconds: float | None) -> str:
    return "too few steps to tell" if milliseconds is None else f"{milliseconds:.2f} ms"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
