"""Models for inference: from checkpoints of ``graphstep train``, and from folders of Hugging Face."""

from __future__ import annotations

import logging
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
from graphstep.errors import CheckpointError, ConfigError, GraphstepError, Problem
from graphstep.inference.checkpoint_model import (
    check_checkpoint,
    fill_from_checkpoint,
    read_checkpoint,
    weights_of_checkpoint,
)
from graphstep.inference.hugging_face import read_config, stop_tokens
from graphstep.inference.hugging_face_weights import (
    check_hugging_face,
    fill_from_hugging_face,
    has_own_head,
)
from graphstep.inference.weight_files import WeightFiles, read_json
from graphstep.models import GPTModel, initialize_weights
from graphstep.models.initialization import WeightInitializer

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
_GENERATION: Final = "generation_config.json"

_log = logging.getLogger(__name__)


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
        MemoryError: it is larger than the memory there is.
    """
    if dtype is not None and not dtype.is_floating_point:
        what = f"weights of type {dtype}, which cannot be computed with"
        raise ConfigError(Problem("load-dtype", what, "load_model, argument dtype", "use torch.bfloat16"))
    if max_positions is not None and max_positions < 1:
        what = f"sequences of {max_positions} tokens"
        raise ConfigError(Problem("load-positions", what, limit_option, "use a number above 0, or leave it out"))
    path = Path(folder)
    if _is_hugging_face(path):
        return _load_hugging_face(path, torch.device(device), dtype, max_positions, limit_option)
    found = find_checkpoint(path, otherwise=f"name a folder of Hugging Face, with {CONFIG} and *.safetensors")
    described = read_checkpoint(found)
    with weights_of_checkpoint(found) as files:
        own_dtype = _dtype_of(files, "embedding.weight", found)
        _check_layers(described.model.num_layers, "layers", files, found)
        model = _outline(
            described.model, described.moe, described.layers, described.mamba, dtype or own_dtype, str(found)
        )
        check_checkpoint(model, files, where=str(found))
        _allocate(model, torch.device(device))
        fill_from_checkpoint(model, files)
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
        own_dtype = _dtype_of(files, "model.embed_tokens.weight", path)
        _check_layers(described.model.num_layers, "model.layers", files, path)
        if not described.model.untie_embeddings_and_output_weights and has_own_head(files):
            _log.warning("%s: tie_word_embeddings is true, and lm_head.weight is another matrix: it is used", where)
            described = described.untied()
        model = _outline(described.model, described.moe, LayersConfig(), MambaConfig(), dtype or own_dtype, where)
        check_hugging_face(model, described, files, where=str(path))
        _allocate(model, device)
        if model.rotary is not None and not described.rotation.is_plain:
            model.rotary.fill(*described.rotation.frequencies(model.rotary.base, model.rotary.channels))
        fill_from_hugging_face(model, described, files)
    return LoadedModel(model, path, path / TOKENIZER, stops)


def _dtype_of(files: WeightFiles, name: str, path: Path) -> torch.dtype:
    dtype = files.dtype(name) if name in files else None
    if dtype is None:
        what = f"{name}: expected weights of an embedding, found {'another type' if name in files else 'nothing'}"
        raise CheckpointError(Problem("weights-mismatch", what, str(path), "download or copy the folder again"))
    return dtype


def _check_layers(number: int, prefix: str, files: WeightFiles, path: Path) -> None:
    """Before anything is built: a number that is wrong could be one that no memory holds."""
    if not any(name.startswith(f"{prefix}.{number - 1}.") for name in files):
        what = f"{number} layers in the configuration, and the weights have no {prefix}.{number - 1}"
        fix = "take configuration and weights from the same place; nothing was loaded"
        raise CheckpointError(Problem("weights-mismatch", what, str(path), fix))


def _outline(
    config: ModelConfig, moe: MoEConfig, layers: LayersConfig, mamba: MambaConfig, dtype: torch.dtype, where: str
) -> GPTModel:
    """A model without memory: whether weights fit is known before any is taken."""
    try:
        return GPTModel(config, moe=moe, layers=layers, mamba=mamba, device="meta", dtype=dtype).eval()
    except (RuntimeError, TypeError, OverflowError) as error:
        if isinstance(error, GraphstepError):
            raise
        what = f"sizes that no tensor can have: {str(error).splitlines()[0]}"
        raise CheckpointError(Problem("weights-mismatch", what, where, "check the file; nothing was loaded")) from error


def _allocate(model: GPTModel, device: torch.device) -> None:
    """Take the memory; weights have no values yet. Tables have theirs; nothing is drawn."""
    try:
        model.to_empty(device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "alloc" not in str(error):
            raise
        raise MemoryError(f"no memory for a model of {model.num_parameters():,} parameters") from error
    initialize_weights(model, _NothingDrawn(std=1.0, num_layers=model.config.num_layers))


class _NothingDrawn(WeightInitializer):
    """Leaves alone what would be random: it is read from files."""

    def _fill_normal(self, weight: Tensor, std: float) -> None:
        pass
