"""Rotation frequencies that were changed for longer sequences: linear, dynamic, llama3 and yarn.

What changes the frequencies by the length of a sequence (dynamic) has no effect up to the positions that a model has,
and there are no more here. Names are those of ``rope_scaling`` and ``rope_parameters`` in files of Hugging Face.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""The kinds that are known, and the numbers that each of them needs."""
_MORE: Final = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ORIGINAL: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The frequencies of a model."""

    kind: str
    values: Mapping[str, Any]
    """Of the file, checked by `rotation_problems`."""
    original_positions: int
    """Positions that the model was first trained with."""

    @property
    def is_plain(self) -> bool:
        """Are they those of the base alone?"""
        return self.kind in ("default", "dynamic")

    def frequencies(self, base: float, channels: int) -> tuple[Tensor, float]:
        """Return theta [channels / 2] in float32 on the CPU, and what cosines and sines are multiplied by."""
        exponents = torch.arange(0, channels, 2, dtype=torch.float32, device="cpu") / channels
        theta = 1.0 / torch.pow(base, exponents)
        if self.kind == "linear":
            return theta / self.values["factor"], 1.0
        if self.kind == "llama3":
            return self._llama3(theta), 1.0
        if self.kind == "yarn":
            return self._yarn(theta, base, channels)
        return theta, 1.0

    def _llama3(self, theta: Tensor) -> Tensor:
        """High frequencies stay, low ones are divided, those between are in part.

        Source: Llama 3.1 (Grattafiori et al. 2024, "The Llama 3 Herd of Models") and its published code.
        """
        low, high, factor = (float(self.values[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
        turns = theta * (self.original_positions / (2 * math.pi))  # of a channel over the original positions
        kept: Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return theta * (kept + (1.0 - kept) / factor)

    def _yarn(self, theta: Tensor, base: float, channels: int) -> tuple[Tensor, float]:
        """Channels that turn often stay, those that turn less than once are divided, with a ramp between.

        Source: Peng et al. 2023, "YaRN", section 3.2.
        """
        values, factor = self.values, self.values["factor"]

        def channel_of(turns: float) -> float:
            return channels * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

        first = channel_of(values.get("beta_fast") or 32)
        last = channel_of(values.get("beta_slow") or 1)
        if values.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, channels - 1)
        width = last - first if last != first else 0.001
        divided = ((torch.arange(channels // 2, dtype=torch.float32, device="cpu") - first) / width).clamp(0.0, 1.0)
        scale = values.get("attention_factor")
        if scale is None:
            more, of_all = values.get("mscale"), values.get("mscale_all_dim")
            scale = _magnitude(factor, more) / _magnitude(factor, of_all) if more and of_all else _magnitude(factor, 1)
        return theta * (divided / factor + (1.0 - divided)), float(scale)


def read_rotation(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotation:
    """Read what `rotation_problems` has found nothing wrong with.

    Args:
        rope: ``rope_parameters`` or ``rope_scaling``; may be empty.
        config: of the model.
    """
    positions = config["max_position_embeddings"]
    original = config.get(_ORIGINAL) or rope.get(_ORIGINAL) or positions
    values = dict(rope)
    if values.get("factor") is None:
        values["factor"] = positions / original
    return Rotation(_kind(rope), values, original)


def rotation_problems(rope: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """What is in the way, and what to do about it.

    Args:
        rope: as for `read_rotation`.
        name: of the field that it stands in.
    """
    kind = _kind(rope)
    if kind not in _FACTORS:
        known = ", ".join(_FACTORS)
        yield (
            f"rotation frequencies that are scaled by {kind!r} ({name}.rope_type); known are {known}",
            "use a model without",
        )
        return
    optional = ("factor",) if kind == "yarn" and rope.get(_ORIGINAL) is not None else ()
    wrong = [each for each in _FACTORS[kind] if not _is_positive(rope.get(each), may_be_missing=each in optional)]
    if kind == "yarn":
        wrong += [each for each in _MORE if not _is_positive(rope.get(each), may_be_missing=True)]
        wrong += ["truncate"] if not isinstance(rope.get("truncate", True), bool) else []
    wrong += [_ORIGINAL] if not _is_positive(rope.get(_ORIGINAL), may_be_missing=True) else []
    if kind == "llama3" and not wrong and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        wrong = ["low_freq_factor", "high_freq_factor"]
    if wrong:
        fields = ", ".join(f"{name}.{each}" for each in wrong)
        yield f"numbers of a rotation of type {kind} that are missing or malformed: {fields}", "download it again"


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _is_positive(value: object, *, may_be_missing: bool = False) -> bool:
    if value is None:
        return may_be_missing
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
