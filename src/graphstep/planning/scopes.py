"""Which part of a step runs now: layers and their segments, forward and backward, the optimizer, the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphstep.capture.tree import flatten
from graphstep.engine import torch_private
from graphstep.models.segments import Segment, SegmentedModule

OUTSIDE: Final = "outside"
"""Neither forward and backward nor the optimizer: data, logs, zeroed gradients."""
ITERATION: Final = "iteration"
"""Forward and backward, outside of all parts: embedding, head, loss."""
OPTIMIZER: Final = "optimizer"


class Scopes:
    """Follows a step through its parts, while :meth:`installed` is entered.

    A part begins its forward when it is called, and its backward when the gradient of its result is there; it ends when
    the gradient of its argument is complete. In between, what runs is its own or that of a part inside of it.

    Args:
        on_change: called with the new scope, whether a backward is under way, and the number of the microbatch.
        on_entry: called when the forward of a part begins, or that of the model (``iteration``), with its tensors.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[str, bool, int], None] | None = None,
        on_entry: Callable[[str, Sequence[Tensor]], None] | None = None,
    ) -> None:
        self.current = OUTSIDE
        self.num_microbatches = 0
        """Forwards of the model so far."""
        self.microbatch = 0
        """Number of the one whose forward or backward runs, or ran last."""
        self._on_change = on_change
        self._on_entry = on_entry
        self._handles: list[Any] = []
        self._above: list[str] = []
        self._is_told = False

    def enter(self, name: str) -> None:
        """From now on this scope runs."""
        self.current = name
        if self._on_change is not None:
            self._on_change(name, torch_private.backward_pass() is not None, self.microbatch)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """The body is forward and backward: for loops that know where these end."""
        self._is_told = True
        self.enter(ITERATION)
        try:
            yield
        finally:
            self.enter(OUTSIDE)

    def run(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run the forward of a part."""
        self._begin(name, (arguments, named))
        result = None
        try:
            result = function(*arguments, **named)
        finally:
            self._end(name, result)
        return result

    @contextmanager
    def installed(self, model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
        """Follow these parts of a model: segments of its layers, or modules, by path. Everything is put back."""
        self.num_microbatches = self.microbatch = 0
        wanted = set(paths)
        replaced: list[nn.Module] = []
        try:
            for path, module in model.named_modules():
                if isinstance(module, SegmentedModule):
                    segments = _followed(self, path, module.segments, wanted)
                    module.__dict__["segments"] = segments
                    replaced.append(module)
                elif path in wanted:
                    self._follow_module(path, module)
            self._handles.append(model.register_forward_pre_hook(self._model_begins, with_kwargs=True))
            self._handles.append(register_optimizer_step_pre_hook(self._optimizer_begins))
            self._handles.append(register_optimizer_step_post_hook(self._optimizer_ends))
            yield
        finally:
            for module in replaced:
                module.__dict__.pop("segments", None)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._above.clear()
            self.current = OUTSIDE

    def _follow_module(self, path: str, module: nn.Module) -> None:
        def begins(_module: nn.Module, arguments: Any, named: Any) -> None:
            self._begin(path, (arguments, named))

        def ends(_module: nn.Module, _arguments: Any, _named: Any, result: Any) -> None:
            self._end(path, result)

        self._handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
        self._handles.append(module.register_forward_hook(ends, with_kwargs=True, always_call=True))

    def _begin(self, name: str, given: Any) -> None:
        above = self.current
        self._above.append(above)
        tensors = flatten(given)[0]
        if self._on_entry is not None:
            self._on_entry(name, tensors)
        for tensor in tensors:
            self._hook(tensor, partial(self._backward_ends, name, above))
        self.enter(name)

    def _end(self, name: str, result: Any) -> None:
        self.enter(self._above.pop())
        for tensor in flatten(result)[0]:
            self._hook(tensor, partial(self._backward_begins, name, self.microbatch))

    def _hook(self, tensor: Tensor, action: Callable[[], None]) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            self._handles.append(tensor.register_hook(lambda _gradient: action()))

    def _backward_begins(self, name: str, microbatch: int) -> None:
        self.microbatch = microbatch
        # The result of a part is often that of a part inside of it, whose backward has begun by its own hook just now.
        if not self._is_inside(name):
            self.enter(name)

    def _backward_ends(self, name: str, above: str) -> None:
        # And the argument is often the result of another part, whose backward has begun just now.
        if self._is_inside(name):
            self.enter(above)

    def _is_inside(self, name: str) -> bool:
        return self.current == name or self.current.startswith(f"{name}.")

    def _model_begins(self, _model: nn.Module, arguments: Any, named: Any) -> None:
        self.microbatch = self.num_microbatches
        self.num_microbatches += 1
        if self._on_entry is not None:
            self._on_entry(ITERATION, flatten((arguments, named))[0])
        if self.current == OUTSIDE and not self._is_told:
            self.enter(ITERATION)

    def _optimizer_begins(self, *_: Any) -> None:
        self.enter(OPTIMIZER)

    def _optimizer_ends(self, _optimizer: Optimizer, *_: Any) -> None:
        self.enter(OUTSIDE)


def _followed(
    scopes: Scopes, path: str, segments: Callable[[], tuple[Segment, ...]], wanted: set[str]
) -> Callable[[], tuple[Segment, ...]]:
    """A layer's list of segments, with those that are wanted followed."""

    def listed() -> tuple[Segment, ...]:
        found = []
        for segment in segments():
            name = f"{path}.{segment.name}" if path else segment.name
            function = partial(scopes.run, name, segment.fn) if name in wanted else segment.fn
            found.append(replace(segment, fn=function))
        return tuple(found)

    return listed


def mark_names(scopes: Sequence[str]) -> Mapping[str, int]:
    """Numbers for scopes, for marks in a trace."""
    return {name: number for number, name in enumerate(scopes)}
