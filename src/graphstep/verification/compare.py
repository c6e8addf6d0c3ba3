"""Two tensors that should be the same, bit for bit or within a tolerance: where and by how much they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.errors import ConfigError, Problem

_MISSING: Final = "none"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a replay may be from eager: ``atol + rtol * |eager|`` for each entry. Zeros mean the same bits.

    For kernels that differ from run to run, such as those that add up with atomics.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) and number >= 0 for number in (self.rtol, self.atol)):
            what = f"a tolerance is a finite number that is not negative, got rtol={self.rtol} and atol={self.atol}"
            raise ConfigError(Problem("verify-tolerance", what, "verify", "leave them out for the same bits"))

    @property
    def is_exact(self) -> bool:
        """The same bits are asked for."""
        return self.rtol == self.atol == 0


class Tolerances:
    """The tolerance of each module: that of the first pattern which its path matches, or the general one.

    Args:
        general: for all that no pattern matches.
        of_modules: path pattern to tolerance; ``layers.*.attn`` is for what lies in such a module too.
    """

    def __init__(self, general: Tolerance, of_modules: Mapping[str, Tolerance]) -> None:
        self._general, self._patterns = general, dict(of_modules)

    def of(self, module: str) -> Tolerance:
        """For a module by its path."""
        steps = module.split(".")
        for pattern, tolerance in self._patterns.items():
            wanted = pattern.split(".")
            if len(steps) >= len(wanted) and all(map(fnmatchcase, steps, wanted)):
                return tolerance
        return self._general

    def __str__(self) -> str:
        named = [f"{pattern}: rtol {t.rtol:g}, atol {t.atol:g}" for pattern, t in self._patterns.items()]
        if not self._general.is_exact:
            named.insert(0, f"rtol {self._general.rtol:g}, atol {self._general.atol:g}")
        return "; ".join(named)


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor of a replay differs from that of an eager run."""

    tensor: str
    """Its name within the module, such as ``weight`` or ``result[0]``."""
    max_error: float
    """Largest absolute difference; infinite where one of the two is no number, or the shapes differ."""
    index: tuple[int, ...]
    """Where it is; the first entry with other bits, where no value differs."""
    eager: str
    """What eager execution has there."""
    replayed: str
    """What the replay has there."""
    num_different: int
    """Entries that differ."""
    num_elements: int
    is_within: bool = False
    """It is within the tolerance."""

    def __str__(self) -> str:
        if not self.num_elements:
            return f"{self.tensor}: eager has {self.eager}, the replay {self.replayed}"
        place = list(self.index) if self.index else ""
        return (
            f"{self.tensor}{place}: eager has {self.eager}, the replay {self.replayed}, "
            f"{self.num_different} of {self.num_elements} entries differ"
        )

    def to_json(self) -> dict[str, Any]:
        """The same as plain data. An infinite error is ``None``."""
        return {
            "tensor": self.tensor,
            "max_error": self.max_error if math.isfinite(self.max_error) else None,
            "index": list(self.index),
            "eager": self.eager,
            "replayed": self.replayed,
            "num_different": self.num_different,
            "num_elements": self.num_elements,
            "is_within_tolerance": self.is_within,
        }


def difference(name: str, eager: Tensor | None, replayed: Tensor | None, tolerance: Tolerance) -> Difference | None:
    """Compare two tensors on the host, or tell that one of them is missing. ``None`` if they have the same bits."""
    if eager is None or replayed is None:
        if eager is replayed:
            return None
        return Difference(name, math.inf, (), _layout(eager), _layout(replayed), 0, 0)
    if eager.shape != replayed.shape or eager.dtype != replayed.dtype:
        return Difference(name, math.inf, (), _layout(eager), _layout(replayed), 0, 0)
    if eager.layout is not torch.strided or eager.is_quantized:
        eager, replayed = eager.to_dense(), replayed.to_dense()
    if (is_other := _other_bits(eager, replayed)) is None:
        return None
    error = _errors(eager, replayed)
    # Of entries that differ in their bits alone, such as 0 and -0, the first counts.
    flat = int(torch.where(is_other, error, -1.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), eager.shape))
    allowed = tolerance.atol + tolerance.rtol * _values(eager).abs()
    return Difference(
        tensor=name,
        max_error=float(error[flat]),
        index=index,
        eager=_entry(eager, flat),
        replayed=_entry(replayed, flat),
        num_different=int(is_other.sum()),
        num_elements=eager.numel(),
        is_within=not tolerance.is_exact and bool((error <= allowed).all()),
    )


def same_bits(left: Tensor, right: Tensor) -> bool:
    """True for equal shapes, types and bits; NaN equals NaN of the same bits."""
    return left.shape == right.shape and left.dtype == right.dtype and _other_bits(left, right) is None


def _other_bits(left: Tensor, right: Tensor) -> Tensor | None:
    """For each entry, flat, whether its bits differ; ``None`` if none does."""
    if not left.numel():
        return None
    raw = [torch.view_as_real(t) if t.is_complex() else t for t in (left.resolve_conj(), right.resolve_conj())]
    raw = [t.resolve_neg().contiguous().reshape(left.numel(), -1).view(torch.uint8) for t in raw]
    if torch.equal(*raw):
        return None
    return (raw[0] != raw[1]).any(1)


def _values(tensor: Tensor) -> Tensor:
    """Flat, in a type in which differences are exact enough."""
    return (tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()).reshape(-1)


def _errors(eager: Tensor, replayed: Tensor) -> Tensor:
    left, right = _values(eager), _values(replayed)
    error = (left - right).abs()
    error = torch.where(left == right, 0.0, error)  # Infinities of one sign.
    error = torch.where(left.isnan() & right.isnan(), 0.0, error)
    return error.nan_to_num(nan=math.inf, posinf=math.inf)


def _entry(tensor: Tensor, flat: int) -> str:
    value = tensor.reshape(-1)[flat].item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _layout(tensor: Tensor | None) -> str:
    return _MISSING if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
