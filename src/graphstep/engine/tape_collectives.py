"""Collectives on a tape: started at one step, waited for at another.

A dispatch mode sees where a collective starts but not where the function waits for it. A replay waits when a step first
touches memory of the collective, which a correct function does not do before it has waited. To wait at once would stop
point-to-point exchanges, where everybody sends before anybody receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.tape_ops import OperationTraits, tensors_in
from graphstep.engine.tape_steps import Step, new_tensors, write_results

WAITS = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
_READING = frozenset({"c10d::send"})
_WITH_MEMORY_OF_ITS_OWN = frozenset(
    {"c10d::reduce_scatter_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_tensor_coalesced_"}
)
_WAITED_FOR_ONCE = frozenset({"c10d::send", "c10d::recv_", "c10d::recv_any_source_"})


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One collective of a tape."""

    traits: OperationTraits
    call: partial[Any]
    results: Sequence[Tensor]
    """Where its new results belong."""
    _waits: list[Step] = field(default_factory=list)
    _new: list[Tensor] = field(default_factory=list)

    def start(self) -> None:
        """Begin, and wait only if the function did so in the same call."""
        result = self.call()
        self._waits = waits_for(result)
        self._new = new_tensors(result, self.call) if self.results else []
        if self._waits_at_once:
            self.finish()

    def finish(self) -> None:
        """Wait, and bring the results to their place."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        new, self._new = self._new, []
        if new:
            write_results(self.traits.name, self.results, new)

    @property
    def _waits_at_once(self) -> bool:
        for position, argument in enumerate(self.traits.argument_names):
            if argument == "async_op":
                given = self.call.args[position : position + 1] or (self.call.keywords.get(argument, True),)
                return given[0] is False
        return False

    @property
    def touches_by_reading(self) -> frozenset[int]:
        """Memory that nobody may read before this has finished."""
        if self.traits.name.partition(".")[0] in _READING:
            return frozenset()
        return self.touches_by_writing

    @property
    def touches_by_writing(self) -> frozenset[int]:
        """Memory that nobody may write before this has finished."""
        tensors = [*tensors_in(list(self.call.args)), *tensors_in(list(self.call.keywords.values())), *self.results]
        return frozenset(torch_private.storage_key(tensor) for tensor in tensors)


def waits_for(result: Any) -> list[Step]:
    """Calls that wait for a collective, given what it returned."""
    items = result if isinstance(result, tuple) else (result,)
    works = [item for item in items if torch_private.work_is_pending(item)]
    if works:
        return [work.wait for work in works]
    return [partial(torch.ops._c10d_functional.wait_tensor, tensor) for tensor in tensors_in(result)]


def waits_again_for(traits: OperationTraits, result: Any) -> list[Step]:
    """The same where the function may have waited already; nothing for what can be waited for only once."""
    return [] if traits.name.partition(".")[0] in _WAITED_FOR_ONCE else waits_for(result)


def has_memory_of_its_own(traits: OperationTraits) -> bool:
    """True for collectives that gloo runs in buffers, from which it copies while the function waits.

    Others are not watched: they take the active modes along to their threads.
    """
    return traits.name.partition(".")[0] in _WITH_MEMORY_OF_ITS_OWN


class InsideCollective(DispatchMode):
    """Collects the memory that a collective allocates for itself. What is done with it is part of the collective."""

    def __init__(self, memory: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {torch_private.storage_key(tensor) for tensor in tensors_in([*args, *kwargs.values()])}
        for tensor in tensors_in(result):
            key = torch_private.storage_key(tensor)
            if key not in given or key in self._memory:
                self._memory[key] = torch_private.plain_alias(tensor)
        return result
