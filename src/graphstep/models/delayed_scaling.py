"""Delayed scaling: scales of fp8 tensors that follow from the largest values of earlier steps.

Everything here runs on the device, in place, and reads nothing back, so that a graph can repeat it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import torch
from torch import Tensor

from graphstep.config.choices import Fp8Format
from graphstep.errors import ConfigError, Problem

AmaxAlgorithm = Literal["max", "most_recent"]

_FIELDS: Final = ("fp8_format", "margin", "amax_history_len", "amax_compute_algo")
_LARGEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedScaling:
    """How the scales of a tensor follow from its history. Names are those of Transformer Engine's recipe.

    Raises:
        ConfigError: values that mean nothing; all problems at once.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433): the two formats, which tensors
    take which, and one scale for each tensor. Delayed scaling: documentation of Transformer Engine's recipe.
    """

    fp8_format: Fp8Format = "hybrid"
    """``hybrid``: e4m3 for inputs and weights, e5m2 for gradients; ``e4m3``: that for all of them."""
    margin: int = 0
    """The largest value of the history lands this many powers of two below the largest one of the format, >= 0."""
    amax_history_len: int = 1024
    """Steps that a history holds, >= 1."""
    amax_compute_algo: AmaxAlgorithm = "max"
    """The scale is taken from the largest entry of the history, or from that of the step before."""

    def __post_init__(self) -> None:
        checks = (
            ("fp8_format", self.fp8_format in get_args(Fp8Format), f"use one of {', '.join(get_args(Fp8Format))}"),
            ("margin", _is_count(self.margin), "use 0 or more"),
            ("amax_history_len", _is_count(self.amax_history_len) and self.amax_history_len > 0, "use 1 or more"),
            (
                "amax_compute_algo",
                self.amax_compute_algo in get_args(AmaxAlgorithm),
                f"use one of {', '.join(get_args(AmaxAlgorithm))}",
            ),
        )
        problems = [
            Problem("fp8-recipe", f"{name} cannot be {getattr(self, name)!r}", f"DelayedScaling.{name}", fix)
            for name, is_right, fix in checks
            if not is_right
        ]
        if problems:
            raise ConfigError(problems)

    @classmethod
    def of(cls, recipe: Any) -> DelayedScaling:
        """This recipe, or the same from an object with the same attributes, such as that of Transformer Engine.

        Raises:
            ConfigError: it is a recipe of another kind.
        """
        if isinstance(recipe, cls):
            return recipe
        missing = [name for name in _FIELDS if not hasattr(recipe, name)]
        algorithm = getattr(recipe, "amax_compute_algo", None)
        if missing or algorithm not in get_args(AmaxAlgorithm):
            what = f"it has no {', '.join(missing)}" if missing else f"its amax_compute_algo is {algorithm!r}"
            raise ConfigError(
                Problem(
                    "fp8-recipe",
                    f"{type(recipe).__name__} is no recipe of delayed scaling that Float8Linear can follow: {what}",
                    "recipe",
                    "give a graphstep.models.DelayedScaling, or one of transformer_engine.common.recipe",
                )
            )
        given = recipe.fp8_format
        name = str(getattr(given, "name", given)).lower()  # An enumeration there.
        return cls(
            fp8_format=cast(Fp8Format, name),
            margin=int(recipe.margin),
            amax_history_len=int(recipe.amax_history_len),
            amax_compute_algo=cast(AmaxAlgorithm, algorithm),
        )

    @property
    def forward_dtype(self) -> torch.dtype:
        """Of inputs and weights."""
        return torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        """Of gradients of outputs."""
        return torch.float8_e5m2 if self.fp8_format == "hybrid" else torch.float8_e4m3fn

    def target(self, dtype: torch.dtype) -> float:
        """What the largest value of a history becomes in this format."""
        return math.ldexp(torch.finfo(dtype).max, -self.margin)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def begin_step(history: Tensor, scale: Tensor, target: Tensor, refreshes: Tensor, algorithm: AmaxAlgorithm) -> None:
    """At the start of a step: take the scales from the history, and open a new entry in it. In place.

    ``scale = target / amax``. It stays as it was where the history holds nothing but zeros, or something that is not
    finite.

    Args:
        history: float32 [N, T], of T tensors; the entry of the running step first.
        scale: float32 [T].
        target: float32 [T], see :meth:`DelayedScaling.target`.
        refreshes: bool scalar of the device; where it is false nothing changes.
        algorithm: which entries count.

    Cost: about a dozen kernels on a few numbers.
    Source: Transformer Engine's documentation of ``DelayedScaling``: the default formula.
    """
    amax = history.amax(dim=0) if algorithm == "max" else history[0].clone()
    is_usable = (amax > 0) & (amax < math.inf) & refreshes
    scale.copy_(torch.where(is_usable, (target / amax).clamp(max=_LARGEST), scale))
    moved_on = torch.cat((torch.zeros_like(history[:1]), history[:-1]))
    history.copy_(torch.where(refreshes, moved_on, history))


def note_amax(history: Tensor, index: int, tensor: Tensor) -> None:
    """Raise the running entry of a tensor's history to its largest absolute value. In place.

    Noting the same values twice changes nothing: a forward may be computed again.
    """
    running = history[0, index]
    running.copy_(torch.maximum(running, torch.linalg.vector_norm(tensor, math.inf).float()))


def quantise(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor * scale`` in an fp8 format. Values beyond its range become its largest ones; NaN stays NaN.

    Args:
        tensor: any floating dtype.
        scale: float32 scalar.
        dtype: the format.
    """
    largest = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype)
