"""Checkpoints: written whole or not at all, checked whole before anything is changed, and free of pickle.

A checkpoint is a folder ``iter_0000100`` with ``model.safetensors``, ``optimizer.safetensors``, ``random.safetensors``
and ``state.json``; ``latest_checkpointed_iteration.txt`` beside it names the newest. Saving writes a temporary folder,
flushes it to disk, renames it, and only then moves the pointer, so a crash at any moment leaves the older one in use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphstep.checkpoint_folders import FORMAT, MODEL, STATE, TRACKER, folder_name
from graphstep.errors import CheckpointError, Problem
from graphstep.training.files import (
    publish_folder,
    remove_leftovers,
    temporary_name,
    write_text_atomically,
)
from graphstep.training.option_differences import option_problems, precision_problem
from graphstep.training.tensors import TensorSpec, differences, spec_of

OPTIMIZER, RANDOM = "optimizer.safetensors", "random.safetensors"

_ALWAYS_FP32 = (".expert_bias",)
"""Ends of the names of buffers that say nothing about the precision of a run."""

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """All that a run needs to go on as if it had not stopped. Tensors may be live: saving only reads them."""

    iteration: int
    """Completed steps."""
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    """States of the default generators, uint8."""
    architecture: Mapping[str, Any]
    """What must be equal in the run that loads this, as JSON values."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """State of the training data iterator, as JSON values."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Losses seen so far and the like, as JSON values."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration, for readers; loading does not use it."""


def save_checkpoint(root: Path, state: TrainingState) -> Path:
    """Write a checkpoint below ``root`` and make it the latest.

    Returns:
        The new folder. A checkpoint of the same iteration is replaced.

    Raises:
        CheckpointError: the disk refused; earlier checkpoints are intact and still the latest.
    """
    target = root / folder_name(state.iteration)
    temporary = temporary_name(target)
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        temporary.mkdir()
        metadata = {"iteration": str(state.iteration)}
        for name, tensors in ((MODEL, state.model), (OPTIMIZER, state.optimizer), (RANDOM, state.random)):
            save_file({k: t.detach().contiguous() for k, t in tensors.items()}, temporary / name, metadata)
        text = json.dumps(
            {
                "format": FORMAT,
                "iteration": state.iteration,
                "architecture": state.architecture,
                "data": state.data,
                "progress": state.progress,
                "config": state.config,
            },
            indent=1,
            allow_nan=False,
        )
        (temporary / STATE).write_text(text + "\n", encoding="utf-8")
        publish_folder(temporary, target)
        write_text_atomically(root / TRACKER, f"{state.iteration}\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            Problem(
                "checkpoint-write",
                f"the checkpoint of iteration {state.iteration} was not written: {error}",
                where=str(target),
                fix="free space or choose another folder; earlier checkpoints are intact",
            )
        ) from error
    return target


class Checkpoint:
    """A checkpoint folder that was read and checked; nothing is loaded until :meth:`restore`.

    Args:
        folder: as :func:`graphstep.checkpoint_folders.find_checkpoint` returned it.
        model: live tensors to load into, by name.
        optimizer: live tensors to load into, by name.
        random: states of the default generators; one that was not saved (another kind of device) is no error.
        architecture: must equal what was saved.

    Raises:
        CheckpointError: with all that is missing or truncated, and the options that differ; if none does, with the
            first tensors that do not fit.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        random: Mapping[str, Tensor],
        architecture: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self._targets = {MODEL: model, OPTIMIZER: optimizer}
        problems: list[Problem] = []
        state = _read_state(folder / STATE, problems)
        self.iteration: int = state.get("iteration", 0)
        self.data: dict[str, Any] = state.get("data", {})
        self.progress: dict[str, Any] = state.get("progress", {})
        files = {**self._targets, RANDOM: random}
        found = {name: _read_specs(folder / name, self.iteration if state else None, problems) for name in files}
        expected = {name: {key: spec_of(t) for key, t in targets.items()} for name, targets in files.items()}
        options = _option_problems(folder, expected[MODEL], found[MODEL], architecture, state.get("architecture"))
        problems += options or _tensor_problems(folder, expected, found)
        if problems:
            raise CheckpointError(problems)

    def random(self) -> dict[str, Tensor]:
        """Return the saved states of the default generators."""
        return dict(_tensors(self.folder / RANDOM))

    def restore(self) -> None:
        """Copy the saved tensors into the live ones, whose addresses stay."""
        with torch.no_grad():
            for name, targets in self._targets.items():
                for key, tensor in _tensors(self.folder / name):
                    targets[key].copy_(tensor)


