"""The options of ``graphstep generate``, read without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from graphstep.config import CapturePolicy, CudaGraphImpl, InferenceConfig, InferenceCudaGraphScope
from graphstep.config.arguments import configure
from graphstep.config.options import OPTIONS, Option
from graphstep.config.options.option import integer, number, positive, text
from graphstep.config.parsing import read_options
from graphstep.config.validation import Notice
from graphstep.errors import Problem
from graphstep.inference.requests import MAX_TEMPERATURE

DTYPES: Final = ("float32", "bfloat16", "float16")
_GROUP = "generation"
_OWN: tuple[Option, ...] = (
    Option(
        dest="model",
        flags=("--model",),
        type=text,
        metavar="FOLDER",
        group=_GROUP,
        help="a checkpoint of graphstep train, a folder of them, or a folder of Hugging Face (config.json, "
        "*.safetensors)",
    ),
    Option(
        dest="prompt",
        flags=("--prompt",),
        nargs="+",
        metavar="TEXT",
        group=_GROUP,
        help="what to continue, a prompt in quotes each; without this and a file: standard input, one a line",
    ),
    Option(
        dest="prompt_file",
        flags=("--prompt-file",),
        type=text,
        metavar="FILE",
        group=_GROUP,
        help="prompts, one a line; -: standard input",
    ),
    Option(
        dest="max_new_tokens",
        flags=("--max-new-tokens",),
        type=positive,
        default=128,
        metavar="N",
        group=_GROUP,
        help="most tokens to generate for a prompt",
    ),
    Option(
        dest="temperature",
        flags=("--temperature",),
        type=number,
        default=1.0,
        metavar="X",
        group=_GROUP,
        help="divides the logits; 0: always the most likely token",
    ),
    Option(
        dest="top_k",
        flags=("--top-k",),
        type=integer,
        default=0,
        metavar="N",
        group=_GROUP,
        help="draw from so many of the most likely tokens; 0: from all",
    ),
    Option(
        dest="top_p",
        flags=("--top-p",),
        type=number,
        default=1.0,
        metavar="P",
        group=_GROUP,
        help="draw from the fewest most likely tokens that have this probability together",
    ),
    Option(
        dest="seed",
        flags=("--seed",),
        type=integer,
        default=1234,
        metavar="N",
        group=_GROUP,
        help="of the first prompt; the next one has the next seed",
    ),
    Option(
        dest="ignore_eos",
        flags=("--ignore-eos",),
        nargs=0,
        default=False,
        group=_GROUP,
        help="do not stop at the token that ends a text",
    ),
    Option(
        dest="json",
        flags=("--json",),
        nargs=0,
        default=False,
        group=_GROUP,
        help="print one JSON object a prompt instead of text",
    ),
    Option(
        dest="tokenizer_model",
        flags=("--tokenizer-model",),
        type=text,
        metavar="FILE",
        group=_GROUP,
        default_text="that of the model",
        help="a tokenizer.json",
    ),
    Option(
        dest="dtype",
        flags=("--dtype",),
        choices=DTYPES,
        group=_GROUP,
        default_text="that of the files",
        help="number format of weights and key-value cache",
    ),
    Option(
        dest="device",
        flags=("--device",),
        choices=("cpu", "cuda"),
        group=_GROUP,
        default_text="cuda where there is one",
        help="where to compute",
    ),
    Option(
        dest="lazy_cuda_graphs",
        flags=("--lazy-cuda-graphs",),
        nargs=0,
        default=False,
        group=_GROUP,
        help="capture a shape when a step first needs it, not all of them at the start",
    ),
    Option(
        dest="inference_max_seq_length",
        flags=("--inference-max-seq-length",),
        type=positive,
        metavar="TOKENS",
        group=_GROUP,
        default_text="the positions of the model",
        help="most tokens of a prompt and its continuation together",
    ),
    Option(
        dest="async_scheduling",
        flags=("--async-scheduling",),
        off_flags=("--no-async-scheduling",),
        nargs=0,
        default=True,
        group=_GROUP,
        help="launch each step before the tokens of the last one are read; tokens are the same without",
    ),
)
_OF_RUNS = ("inference_cuda_graph_scope", "cuda_graph_policy")
_IMPLEMENTATIONS = (str(CudaGraphImpl.none), str(CudaGraphImpl.local))


def _shared(option: Option) -> Option:
    if option.dest == "cuda_graph_impl":
        what = "none: eager; local: a graph for each of a few shapes of a step"
        return replace(option, choices=_IMPLEMENTATIONS, help=what)
    return option


GENERATE_OPTIONS: tuple[Option, ...] = (
    *_OWN,
    *(
        _shared(option)
        for option in OPTIONS
        if option.section == "inference" or option.dest in ("cuda_graph_impl", *_OF_RUNS)
    ),
)
"""All of them: its own, and those of runs that inference knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What a command line says."""

    model: Path
    prompts: tuple[str, ...]
    prompt_file: str | None
    """Prompts, one a line; ``-``: standard input, as without this and prompts of the command line."""
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool
    json: bool
    tokenizer_model: Path | None
    dtype: str | None
    device: str | None
    inference_max_seq_length: int | None
    lazy_cuda_graphs: bool
    async_scheduling: bool
    inference: InferenceConfig
    scope: InferenceCudaGraphScope
    is_required: bool
    """A step that should have a graph and cannot be captured is an error."""
    notices: tuple[Notice, ...]


def read_generate_options(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> GenerateOptions:
    """Read a command line.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    reading = read_options(argv, GENERATE_OPTIONS, help_hint="graphstep generate --help lists the options")
    own: dict[str, Any] = {option.dest: reading.values.pop(option.dest, option.default) for option in _OWN}
    if own["model"] is None and "model" not in reading.wrong:
        what = "--model says what to generate with, and is missing"
        reading.problems.append(Problem("generate-model", what, "--model", "name the folder of a model"))
    if own["prompt"] and own["prompt_file"] is not None:
        what = "prompts of the command line and of a file, of which one can be"
        reading.problems.append(Problem("generate-prompts", what, "--prompt, --prompt-file", "leave one out"))
    reading.problems += _problems_of_ranges(own)
    reading.wrong -= {option.dest for option in _OWN}
    reading.values["inference_dynamic_batching"] = True
    config = configure(reading, env=env)
    graphs = config.graphs
    wanted = graphs.inference_scope or InferenceCudaGraphScope.none
    scope = InferenceCudaGraphScope.none if graphs.policy is CapturePolicy.off else wanted
    return GenerateOptions(
        model=Path(own.pop("model")),
        prompts=tuple(own.pop("prompt") or ()),
        tokenizer_model=None if own["tokenizer_model"] is None else Path(own["tokenizer_model"]),
        inference=config.inference,
        scope=scope,
        is_required=graphs.policy is CapturePolicy.required,
        notices=(*config.notices, *notices_of_graphs(own["lazy_cuda_graphs"], scope)),
        **{name: value for name, value in own.items() if name != "tokenizer_model"},
    )


def notices_of_graphs(is_lazy: bool, scope: InferenceCudaGraphScope) -> Iterator[Notice]:
    """What has no effect without graphs."""
    if is_lazy and scope is InferenceCudaGraphScope.none:
        what = "--lazy-cuda-graphs has no effect: there are no graphs"
        yield Notice("lazy-without-graphs", what, "--lazy-cuda-graphs", "add --cuda-graph-impl local")


def _problems_of_ranges(own: Mapping[str, Any]) -> list[Problem]:
    checks = (
        ("temperature", 0 <= own["temperature"] <= MAX_TEMPERATURE, f"0 to {MAX_TEMPERATURE:g}"),
        ("top_k", own["top_k"] >= 0, "0 or more"),
        ("top_p", 0 < own["top_p"] <= 1, "above 0 and at most 1"),
    )
    problems = []
    for name, holds, expected in checks:
        if not holds:
            option = f"--{name.replace('_', '-')}"
            what = f"{option} must be {expected}, got {own[name]}"
            problems.append(Problem(f"generate-{name.replace('_', '-')}", what, option, "change it, or leave it out"))
    return problems
