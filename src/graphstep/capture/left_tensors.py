"""Tensors that a region leaves in attributes: in the memory of its recording, where the next replay overwrites them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphstep.capture.attributes import Attributes
from graphstep.engine import torch_private

if TYPE_CHECKING:
    from graphstep.capture.graph_pair import GraphPair


class LeftTensors:
    """Finds out at the capture which tensors are left where, and leaves copies there after each replay.

    So whoever has taken one out of its attribute keeps it, as in eager execution; and the attribute has what the latest
    call has left, whichever graph served it.
    """

    def __init__(self) -> None:
        self.attributes: Attributes | None = None
        """Of the region; nothing is found without."""
        self.places: list[tuple[Any, Any, Tensor]] = []
        """A dict with a key, a list with a position or an object with a name; and what the recording leaves there."""

    @contextmanager
    def noted(self, pair: GraphPair) -> Iterator[None]:
        """The body is the capture of the pair's forward half."""
        if self.attributes is None:
            yield
            return
        before = {(id(owner), key): value for owner, key, value in self.attributes.again().places()}
        yield
        # What the model owns and keeps is left as it is; what lies in a static input is not.
        static = {torch_private.storage_key(t) for n, t in enumerate(pair.inputs) if n not in pair.in_place}
        others = set(map(torch_private.storage_key, pair.observation.externals)) - static
        for owner, key, value in self.attributes.again().places():
            is_new = isinstance(value, Tensor) and before.get((id(owner), key)) is not value
            if is_new and torch_private.has_plain_memory(value) and torch_private.storage_key(value) not in others:
                self.places.append((owner, key, value.detach()))

    def renew(self) -> None:
        """After a replay: leave copies."""
        with torch.no_grad():
            for owner, key, tensor in self.places:
                _put(owner, key, tensor.clone())

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The attributes have after the body, a run for its gradients alone, what they had before it."""
        before = [(owner, key, _get(owner, key)) for owner, key, _ in self.places]
        yield
        for owner, key, value in before:
            _put(owner, key, value)

    def forget(self) -> None:
        """The recording is gone."""
        self.places.clear()


def as_before(left: LeftTensors, before: Attributes) -> None:
    """After a capture: give the attributes what they had when these were noted; no replay has left anything there."""
    noted = {(id(owner), key): value for owner, key, value in before.places()}
    for owner, key, tensor in left.places:
        value = noted.get((id(owner), key), tensor)
        _put(owner, key, tensor.clone() if value is tensor else value)


def _get(owner: Any, key: Any) -> Any:
    return owner[key] if isinstance(owner, dict | list) else getattr(owner, key)


def _put(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[key] = value
    elif isinstance(owner, list):
        if key < len(owner):
            owner[key] = value
    else:
        object.__setattr__(owner, key, value)
