"""Operations that are not ATen's: custom operations of a library or of the user."""

from __future__ import annotations

from typing import Any

from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.tape_ops import OperationTable
from graphstep.engine.tape_rules import CaptureRules


class InsideKernel(DispatchMode):
    """Watches what a foreign operation does inside: it is replayed as a whole, but may not read values either."""

    def __init__(self, rules: CaptureRules, table: OperationTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = rules
        self._table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_private.unwraps_itself(types):
            return NotImplemented
        traits = self._table.of(func)
        if traits.reads_host or traits.has_dynamic_shape:
            self._rules.check(traits, args, kwargs)
        return func(*args, **kwargs)
