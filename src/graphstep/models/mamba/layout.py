"""Where the parts of a projected sequence lie, and views of them by chunk and head.

Shapes: B batch, S sequence, C chunks of Q tokens (S = C * Q), G groups of R heads, P channels of a head, N state,
I inner width (G * R * P).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerLayout:
    """Sizes of a mixer, and the order of the features of its input projection: z, then x, B and C, then dt."""

    groups: int
    """G."""
    heads_per_group: int
    """R."""
    channels: int
    """P."""
    state: int
    """N."""

    @property
    def num_heads(self) -> int:
        """All heads."""
        return self.groups * self.heads_per_group

    @property
    def inner(self) -> int:
        """I, the width of z and of x."""
        return self.num_heads * self.channels

    @property
    def convolved(self) -> int:
        """Width of what is convolved: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def widths(self) -> tuple[int, int, int]:
        """Features of z, of x with B and C, and of dt in the projection."""
        return self.inner, self.convolved, self.num_heads

    # Chunks come first, so that all chunks but the first or the last are one block. Tokens and channels come last:
    # what lies so in memory is a batch of matrices for the library, without a copy.

    def by_head(self, x_BSI: Tensor, chunk: int) -> Tensor:
        """View [B, S, I] as [C, G, R, B, Q, P]."""
        view_CGRBQP: Tensor = (
            x_BSI.unflatten(1, (-1, chunk))
            .unflatten(-1, (self.groups, self.heads_per_group, self.channels))
            .permute(1, 3, 4, 0, 2, 5)
        )
        return view_CGRBQP

    def by_step(self, dt_BSH: Tensor, chunk: int) -> Tensor:
        """View [B, S, heads] as [C, G, R, B, Q]."""
        view_BCQGR: Tensor = dt_BSH.unflatten(1, (-1, chunk)).unflatten(-1, (self.groups, self.heads_per_group))
        return view_BCQGR.permute(1, 3, 4, 0, 2)

    def by_group(self, bc_BSK: Tensor, chunk: int) -> Tensor:
        """View B and C, side by side in [B, S, 2 * G * N], as [2, C, G, B, Q, N]."""
        view_BCQ2GN: Tensor = bc_BSK.unflatten(1, (-1, chunk)).unflatten(-1, (2, self.groups, self.state))
        return view_BCQ2GN.permute(3, 1, 4, 0, 2, 5)


class MixerWeights(NamedTuple):
    """The parameters between the two projections of a mixer. K width of the convolution, W its channels, H heads."""

    conv_weight: Tensor
    """[K, W]; row j weighs the token j before."""
    conv_bias: Tensor
    """[W], added by the convolution."""
    dt_bias: Tensor
    """[H], added to the time steps before their softplus."""
    a_log: Tensor
    """[H], logarithm of the decay."""
    d: Tensor
    """[H], what a head adds of its input to its output."""


def matrices(x: Tensor) -> Tensor:
    """View [..., rows, columns], contiguous, as one batch of matrices."""
    return x.view(-1, *x.shape[-2:])


def heads_last(x_CGRBQP: Tensor) -> Tensor:
    """View [C, G, R, B, Q, P] as [C, G, B, Q, R, P], the order of matrices with the heads of a group side by side."""
    return x_CGRBQP.permute(0, 1, 3, 4, 2, 5)


def heads_first(x_CGBQRP: Tensor) -> Tensor:
    """Undo :func:`heads_last`."""
    return x_CGBQRP.permute(0, 1, 4, 2, 3, 5)
