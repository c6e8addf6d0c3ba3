"""What every capture of a plan ends with, and what is refused after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from graphstep.capture.chain import Chain
from graphstep.capture.manifest import Watched
from graphstep.capture.session import GraphSession
from graphstep.errors import CaptureError


@contextmanager
def tensors_kept(watched: Iterable[Watched], *, where: str) -> Iterator[None]:
    """Give modules back the parameters and buffers that the body, a capture, replaced, and refuse that.

    Raises:
        CaptureError: names them.
    """
    try:
        yield
    finally:
        replaced = [name for each in watched for name in each.put_back()]
    if replaced:
        raise CaptureError(
            f"captured calls replace {', '.join(replaced)} by others; a graph works on the tensors that it has seen",
            where=where,
            fix="write into the tensors (copy_, add_, mul_)",
        )


def settle(chains: Sequence[Chain], session: GraphSession) -> None:
    """Nothing has a gradient from the capture, and from now on callers may hold results and gradients."""
    for chain in chains:
        for pair in chain.pairs:
            pair.homes.hide_new()
            pair.is_held()  # From now on, more holders than at this moment are callers.
            chain.lane.add(pair)
    for home in session.gradient_homes.values():
        home.note_holders()
