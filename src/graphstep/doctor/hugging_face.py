"""A step for a model of Hugging Face: a small one with random weights, built from its configuration."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from graphstep.doctor.findings import SourceLine
from graphstep.doctor.target import Target
from graphstep.errors import Problem, UserInputError

_BATCH, _LENGTH, _NUM_BATCHES = 2, 32, 4
_SMALL: Final[Mapping[str, int]] = MappingProxyType(
    {
        "num_hidden_layers": 2,
        "n_layer": 2,
        "num_layers": 2,
        "vocab_size": 512,
        "intermediate_size": 128,
        "n_inner": 128,
        "ffn_dim": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "n_routed_experts": 8,
        "num_local_experts": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "max_window_layers": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 2048,
    }
)
"""The most that these fields may be: what decides how much there is to compute, and not how."""
_HEADS, _HEAD_DIM, _EXPERTS_OF_GROUP = 4, 16, 4
_TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")
_MOST_PARAMETERS: Final = 300_000_000


def model_target(path: Path) -> Target:
    """A training step of the model whose configuration lies there, made small; forward and backward of its loss.

    Args:
        path: a folder with ``config.json``, or that file. No weights are read.

    Raises:
        UserInputError: transformers is not installed, or cannot build the model.
    """
    if importlib.util.find_spec("transformers") is None:
        what = "a model of Hugging Face needs the package transformers"
        raise UserInputError(Problem("transformers-missing", what, str(path), "install transformers"))
    model = _build(path)
    model.train()
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 256))
    batches = [
        {"input_ids": ids, "labels": ids.clone()}
        for ids in (torch.randint(0, vocabulary, (_BATCH, _LENGTH), generator=generator) for _ in range(_NUM_BATCHES))
    ]

    def step(input_ids: torch.Tensor, labels: torch.Tensor) -> None:
        model.zero_grad()
        model(input_ids=input_ids, labels=labels, use_cache=False).loss.backward()

    where = SourceLine(str(path / "config.json" if path.is_dir() else path))
    return Target(
        name=f"{type(model).__name__} of {path}",
        step=step,
        batches=batches,
        where=where,
        has_libraries=True,
        functions=[step, model.forward],
    )


def _build(path: Path) -> Any:
    """The model, made small where its class allows, else as it is if it is not too large."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from_config: Callable[[Any], nn.Module] = AutoModelForCausalLM.from_config
    folder = str(path if path.is_dir() else path.parent)
    quiet = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        try:
            config = (
                AutoConfig.from_pretrained(folder, local_files_only=True)
                if path.is_dir() or path.name == "config.json"
                else AutoConfig.for_model(**_read(path))
            )
            try:
                return from_config(_made_small(config))
            except (ValueError, RuntimeError, TypeError, AttributeError, IndexError):
                config = AutoConfig.from_pretrained(folder, local_files_only=True)
                with torch.device("meta"):
                    size = sum(p.numel() for p in from_config(config).parameters())
                if size > _MOST_PARAMETERS:
                    raise
                return from_config(config)
        except Exception as error:
            text = str(error).strip().splitlines()
            what = f"transformers cannot build the model: {text[0] if text else type(error).__name__}"
            fix = "check config.json; the model has to be one for causal language modelling"
            raise UserInputError(Problem("target-model", what, str(path), fix)) from error


def _read(path: Path) -> dict[str, Any]:
    import json

    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _made_small(config: Any) -> Any:
    text = config.get_text_config()
    for name, most in _SMALL.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and value > most:
            setattr(text, name, most)
    num_groups = getattr(text, "n_group", None)
    if isinstance(num_groups, int) and num_groups > 1:
        text.n_routed_experts = _EXPERTS_OF_GROUP * num_groups
    _make_heads_few(text)
    layers = getattr(text, "num_hidden_layers", None)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(text, name, None)
        if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) > layers:
            setattr(text, name, _one_of_each(kinds, layers))
    for name in _TOKENS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value >= text.vocab_size:
            setattr(text, name, 0)
    return config


def _make_heads_few(text: Any) -> None:
    """Few heads, and the width that they make up."""
    heads = getattr(text, "num_attention_heads", None)
    if hasattr(text, "state_size"):  # Mamba: heads of the inner width.
        if isinstance(getattr(text, "num_heads", None), int) and isinstance(getattr(text, "expand", None), int):
            text.num_heads, text.n_groups = _HEADS, 1
            text.hidden_size = _HEADS * _HEAD_DIM
            text.head_dim = text.expand * _HEAD_DIM
    elif isinstance(heads, int) and heads > _HEADS:
        shared = getattr(text, "num_key_value_heads", None)
        if isinstance(shared, int):
            text.num_key_value_heads = _HEADS if shared == heads else 1 if shared == 1 else _HEADS // 2
        text.num_attention_heads = _HEADS
        text.hidden_size = _HEADS * _HEAD_DIM
        # With latent attention the width of a head is that of its rotary part.
        if isinstance(getattr(text, "head_dim", None), int) and not hasattr(text, "kv_lora_rank"):
            text.head_dim = _HEAD_DIM


def _one_of_each(kinds: list[Any], number: int) -> list[Any]:
    """So many kinds of layers, different ones first."""
    different = list(dict.fromkeys(kinds))
    return sorted([*different, *kinds][:number], key=kinds.index)
