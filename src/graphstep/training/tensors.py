"""Named tensors: the state of a model, and the comparison of what is expected with what is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphstep.errors import Problem


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the live parameters and persistent buffers by name; a tensor with several names appears once.

    The tensors are detached and share memory with the model, so copying into them loads the model in place.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[name] = value.detach()
    return found


def differences(
    expected: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec], *, code: str, where: str, fix: str
) -> list[Problem]:
    """Return one problem per tensor that is missing, unexpected, or of another shape or dtype.

    Args:
        expected: specs by name.
        found: specs by name.
        code: code of the problems.
        where: prefix of their ``where``, such as a file.
        fix: their advice.
    """
    problems: list[Problem] = []
    for name, spec in expected.items():
        other = found.get(name)
        if other is None:
            what = f"{name}: expected {spec}, found nothing"
        elif other != spec:
            what = f"{name}: expected {spec}, found {other}"
        else:
            continue
        problems.append(Problem(code, what, where=where, fix=fix))
    problems += [
        Problem(code, f"{name}: expected nothing, found {spec}", where=where, fix=fix)
        for name, spec in found.items()
        if name not in expected
    ]
    return problems
