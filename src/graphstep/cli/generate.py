"""``graphstep generate``: continue prompts with a model, and say how fast it went and what ran as graphs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphstep.cli.generate_options import GenerateOptions
from graphstep.cli.loaded_engine import (
    device_of,
    engine_config,
    graph_and_cache_rows,
    load,
    memory_needed,
    tokenizer_of,
)
from graphstep.config import InferenceCudaGraphScope
from graphstep.errors import DataError, Problem, RequestError
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.load import LoadedModel
from graphstep.inference.requests import FinishReason, SamplingParams, later_seed
from graphstep.inference.streams import TokenStream
from graphstep.inference.text import TextTokens

EXIT_OK = 0


@dataclass(slots=True)
class _Result:
    """What came of all prompts together."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None


def run(options: GenerateOptions) -> int:
    """Run the command.

    Args:
        options: as read from a command line.

    Returns:
        Exit code 0.

    Raises:
        UserInputError: a device, model, tokenizer or prompts that do not fit.
        GraphstepError: a graph that has to be captured and cannot be.
    """
    device = device_of(options)
    prompts = _prompts(options)
    with memory_needed():
        return _run(options, device, prompts)


def _run(options: GenerateOptions, device: torch.device, prompts: Sequence[str]) -> int:
    started = time.perf_counter()
    loaded = load(options, device)
    text = tokenizer_of(options, loaded)
    load_seconds = time.perf_counter() - started
    config = engine_config(options, loaded, text, expected_requests=len(prompts))
    with DynamicEngine(loaded.model, config) as engine:
        sampling = _sampling(options, len(prompts), loaded, text)
        result = _generate(engine, prompts, text, sampling, as_json=options.json)
        # Texts go to standard output, where a program may read them.
        Console(stderr=True).print(_table(engine, loaded, result, len(prompts), load_seconds))
    return EXIT_OK


def _generate(
    engine: DynamicEngine,
    prompts: Sequence[str],
    text: TextTokens,
    sampling: Sequence[SamplingParams],
    *,
    as_json: bool,
) -> _Result:
    result = _Result()
    with contextlib.ExitStack() as stack:
        streams = _streams(engine, prompts, text, sampling, stack)
        result.num_prompt_tokens = sum(stream.request.num_prompt_tokens for stream in streams)
        started = time.perf_counter()
        for number, (prompt, stream, settings) in enumerate(zip(prompts, streams, sampling, strict=True)):
            if not as_json and len(prompts) > 1:
                print(f"{'' if number == 0 else chr(10)}>>> {_writable(prompt)}")
            pieces = []
            for piece in _pieces(stream, text, settings):
                if result.first_token_seconds is None:
                    result.first_token_seconds = time.perf_counter() - started
                pieces.append(piece)
                if not as_json and piece:
                    print(_writable(piece), end="", flush=True)
            tokens = stream.request.output_tokens
            result.num_tokens += len(tokens)
            if as_json:
                reason = stream.request.finish_reason
                row = {
                    "prompt": prompt,
                    "text": "".join(pieces),
                    "tokens": tokens,
                    "finish_reason": None if reason is None else reason.value,
                }
                print(json.dumps(row), flush=True)
            else:
                print(flush=True)
            if stream.request.finish_reason is FinishReason.ERROR:
                what = f"the logits after prompt {number + 1} are not finite"
                fix = "use --dtype float32 or bfloat16, or other weights"
                raise DataError(Problem("generate-not-finite", what, "--model", fix))
        result.seconds = time.perf_counter() - started
    return result


def _pieces(stream: TokenStream, text: TextTokens, settings: SamplingParams) -> Iterator[str]:
    decoded = text.stream()
    for output in stream:
        is_end = output.token in settings.stop_tokens
        yield "" if output.token is None or is_end else decoded.add(output.token)
    yield decoded.finish()


def _streams(
    engine: DynamicEngine,
    prompts: Sequence[str],
    text: TextTokens,
    sampling: Sequence[SamplingParams],
    stack: contextlib.ExitStack,
) -> list[TokenStream]:
    streams: list[TokenStream] = []
    problems: list[Problem] = []
    for number, (prompt, settings) in enumerate(zip(prompts, sampling, strict=True)):
        try:
            streams.append(stack.enter_context(engine.stream(text.encode(prompt), settings)))
        except RequestError as error:
            problems += [
                Problem(problem.code, f"prompt {number + 1}: {problem.what}", problem.where, problem.fix)
                for problem in error.problems
            ]
    if problems:
        raise RequestError(problems)
    return streams


def _sampling(
    options: GenerateOptions, num_prompts: int, loaded: LoadedModel, text: TextTokens
) -> list[SamplingParams]:
    stops = () if options.ignore_eos else tuple(dict.fromkeys((*loaded.stop_tokens, *text.stop_tokens)))
    return [
        SamplingParams(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=later_seed(options.seed, number),
            stop_tokens=stops,
        )
        for number in range(num_prompts)
    ]


def _prompts(options: GenerateOptions) -> list[str]:
    if options.prompts:
        return list(options.prompts)
    name = options.prompt_file or "-"
    where = "standard input" if name == "-" else name
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        lines = content.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
        what = f"the prompts cannot be read: {reason}"
        raise DataError(Problem("generate-prompts", what, where, "name a text file, one prompt a line")) from error
    prompts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not prompts:
        raise DataError(Problem("generate-prompts", "there are no prompts", where, "write one a line, or use --prompt"))
    return prompts


def _writable(piece: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return piece.encode(encoding, "replace").decode(encoding)


def _table(engine: DynamicEngine, loaded: LoadedModel, result: _Result, num_prompts: int, load_seconds: float) -> Table:
    counts = engine.counts
    device, dtype = loaded.model.embedding.weight.device, loaded.model.embedding.weight.dtype
    rows = [
        ("model", f"{loaded.model.num_parameters():,} parameters, {str(dtype).removeprefix('torch.')} on {device}"),
        ("loaded", f"{loaded.folder} in {load_seconds:.2f} s"),
        ("prompts", f"{num_prompts}, {result.num_prompt_tokens} tokens"),
        (
            "generated",
            f"{result.num_tokens} tokens in {result.seconds:.2f} s: "
            f"{result.num_tokens / max(result.seconds, 1e-9):.1f} tokens/s",
        ),
        ("graph hits", _hits(engine)),
        *graph_and_cache_rows(engine),
    ]
    if counts.preemptions:
        rows.append(("preempted", f"{counts.preemptions} times, for lack of blocks"))
    table = Table(title="graphstep generate", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _hits(engine: DynamicEngine) -> str:
    stats = engine.runner.step_stats
    if engine.config.scope is InferenceCudaGraphScope.none:
        return f"none of {sum(stats.eager_calls.values())} steps"
    num_steps = stats.num_replays + sum(stats.eager_calls.values())
    text = f"{stats.num_replays} of {num_steps} steps ({100 * stats.num_replays / max(num_steps, 1):.0f} %)"
    reasons = ", ".join(f"{number}: {reason}" for reason, number in stats.eager_calls.items())
    return f"{text}; the others: {reasons}" if reasons else text
