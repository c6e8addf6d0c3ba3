"""Weights in the safetensors files of a folder: looked up by name, mapped into memory, read when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphstep.errors import CheckpointError, Problem

INDEX: Final = "model.safetensors.index.json"

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class WeightFiles:
    """The tensors of some files. Files are opened at once, and closed by `close` or by ``with``.

    Args:
        paths: safetensors files, without a name in two of them.

    Raises:
        CheckpointError: files that are missing or damaged, or share a name; all problems at once.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._stack = ExitStack()
        self._holders: dict[str, Any] = {}
        problems: list[Problem] = []
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                problems.append(_damaged(path, f"the file cannot be read, is truncated or damaged: {error}"))
                continue
            twice = [name for name in names if name in self._holders]
            if twice:
                problems.append(_damaged(path, f"{twice[0]} is in another file, too"))
            self._holders.update(dict.fromkeys(names, file))
        if problems:
            self.close()
            raise CheckpointError(problems)

    @classmethod
    def of_folder(cls, folder: Path) -> WeightFiles:
        """Open what the index of a folder names, or all of its ``*.safetensors`` if it has none.

        Raises:
            CheckpointError: there are none, or what the class raises.
        """
        index = folder / INDEX
        if index.is_file():
            return cls(sorted({folder / name for name in _names_of_index(index)}))
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            what = "the folder has a config.json and no *.safetensors"
            fix = "download the weights as safetensors; pickled ones (*.bin, *.pt) are not read"
            raise CheckpointError(Problem("weights-missing", what, str(folder), fix))
        # Some publish the same weights once more under this name, for their own code.
        return cls([path for path in paths if path.name != "consolidated.safetensors"] or paths)

    def __contains__(self, name: object) -> bool:
        return name in self._holders

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._holders[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """Type of a tensor, without reading it; ``None`` for types that no weight of ours has."""
        return _DTYPES.get(self._holders[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """Read a tensor: on the CPU, over the mapped file."""
        tensor: Tensor = self._holders[name].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._stack.close()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_json(path: Path) -> dict[str, Any]:
    """Read an object.

    Raises:
        CheckpointError: it cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(_damaged(path, f"the file cannot be read: {error.strerror or error}")) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_damaged(path, f"the file is truncated or damaged: {error}")) from error
    if not isinstance(found, dict):
        raise CheckpointError(_damaged(path, f"expected a JSON object, found {type(found).__name__}"))
    return found


def _names_of_index(path: Path) -> set[str]:
    weight_map = read_json(path).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and _is_plain(name) for name in names):
        raise CheckpointError(_damaged(path, "expected a weight_map from names to files of this folder"))
    return set(names)


def _is_plain(name: str) -> bool:
    """A name with a folder in it could lead anywhere."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


def _damaged(path: Path, what: str) -> Problem:
    return Problem("weights-damaged", what, str(path), "download or copy the folder again; nothing was loaded")
