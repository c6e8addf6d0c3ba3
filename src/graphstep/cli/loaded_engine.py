"""What ``graphstep generate`` and ``graphstep serve`` do alike: device, model, tokenizer, and options of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import torch

from graphstep.config import InferenceConfig, InferenceCudaGraphScope
from graphstep.errors import ConfigError, DataError, Problem
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.load import LoadedModel, load_model
from graphstep.inference.text import ByteText, HuggingFaceText, TextTokens

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


def engine_config(options: EngineOptions, loaded: LoadedModel, text: TextTokens) -> EngineConfig:
    """Return what the engine is built with.

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
        max_sequence_length=wanted,
        async_scheduling=options.async_scheduling,
        # A model of ours was padded, and what pads it was never trained.
        vocabulary=text.vocabulary,
        seed=options.seed,
    )
