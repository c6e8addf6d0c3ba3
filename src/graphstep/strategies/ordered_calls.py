"""The calls of a region that is captured for a schedule."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Final

from graphstep.capture.reasons import EagerReason
from graphstep.capture.signature import Signature
from graphstep.errors import InputMismatchError
from graphstep.strategies.local_calls import RegionCalls

_ARGUMENT: Final = re.compile(r"call\[0\]\[(\d+)\]")
"""How differences name an argument of a layer."""


class OrderedCalls(RegionCalls):
    """Like its base. Nothing is captured on demand, and errors say so."""

    def _why_no_signature(self, signature: Signature) -> EagerReason:
        try:
            return super()._why_no_signature(signature)
        except InputMismatchError as error:
            names = _names_of(self)
            raise InputMismatchError(
                _ARGUMENT.sub(lambda found: _name(int(found[1]), names), error.what),
                where=error.where,
                fix="give it a shape that a step before create_cudagraphs() had: that captures each which was seen, up "
                "to max_signatures; or let other calls run eagerly (on_mismatch='eager')",
            ) from None


def _names_of(calls: RegionCalls) -> Sequence[str]:
    """Of the arguments of a whole layer."""
    if calls.region.kind != "layer":
        return ()
    parameters = inspect.signature(type(calls.region.modules[0]).forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]


def _name(index: int, names: Sequence[str]) -> str:
    return f"argument {names[index]!r}" if 0 <= index < len(names) else f"argument number {index + 1}"
