"""The model of a checkpoint that ``graphstep train`` wrote: its configuration and its weights, nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphstep.checkpoint_folders import FORMAT, MODEL, STATE
from graphstep.config.data import DataConfig
from graphstep.config.layers import LayersConfig
from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.errors import CheckpointError, ConfigError, Problem
from graphstep.inference.weight_files import WeightFiles, read_json
from graphstep.models import GPTModel

_FIX = "load a checkpoint that this version of graphstep train wrote; nothing was loaded"
_Section = TypeVar("_Section", ModelConfig, MoEConfig, LayersConfig, MambaConfig, DataConfig)


@dataclass(frozen=True, slots=True)
class CheckpointModel:
    """What a checkpoint says of its model."""

    model: ModelConfig
    moe: MoEConfig
    layers: LayersConfig
    mamba: MambaConfig
    data: DataConfig
    """Names the tokenizer."""


def read_checkpoint(folder: Path) -> CheckpointModel:
    """Read the configuration of a checkpoint.

    Args:
        folder: as `graphstep.checkpoint_folders.find_checkpoint` returns it.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    path = folder / STATE
    state = read_json(path)
    if state.get("format") != FORMAT:
        raise _broken(f"expected format {FORMAT}, found format {state.get('format')!r}", path)
    sections, architecture = state.get("config"), state.get("architecture")
    if (
        not isinstance(sections, dict)
        or not isinstance(architecture, dict)
        or not isinstance(sections.get("model"), dict)
    ):
        raise _broken("the configuration of the run is missing", path)
    # The vocabulary may follow from the tokenizer: then the run's options do not say it.
    sizes = {**sections["model"], "vocab_size": architecture.get("vocab_size", sections["model"].get("vocab_size"))}
    return CheckpointModel(
        replace(_section(ModelConfig, sizes, path), attention_dropout=0.0, hidden_dropout=0.0),
        _section(MoEConfig, sections.get("moe", {}), path),
        _section(LayersConfig, sections.get("layers", {}), path),
        _section(MambaConfig, sections.get("mamba", {}), path),
        _section(DataConfig, sections.get("data", {}), path),
    )


def check_checkpoint(model: GPTModel, files: WeightFiles, *, where: str) -> None:
    """Do the weights fit? Nothing is read of them but names and shapes; the model may be on the meta device.

    Raises:
        CheckpointError: weights that are missing, unknown or of other shapes; the first of them, and how many.
    """
    ours = _weights(model)
    problems = [
        f"{name}: expected {list(tensor.shape)}, found {list(files.shape(name)) if name in files else 'nothing'}"
        for name, tensor in ours.items()
        if name not in files or files.shape(name) != tuple(tensor.shape)
    ]
    problems += [
        f"{name}: its type is none that weights are computed with"
        for name, tensor in ours.items()
        if name in files and tensor.is_floating_point() and files.dtype(name) is None
    ]
    problems += [f"{name}: expected nothing, found {list(files.shape(name))}" for name in files if name not in ours]
    if problems:
        shown = problems[:5] + ([f"... and {len(problems) - 5} more"] if len(problems) > 5 else [])
        raise CheckpointError([Problem("checkpoint-mismatch", what, where, _FIX) for what in shown])


def fill_from_checkpoint(model: GPTModel, files: WeightFiles) -> None:
    """Copy all weights, after `check_checkpoint`."""
    with torch.no_grad():
        for name, tensor in _weights(model).items():
            tensor.copy_(files.tensor(name))


def _weights(model: GPTModel) -> dict[str, Tensor]:
    """Each once, by the first of its names."""
    ours: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            ours[name] = value.detach()
    return ours


def weights_of_checkpoint(folder: Path) -> WeightFiles:
    """Open its weights.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return WeightFiles([folder / MODEL])


def _section(kind: Callable[..., _Section], values: Mapping[str, Any], path: Path) -> _Section:
    """Build a section of a configuration. What it does not say has its default, as options have that are new."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known) if isinstance(values, dict) else ["a section that is no object"]
    if unknown:
        raise _broken(f"options that are not known here: {', '.join(unknown)}", path)
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return kind(**plain)
    except ConfigError as error:
        raise CheckpointError(error.problems) from error
    except (TypeError, AttributeError) as error:  # null, where no rule expects it
        raise _broken(f"an option that has no such value: {error}", path) from error


def _broken(what: str, path: Path) -> CheckpointError:
    return CheckpointError(Problem("checkpoint-damaged", what, str(path), _FIX))
