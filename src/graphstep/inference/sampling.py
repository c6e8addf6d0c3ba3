"""Draws the next token of each request from its logits: on the device, without a host read, inside a graph or not.

A request's tokens follow from its seed, its settings and its logits alone. Its random numbers are a hash of seed and
position, one a token; and probabilities are added up as whole numbers, whose sum does not depend on the order in which
a device adds them. So they do not change with the requests beside it, with the bucket, or with what those want.

Shapes: R requests, V vocabulary, K alternatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from graphstep.inference.requests import NOT_FINITE, DrawNeeds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WEIGHT_OF_BEST = 2.0**40
"""Weight of the most likely token. Up to 2**22 tokens, weights add up without overflow; a token less likely than 2**-40
of the best is never drawn."""
_UNIFORM_BITS = 53
_MOST_AT_ONCE = 2**22
"""Logits that are drawn from together."""
_MOST_PARTS, _LEAST_PARTS, _LONG_ROW = 256, 16, 8192


class DrawSettings(NamedTuple):
    """The settings of the requests in a step, each [R]."""

    keys: Tensor
    """int64, of `requests.draw_key`."""
    temperatures: Tensor
    """float32; 0 for the most likely token."""
    top_ps: Tensor
    """float32."""
    top_ks: Tensor
    """int32; 0 for all."""
    positions: Tensor
    """Position of the token to be drawn, any integer type."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What `sample` returns."""

    tokens: Tensor
    """[R], int64; `requests.NOT_FINITE` where logits are NaN or infinite."""
    logprobs: Tensor | None
    """[R], float32, of those tokens among all, whatever temperature and filters are; ``None`` if nobody needs them."""
    top_tokens: Tensor | None
    """[R, K], int64, the most likely ones first."""
    top_logprobs: Tensor | None

    def packed(self) -> Tensor:
        """Return all of it as one int32 tensor [R, 1 to 2 + 2K]: the host reads it in one copy, see `unpack`."""
        tokens_R1 = self.tokens.to(torch.int32)[:, None]
        if self.logprobs is None:
            return tokens_R1
        columns = [tokens_R1, self.logprobs.view(torch.int32)[:, None]]
        if self.top_tokens is not None and self.top_logprobs is not None:
            columns += [self.top_tokens.to(torch.int32), self.top_logprobs.view(torch.int32)]
        return torch.cat(columns, dim=1)


class HostDraws(NamedTuple):
    """What `Scheduler.commit` takes."""

    tokens: list[int]
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None


def unpack(packed: NDArray[np.int32], needs: DrawNeeds) -> HostDraws:
    """Read on the host what `Drawn.packed` has put together.

    Args:
        packed: as a C-contiguous array; rows of padding may be left out.
        needs: those that `sample` was given.
    """
    tokens = packed[:, 0].tolist()
    if not needs.has_logprobs:
        return HostDraws(tokens, None, None)
    floats = packed.view("float32")
    logprobs = floats[:, 1].tolist()
    if not needs.num_top:
        return HostDraws(tokens, logprobs, None)
    num = (packed.shape[1] - 2) // 2
    top_tokens, top_logprobs = packed[:, 2 : 2 + num].tolist(), floats[:, 2 + num :].tolist()
    return HostDraws(
        tokens, logprobs, [list(zip(*row, strict=True)) for row in zip(top_tokens, top_logprobs, strict=True)]
    )