def _tensors(path: Path) -> list[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 - not a dict


def _read_specs(path: Path, iteration: int | None, problems: list[Problem]) -> dict[str, TensorSpec] | None:
    """Return the specs of a file's tensors, or None after adding a problem. The library checks the size of the file."""
    try:
        if not path.is_file():
            problems.append(_broken(path, "the file is missing"))
            return None
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            written = (file.metadata() or {}).get("iteration")
            specs = {n: TensorSpec(tuple(s.get_shape()), _DTYPES[s.get_dtype()]) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        problems.append(_broken(path, f"the file is truncated or damaged: {error}"))
        return None
    except KeyError as error:
        problems.append(_broken(path, f"the file holds a tensor of the unknown dtype {error}"))
        return None
    if iteration is not None and written != str(iteration):
        problems.append(_broken(path, f"the file is of iteration {written}, {STATE} of iteration {iteration}"))
    return specs


def _read_state(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Return the parsed state, or an empty dict after adding a problem."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(_broken(path, f"the file cannot be read: {error.strerror}"))
        return {}
    except (ValueError, RecursionError) as error:
        problems.append(_broken(path, f"the file is truncated or damaged: {error}"))
        return {}
    types = {"format": int, "iteration": int, "architecture": dict, "data": dict, "progress": dict}
    wrong = [k for k, kind in types.items() if not isinstance(state, dict) or not isinstance(state.get(k), kind)]
    if wrong:
        problems.append(_broken(path, f"missing or of the wrong type: {', '.join(wrong)}"))
        return {}
    if not isinstance(state["data"].get("train", {}), dict):
        problems.append(_broken(path, "the state of the training data is of the wrong type"))
        return {}
    if state["format"] != FORMAT:
        problems.append(_broken(path, f"expected format {FORMAT}, found format {state['format']}"))
        return {}
    return dict(state)


def _option_problems(
    folder: Path,
    expected: Specs,
    found: Specs | None,
    here: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
) -> list[Problem]:
    """Return the options of architecture and precision that differ, as far as the files could be read."""
    problems = [] if saved is None else option_problems(here, saved, where=str(folder / STATE))
    if found is not None:
        both = [
            {name: spec for name, spec in specs.items() if not name.endswith(_ALWAYS_FP32)}
            for specs in (expected, found)
        ]
        types = [{spec.dtype for spec in specs.values()} for specs in both]
        precision = precision_problem(*types, where=str(folder / MODEL))
        problems += [precision] if precision else []
    return problems


def _tensor_problems(
    folder: Path, expected: Mapping[str, Specs], found: Mapping[str, Specs | None], *, limit: int = 5
) -> list[Problem]:
    """Return the first tensors that do not fit, and how many more there are."""
    problems: list[Problem] = []
    fix = "use the model options of the run that wrote it; nothing was loaded"
    for name, specs in expected.items():
        there = found[name]
        if there is None:
            continue
        if name == RANDOM:
            there = {key: spec for key, spec in there.items() if key in specs}
            specs = {key: spec for key, spec in specs.items() if key == "cpu" or key in there}  # noqa: PLW2901
        problems += differences(specs, there, code="checkpoint-mismatch", where=str(folder / name), fix=fix)
    rest = len(problems) - limit
    if rest > 0:
        what = f"... and {rest} more {'tensor' if rest == 1 else 'tensors'}"
        problems[limit:] = [Problem("checkpoint-mismatch", what, where=str(folder), fix=fix)]
    return problems


def _broken(path: Path, what: str) -> Problem:
    fix = "load an older checkpoint by naming its iter_... folder; nothing was loaded"
    return Problem("checkpoint-damaged", what, where=str(path), fix=fix)
