"""Models for inference: from checkpoints of ``graphstep train``, and from folders of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from graphstep.checkpoint_folders import STATE, TRACKER, find_checkpoint
from graphstep.config.layers import LayersConfig
from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.errors import CheckpointError, Problem
from graphstep.inference.checkpoint_model import fill_from_checkpoint, read_checkpoint, weights_of_checkpoint
from graphstep.inference.hugging_face import read_config, stop_tokens
from graphstep.inference.hugging_face_weights import fill_from_hugging_face
from graphstep.inference.weight_files import WeightFiles, read_json
from graphstep.models import GPTModel, initialize_weights
from graphstep.models.initialization import WeightInitializer

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
_GENERATION: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, and what generating with it takes."""

    model: GPTModel
    folder: Path
    """Where it came from: of several checkpoints, the one."""
    tokenizer: Path | None
    """A ``tokenizer.json``, which may not exist; ``None``: bytes."""
    stop_tokens: tuple[int, ...]
    """Tokens that end a text, as far as the folder names them."""


def load_model(
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
    limit_option: str = "max_positions",
) -> LoadedModel:
    """Load a model. Files are mapped into memory, so that it needs little more than its weights.

    Args:
        folder: a folder of Hugging Face, a checkpoint, or a folder of checkpoints, of which the latest is taken.
        device: where its weights go.
        dtype: of its weights; ``None``: that of the files.
        max_positions: the longest sequence that is wanted, see `read_config`. Not looked at with checkpoints.
        limit_option: what sets ``max_positions``, for errors.

    Raises:
        CheckpointError: missing, damaged, or files that do not fit each other.
        ConfigError: a model that cannot be run here, with everything that is in the way.
    """
    path = Path(folder)
    if _is_hugging_face(path):
        return _load_hugging_face(path, torch.device(device), dtype, max_positions, limit_option)
    found = find_checkpoint(path, otherwise=f"name a folder of Hugging Face, with {CONFIG} and *.safetensors")
    described = read_checkpoint(found)
    with weights_of_checkpoint(found) as files:
        model = _build(
            described.model,
            described.moe,
            described.layers,
            described.mamba,
            device=torch.device(device),
            dtype=dtype or _dtype_of(files, "embedding.weight", found),
        )
        fill_from_checkpoint(model, files, where=str(found))
    tokenizer = described.data.tokenizer_model
    uses_bytes = described.data.tokenizer_type == "ByteTokenizer" or tokenizer is None
    return LoadedModel(model, found, None if uses_bytes else Path(str(tokenizer)), ())


def _is_hugging_face(path: Path) -> bool:
    try:
        is_checkpoint = (path / STATE).is_file() or (path / TRACKER).is_file()
        return (path / CONFIG).is_file() and not is_checkpoint
    except OSError:
        return False  # `find_checkpoint` says what is wrong.


def _load_hugging_face(
    path: Path, device: torch.device, dtype: torch.dtype | None, max_positions: int | None, limit_option: str
) -> LoadedModel:
    where = str(path / CONFIG)
    described = read_config(
        read_json(path / CONFIG), where=where, max_positions=max_positions, limit_option=limit_option
    )
    stops = described.stop_tokens
    if (path / _GENERATION).is_file():
        stops = stop_tokens(read_json(path / _GENERATION)) or stops
    with WeightFiles.of_folder(path) as files:
        model = _build(
            described.model,
            described.moe,
            LayersConfig(),
            MambaConfig(),
            device=device,
            dtype=dtype or _dtype_of(files, "model.embed_tokens.weight", path),
        )
        if model.rotary is not None and not described.rotation.is_plain:
            model.rotary.fill(*described.rotation.frequencies(model.rotary.base, model.rotary.channels))
        fill_from_hugging_face(model, described, files, where=str(path))
    return LoadedModel(model, path, path / TOKENIZER, stops)


def _dtype_of(files: WeightFiles, name: str, path: Path) -> torch.dtype:
    dtype = files.dtype(name) if name in files else None
    if dtype is None:
        what = f"{name}: expected weights of an embedding, found {'another type' if name in files else 'nothing'}"
        raise CheckpointError(Problem("weights-mismatch", what, str(path), "download or copy the folder again"))
    return dtype


def _build(
    config: ModelConfig,
    moe: MoEConfig,
    layers: LayersConfig,
    mamba: MambaConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> GPTModel:
    """A model whose weights have no values yet. Tables have theirs; nothing is drawn."""
    model = GPTModel(config, moe=moe, layers=layers, mamba=mamba, device="meta", dtype=dtype)
    model.to_empty(device=device)
    initialize_weights(model, _NothingDrawn(std=1.0, num_layers=config.num_layers))
    return model.eval()


class _NothingDrawn(WeightInitializer):
    """Leaves alone what would be random: it is read from files."""

    def _fill_normal(self, weight: Tensor, std: float) -> None:
        pass