def sample(logits_RV: Tensor, settings: DrawSettings, needs: DrawNeeds) -> Drawn:
    """Draw one token for each row.

    Args:
        logits_RV: any floating type, without columns that pad the vocabulary. -inf excludes a token.
        settings: of the rows. Rows of padding have temperature 0.
        needs: what some row wants, known to the host. It decides which operations run, never which token a row gets.

    Cost: a pass over the logits for the most likely tokens; six more where some are drawn at random, and a sort where
    some are drawn from a part of the vocabulary. No host synchronization.
    """
    best_R, tokens_R = _best(logits_RV)
    if needs.is_random:
        tokens_R = torch.where(settings.temperatures > 0, _random(logits_RV, best_R, settings, needs), tokens_R)
    tokens_R = tokens_R.masked_fill((best_R - best_R).ne(0), NOT_FINITE)  # NaN, unless it is finite
    if not needs.has_logprobs:
        return Drawn(tokens_R, None, None, None)
    logits_RV = logits_RV.float()
    total_R1 = logits_RV.logsumexp(dim=-1, keepdim=True)
    logprobs_R1 = logits_RV.gather(1, tokens_R.clamp(min=0)[:, None]) - total_R1
    if not needs.num_top:
        return Drawn(tokens_R, logprobs_R1[:, 0], None, None)
    top_RK, top_tokens_RK = logits_RV.topk(min(needs.num_top, logits_RV.shape[1]), dim=-1)
    return Drawn(tokens_R, logprobs_R1[:, 0], top_tokens_RK, top_RK - total_R1)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64, that follow from key and position alone, on every device alike.

    Source: SplitMix64 (Steele, Lea, Flood 2014), whose n-th number is a hash of its start plus n times a constant.
    """
    # Multiplication wraps around as for unsigned numbers; shifts to the right fill with the sign, and are masked.
    mixed = keys + positions.to(torch.int64) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(mixed ^ _shifted(mixed, 31), 64 - _UNIFORM_BITS).double().mul(2.0**-_UNIFORM_BITS)


def _best(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, NaN if there is one, and where it is; of equal ones the first.

    In two steps where rows are long: a GPU looks through parts of a row side by side, but through a row slowly.
    """
    size = logits_RV.shape[-1]
    num_parts = math.gcd(size, _MOST_PARTS)
    if num_parts < _LEAST_PARTS or size < _LONG_ROW:
        return logits_RV.max(dim=-1)
    length = size // num_parts
    best_RP, places_RP = logits_RV.unflatten(-1, (num_parts, length)).max(dim=-1)
    best_R, parts_R = best_RP.max(dim=-1)
    return best_R, torch.add(places_RP.gather(1, parts_R[:, None])[:, 0], parts_R, alpha=length)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    return numbers.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)


def _random(logits_RV: Tensor, best_R: Tensor, settings: DrawSettings, needs: DrawNeeds) -> Tensor:
    """Draw one token for each row, some rows at a time: it takes several times the memory of the logits."""
    uniform_R = uniform(settings.keys, settings.positions)
    most = max(1, _MOST_AT_ONCE // logits_RV.shape[1])
    parts = []
    for begin in range(0, logits_RV.shape[0], most):
        rows = slice(begin, begin + most)
        own, own_settings = logits_RV[rows].float(), DrawSettings(*(value[rows] for value in settings))
        weights = _weights(own, best_R[rows].float(), own_settings.temperatures)
        if needs.is_filtered:
            weights = _filtered(own, weights, own_settings)
        parts.append(_choose(weights, uniform_R[rows]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _weights(logits_RV: Tensor, best_R: Tensor, temperatures_R: Tensor) -> Tensor:
    """Probabilities up to a factor, as whole numbers."""
    divisors_R = temperatures_R.masked_fill(temperatures_R <= 0, 1.0)
    scaled_RV = (logits_RV - best_R[:, None]) / divisors_R[:, None]
    return (scaled_RV.exp() * _WEIGHT_OF_BEST).nan_to_num(0.0).to(torch.int64)


def _filtered(logits_RV: Tensor, weights_RV: Tensor, settings: DrawSettings) -> Tensor:
    """Weights of the top_k most likely tokens, and of those the fewest that reach top_p; 0 for all others."""
    size = logits_RV.shape[1]
    _, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    sorted_RV = weights_RV.gather(1, order_RV)
    top_ks_R1 = settings.top_ks.masked_fill(settings.top_ks <= 0, size)[:, None]
    sorted_RV = sorted_RV.masked_fill(torch.arange(size, device=logits_RV.device) >= top_ks_R1, 0)
    sums_RV = sorted_RV.cumsum(dim=-1)
    total_R1 = sums_RV[:, -1:]
    top_ps_R1 = settings.top_ps[:, None]
    limit_R1 = torch.where(top_ps_R1 < 1, (top_ps_R1.double() * total_R1).to(torch.int64), total_R1)
    before_RV = sums_RV - sorted_RV
    kept_RV = sorted_RV.masked_fill(before_RV >= limit_R1.clamp(min=1), 0)
    return torch.zeros_like(weights_RV).scatter(1, order_RV, kept_RV)


def _choose(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token at which the running sum of weights passes a part of their total."""
    sums_RV = weights_RV.cumsum(dim=-1)
    total_R = sums_RV[:, -1]
    threshold_R = torch.minimum((uniform_R * total_R).to(torch.int64), total_R - 1)
    return torch.searchsorted(sums_RV, threshold_R[:, None], right=True)[:, 0]
