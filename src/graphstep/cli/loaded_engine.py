"""What ``graphstep generate`` and ``graphstep serve`` do alike: device, model, tokenizer, and options of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import torch

from graphstep.config import InferenceConfig, InferenceCudaGraphScope
from graphstep.errors import ConfigError, DataError, GraphstepError, Problem, UserInputError
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.load import LoadedModel, load_model
from graphstep.inference.text import ByteText, HuggingFaceText, TextTokens

_OUT_OF_MEMORY: Final = (
    "can't allocate memory",
    "not enough memory",
    "size calculation overflowed",
    "array is too big",
)
_MIB: Final = 2**20
_LENGTH_OPTION: Final = "--inference-max-seq-length"


class EngineOptions(Protocol):
    """What both commands read from their command lines."""

    @property
    def model(self) -> Path:
        """Folder of the model."""

    @property
    def tokenizer_model(self) -> Path | None:
        """A ``tokenizer.json``; ``None``: that of the model."""

    @property
    def dtype(self) -> str | None:
        """Of the weights; ``None``: that of the files."""

    @property
    def device(self) -> str | None:
        """``cpu`` or ``cuda``; ``None``: cuda where there is one."""

    @property
    def inference_max_seq_length(self) -> int | None:
        """Longest sequence; ``None``: the positions of the model."""

    @property
    def lazy_cuda_graphs(self) -> bool:
        """Is a shape captured when it is first needed?"""

    @property
    def async_scheduling(self) -> bool:
        """Is a step launched before the tokens of the last one are read?"""

    @property
    def inference(self) -> InferenceConfig:
        """Sizes and graphs."""

    @property
    def scope(self) -> InferenceCudaGraphScope:
        """What a graph covers."""

    @property
    def is_required(self) -> bool:
        """Is a failed capture an error?"""

    @property
    def seed(self) -> int:
        """Of requests without one."""


@contextmanager
def memory_needed() -> Iterator[None]:
    """Say what to do where the body finds too little memory.

    Raises:
        UserInputError: instead of what PyTorch and Python raise then.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        # PyTorch has a type for it on devices only.
        is_said = not isinstance(error, GraphstepError) and any(text in str(error) for text in _OUT_OF_MEMORY)
        if not (is_memory or is_said):
            raise
        reason = next(iter(str(error).splitlines()), "") or "no memory left"
        what = f"there is not enough memory for this model and cache: {reason}"
        where = "--model, --inference-dynamic-batching-buffer-size-gb, --inference-dynamic-batching-max-tokens"
        fix = "lower one of them, or use --dtype bfloat16"
        raise UserInputError(Problem("out-of-memory", what, where, fix)) from error


def device_of(options: EngineOptions) -> torch.device:
    """Return where to compute.

    Raises:
        ConfigError: there is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        what = "PyTorch sees no CUDA device"
        fix = "leave --device out to compute on the CPU, or install a CUDA build of PyTorch"
        raise ConfigError(Problem("device-missing", what, "--device cuda", fix))
    if options.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load(options: EngineOptions, device: torch.device) -> LoadedModel:
    """Load the model.

    Raises:
        CheckpointError, ConfigError: as `load_model`.
    """
    return load_model(
        options.model,
        device=device,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        max_positions=options.inference_max_seq_length,
        limit_option=_LENGTH_OPTION,
    )


def tokenizer_of(options: EngineOptions, loaded: LoadedModel, *, adds_special_tokens: bool = True) -> TextTokens:
    """Return the tokenizer that is named, or that of the model.

    Args:
        options: may name one.
        loaded: the model.
        adds_special_tokens: let it put its tokens in front of prompts.

    Raises:
        DataError: it is missing, malformed, or has more tokens than the model.
    """
    path = options.tokenizer_model or loaded.tokenizer
    if path is None:
        text: TextTokens = ByteText()
    else:
        path = path / "tokenizer.json" if path.is_dir() else path
        text = HuggingFaceText(path, stop_tokens=loaded.stop_tokens, adds_special_tokens=adds_special_tokens)
    vocabulary = loaded.model.config.vocab_size
    if text.vocabulary > vocabulary:
        what = f"the tokenizer has {text.vocabulary} tokens, and the model {vocabulary}"
        raise DataError(
            Problem("tokenizer-size", what, str(path or options.model), "name its own with --tokenizer-model")
        )
    return text


def graph_and_cache_rows(engine: DynamicEngine) -> list[tuple[str, str]]:
    """Rows of a table about an engine: what is captured, what that took, and the cache."""
    graphs, blocks, cache = engine.runner.graphs, engine.blocks, engine.cache
    rows = []
    if engine.config.scope is InferenceCudaGraphScope.none:
        rows.append(("graphs", "none: --cuda-graph-impl local makes some"))
    else:
        seconds = sum(each.capture_seconds for each in graphs)
        num_bytes = sum(each.pool_bytes for each in graphs)
        number = f"{len(graphs)} of {len(engine.runner.ladder.buckets)} shapes"
        rows.append(("graphs", f"{number} in {seconds:.2f} s; {'; '.join(engine.coverage())}"))
        rows.append(("graph memory", f"{num_bytes / _MIB:.1f} MiB{_measured(engine)}"))
    size = f"{blocks.capacity} blocks of {blocks.block_size} tokens, {cache.nbytes / _MIB:.1f} MiB"
    rows.append(("cache", size))
    return rows


def _measured(engine: DynamicEngine) -> str:
    measured = engine.cache_plan.measured
    if measured is None:
        return ""
    of_step = f"the largest step without one {measured.step_bytes / _MIB:.1f} MiB"
    return f"; measured before the cache was sized: {measured.graph_bytes / _MIB:.1f} MiB, {of_step}"


def engine_config(
    options: EngineOptions, loaded: LoadedModel, text: TextTokens, *, expected_requests: int | None = None
) -> EngineConfig:
    """Return what the engine is built with.

    Args:
        options: of the command line.
        loaded: the model.
        text: its tokenizer.
        expected_requests: as many as there are going to be at a time, if that is known.

    Raises:
        ConfigError: sequences longer than the model has positions.
    """
    positions, wanted = loaded.model.config.max_position_embeddings, options.inference_max_seq_length
    is_bounded = loaded.model.config.position_embedding_type != "none"
    if wanted is not None and wanted > positions and is_bounded:
        what = f"sequences of {wanted} tokens, and the model has positions for {positions}"
        raise ConfigError(
            Problem("inference-sequence-length", what, _LENGTH_OPTION, f"use {positions}, or leave it out")
        )
    return EngineConfig(
        inference=options.inference,
        scope=options.scope,
        is_required=options.is_required,
        captures_at_start=not options.lazy_cuda_graphs,
        expected_requests=expected_requests,
        max_sequence_length=wanted,
        async_scheduling=options.async_scheduling,
        # A model of ours was padded, and what pads it was never trained.
        vocabulary=text.vocabulary,
        seed=options.seed,
    )
