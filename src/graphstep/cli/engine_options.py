"""Options of model and engine that ``graphstep generate`` and ``graphstep serve`` share, read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from graphstep.config import CapturePolicy, CudaGraphImpl, InferenceConfig, InferenceCudaGraphScope
from graphstep.config.arguments import configure
from graphstep.config.options import OPTIONS, Option
from graphstep.config.options.option import OptionGroup, integer, positive, text
from graphstep.config.parsing import Reading
from graphstep.config.validation import Notice
from graphstep.errors import Problem

DTYPES: Final = ("float32", "bfloat16", "float16")
_OF_RUNS: Final = ("cuda_graph_impl", "inference_cuda_graph_scope", "cuda_graph_policy")
_IMPLEMENTATIONS: Final = (str(CudaGraphImpl.none), str(CudaGraphImpl.local))


@dataclass
class _NoSection:
    """For options that belong to a command, and to no section of a run."""


def command_group(name: str) -> OptionGroup:
    """Makes the options of a command, under a heading of ``--help``."""
    return OptionGroup(name, "", _NoSection)


_group = command_group("generation")
MODEL_OPTION: Final = _group.option(
    "--model",
    "a checkpoint of graphstep train, a folder of them, or a folder of Hugging Face (config.json, *.safetensors)",
    type=text,
    metavar="FOLDER",
)
SEED_OPTION: Final = _group.option(
    "--seed", "of the first prompt; the next one has the next seed", type=integer, default=1234, metavar="N"
)
ENGINE_OPTIONS: Final[tuple[Option, ...]] = (
    _group.option("--tokenizer-model", "a tokenizer.json", type=text, metavar="FILE", default_text="that of the model"),
    _group.option(
        "--dtype",
        "number format of weights and key-value cache",
        choices=DTYPES,
        default_text="that of the files",
    ),
    _group.option("--device", "where to compute", choices=("cpu", "cuda"), default_text="cuda where there is one"),
    _group.switch("--lazy-cuda-graphs", "capture a shape when a step first needs it, not all of them at the start"),
    _group.option(
        "--inference-max-seq-length",
        "most tokens of a prompt and its continuation together",
        type=positive,
        metavar="TOKENS",
        default_text="the positions of the model",
    ),
    replace(
        _group.switch(
            "--async-scheduling",
            "launch each step before the tokens of the last one are read; tokens are the same without",
            off="--no-async-scheduling",
        ),
        default=True,
    ),
)


def _of_runs(option: Option) -> Option:
    if option.dest == "cuda_graph_impl":
        what = "none: eager; local: a graph for each of a few shapes of a step"
        return replace(option, choices=_IMPLEMENTATIONS, help=what)
    return option


RUN_OPTIONS: Final[tuple[Option, ...]] = tuple(
    _of_runs(option) for option in OPTIONS if option.section == "inference" or option.dest in _OF_RUNS
)
"""Those of runs that inference knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What a command line says of model and engine."""

    model: Path
    tokenizer_model: Path | None
    dtype: str | None
    device: str | None
    inference_max_seq_length: int | None
    lazy_cuda_graphs: bool
    async_scheduling: bool
    seed: int
    inference: InferenceConfig
    scope: InferenceCudaGraphScope
    is_required: bool
    """A step that should have a graph and cannot be captured is an error."""
    notices: tuple[Notice, ...]


_PLAIN: Final = ("dtype", "device", "inference_max_seq_length", "lazy_cuda_graphs", "async_scheduling", "seed")


def note_missing_model(reading: Reading, own: Mapping[str, Any], *, code: str, use: str) -> None:
    """Add a problem where no model is named: its code, and what a model is wanted for."""
    if own["model"] is None and "model" not in reading.wrong:
        what = f"--model says what to {use}, and is missing"
        reading.problems.append(Problem(code, what, "--model", "name the folder of a model"))


def read_engine(reading: Reading, own: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """The fields of :class:`EngineOptions`, from the values of a command and of a run.

    Raises:
        ConfigError: everything that is wrong, at once; what the command has found included.
    """
    reading.wrong -= set(own)
    reading.values["inference_dynamic_batching"] = True
    config = configure(reading, env=env)
    graphs = config.graphs
    wanted = graphs.inference_scope or InferenceCudaGraphScope.none
    scope = InferenceCudaGraphScope.none if graphs.policy is CapturePolicy.off else wanted
    return {
        "model": Path(own["model"]),
        "tokenizer_model": None if own["tokenizer_model"] is None else Path(own["tokenizer_model"]),
        **{name: own[name] for name in _PLAIN},
        "inference": config.inference,
        "scope": scope,
        "is_required": graphs.policy is CapturePolicy.required,
        "notices": (*config.notices, *_notices_of_graphs(own["lazy_cuda_graphs"], scope)),
    }


def _notices_of_graphs(is_lazy: bool, scope: InferenceCudaGraphScope) -> Iterator[Notice]:
    if is_lazy and scope is InferenceCudaGraphScope.none:
        what = "--lazy-cuda-graphs has no effect: there are no graphs"
        yield Notice("lazy-without-graphs", what, "--lazy-cuda-graphs", "add --cuda-graph-impl local")
