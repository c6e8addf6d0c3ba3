"""Shadow of a model whose modules are captured: now and then one of its calls runs eagerly as well."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphstep.capture.ambient import AmbientState
from graphstep.capture.report import CaptureReport
from graphstep.capture.saved_tensors import nodes_behind
from graphstep.capture.tree import flatten, tensor_paths, unflatten
from graphstep.engine import torch_private
from graphstep.errors import ConfigError, Problem
from graphstep.strategies.iteration_refusals import with_children
from graphstep.strategies.local_forward import has_graphs
from graphstep.verification.compare import Tolerances
from graphstep.verification.differences import Rows
from graphstep.verification.report import Culprit, Part, Row, VerifyReport
from graphstep.verification.state import Key, State, StateCopy, attributes_of, put_back_python

_WRITTEN: Final = (Part.BUFFER, Part.OTHER)
"""What a forward may write."""
_GRADIENTS: Final = ("grad", "main_grad")


@dataclass(slots=True)
class _Seen:
    """One call, as the graphs have run it."""

    arguments: Any
    ambient: AmbientState
    before: StateCopy
    weights: list[int]
    """Their versions."""
    num_replays: int
    eager_calls: Counter[str]
    after: StateCopy | None = None
    """Once the forward has run."""
    results: dict[Key, Tensor] = field(default_factory=dict)
    """Of captured modules, in the order of their calls, and of the model."""
    given: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of the results, by position."""
    sources: dict[int, set[int]] = field(default_factory=dict)
    """For each result the other ones that it is computed from, as a loss is from logits that are returned beside it."""
    gradients_before: dict[Key, Tensor] = field(default_factory=dict)
    gradients_after: dict[Key, Tensor] = field(default_factory=dict)
    num_backwards: int = 0
    """Backward passes that have reached the results."""
    handles: list[Any] = field(default_factory=list)
    """Hooks to be taken off."""


class CallShadow:
    """Runs a call of a model eagerly as well, after its backward, and compares results, state and gradients.

    A call counts if it is in training mode with gradients on. It runs by graphs as always, and is watched: results of
    captured modules and of the model, buffers, generators, and the gradients before and after its backward. Before the
    next call of the model, or the next step of an optimizer of torch, the same call runs eagerly from the same state,
    and what differs is reported. State and generators are put back; gradients are not touched.

    Args:
        model: the module whose calls are the microbatches; whether it is captured itself or modules in it are.
        eagerly: a context in which it runs as it is.
        report: what has been captured.
        device: where it runs.
        interval: compare every so many calls; 0: those that :meth:`arm` names.
        on_report: is given what each comparison has found.
        tolerances: how far replays may be from eager.

    Raises:
        ConfigError: the model is wrapped for data parallelism, which exchanges gradients in each backward.

    Cost: of a compared call, one more forward and backward, and memory for them, two copies of the gradients, and a few
    waits for the device; of any other call, two hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eagerly: Callable[[], AbstractContextManager[None]],
        report: Callable[[], CaptureReport],
        device: torch.device,
        interval: int,
        on_report: Callable[[VerifyReport], None],
        tolerances: Tolerances,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            what = "a model in DistributedDataParallel cannot be shadowed: its backward exchanges gradients"
            raise ConfigError(Problem("shadow-data-parallel", what, "shadow", "attach to the module inside of it"))
        self._model, self._eagerly, self._report, self._device = model, eagerly, report, device
        self._interval, self._on_report, self._tolerances = interval, on_report, tolerances
        self._state: State | None = None
        self._seen: _Seen | None = None
        self._captured = {module for module in model.modules() if has_graphs(module)}
        self._num_calls = 0
        self._is_armed = self._is_running = False
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
            # Of the process: torch has no other. It must not go while one of its steps runs.
            register_optimizer_step_pre_hook(_settling(weakref.ref(self))),
        ]

    def arm(self) -> None:
        """Compare the next call."""
        self._is_armed = True

    def disarm(self) -> None:
        """Do not, unless it has come."""
        self._is_armed = False

    def close(self) -> None:
        """Compare what waits for it, and take the hooks off. May be called twice."""
        self.settle()
        self._forget()
        while self._handles:
            self._handles.pop().remove()

    # ----- the call by graphs

    def _before(self, _module: nn.Module, args: Any, named: Any) -> None:
        if self._is_running:
            return
        self.settle()
        if not (self._model.training and torch.is_grad_enabled()) or self._seen is not None:
            return
        self._num_calls += 1
        self._is_armed |= self._interval > 0 and self._num_calls % self._interval == 0
        report = self._report()
        if not self._is_armed or not report.num_recordings:
            return
        self._is_armed = False
        arguments = _copied((args, named))
        if self._state is None:
            self._state = self._learnt(arguments)
        seen = self._seen = _Seen(
            arguments=arguments,
            ambient=AmbientState.now(self._device.type),
            before=self._state.copy(_WRITTEN),
            weights=self._versions(),
            num_replays=_replays(report),
            eager_calls=_eager_calls(report),
        )
        seen.handles += self._follow(seen.results)

    def _after(self, _module: nn.Module, _args: Any, _named: Any, result: Any) -> None:
        seen = self._seen
        if self._is_running or self._state is None or seen is None or seen.after is not None:
            return
        _remove(seen.handles)
        seen.results |= _named_results("", "result", result)
        seen.after = self._state.copy(_WRITTEN)
        report = self._report()
        seen.num_replays = _replays(report) - seen.num_replays
        seen.eager_calls = _eager_calls(report) - seen.eager_calls
        tensors = _with_gradient(result)
        seen.sources = _sources(tensors)
        for position, tensor in tensors.items():
            tensor.register_hook(partial(self._backward_begins, seen, position))

    def _backward_begins(self, seen: _Seen, position: int, gradient: Tensor) -> None:
        if seen is not self._seen:
            return
        if position in seen.given or not seen.given:
            seen.num_backwards += 1
        if not seen.given:
            seen.gradients_before = self._gradients()
            torch_private.after_backward_pass(partial(self._backward_ends, seen))
        seen.given.setdefault(position, gradient.detach().clone())

    def _backward_ends(self, seen: _Seen) -> None:
        if not seen.gradients_after:
            seen.gradients_after = self._gradients()

    # ----- the same call eagerly

    def settle(self) -> None:
        """Compare the call that has been watched, if its backward has run."""
        seen, state = self._seen, self._state
        if self._is_running or seen is None or state is None or seen.after is None or not seen.gradients_after:
            return
        self._forget()
        if self._versions() != seen.weights or seen.num_backwards != 1:
            self._on_report(self._reported(seen, (), ("its weights were written, or it had several backwards",)))
            return
        self._is_running = True
        try:
            rows = self._compared(seen, state)
        finally:
            self._is_running = False
        self._on_report(self._reported(seen, rows, ()))

    def _compared(self, seen: _Seen, state: State) -> Sequence[Row]:
        now = state.copy(_WRITTEN)
        named = with_children([("", self._model)])
        python = attributes_of(named)
        results: dict[Key, Tensor] = {}
        state.restore(seen.before)
        try:
            handles = self._follow(results)
            try:
                with self._eagerly(), seen.ambient.entered(self._device.type):
                    args, keywords = _copied(seen.arguments)
                    result = self._model(*args, **keywords)
            finally:
                _remove(handles)
            results |= _named_results("", "result", result)
            after = state.copy(_WRITTEN)
            gradients = self._gradients_from(flatten(result)[0], seen)
        finally:
            put_back_python([python], [module for _, module in named])
            state.restore(now)
        rows = Rows(self._tolerances)
        rows.add_tensors(1, _on_host(results), _on_host(seen.results))
        if seen.after is not None:
            rows.add_tensors(1, after.tensors, seen.after.tensors)
            rows.add_generators(1, after.generators, seen.after.generators)
        rows.add_tensors(1, _on_host(gradients), _on_host(seen.gradients_after))
        return rows.all()

    def _gradients_from(self, results: Sequence[Tensor], seen: _Seen) -> dict[Key, Tensor]:
        """What the gradients would be after an eager backward, from what they were before."""
        state = self._state
        trained = [each for each in state.parameters() if each[2].requires_grad] if state is not None else []
        # What was seen at a result that others are computed from has their part in it already.
        inner = {source for position in seen.given for source in seen.sources.get(position, ())} & set(seen.given)
        for position in inner:
            results[position].register_hook(partial(_instead, seen.given[position]))
        outer = {position: gradient for position, gradient in seen.given.items() if position not in inner}
        parts: Sequence[Tensor | None] = torch.autograd.grad(
            [results[position] for position in outer],
            [parameter for _, _, parameter in trained],
            list(outer.values()),
            allow_unused=True,
        )
        found = {key: tensor.clone() for key, tensor in seen.gradients_before.items()}
        for (path, name, parameter), part in zip(trained, parts, strict=True):
            if part is None:
                continue
            attribute = "main_grad" if isinstance(getattr(parameter, "main_grad", None), Tensor) else "grad"
            key = Key(path, Part.GRADIENT, f"{name}.{attribute}")
            found[key] = found[key].add_(part.to(found[key].dtype)) if key in found else part
        return found

    # ----- parts

    def _learnt(self, arguments: Any) -> State:
        """What a call writes and draws from, found by one that is undone."""
        state = State([("", self._model)], self._device)
        named = with_children([("", self._model)])
        python = attributes_of(named)

        def run() -> None:
            args, keywords = _copied(arguments)
            with self._eagerly():
                self._model(*args, **keywords)

        self._is_running = True
        try:
            state.learn(run, lambda: [("", self._model)])
        finally:
            self._is_running = False
            put_back_python([python], [module for _, module in named])
        return state

    def _follow(self, into: dict[Key, Tensor]) -> list[Any]:
        """Note the results of captured modules; hooks on those themselves run around their replays."""
        calls: Counter[str] = Counter()

        def note(path: str, _module: nn.Module, _args: Any, result: Any) -> None:
            calls[path] += 1
            name = "result" if calls[path] == 1 else f"result of call {calls[path]}"
            into.update(_named_results(path, name, result))

        modules = [(p, module) for p, module in self._model.named_modules() if p and module in self._captured]
        return [module.register_forward_hook(partial(note, path)) for path, module in modules]

    def _gradients(self) -> dict[Key, Tensor]:
        state = self._state
        if state is None:
            return {}
        return {key: t.detach().clone() for key, t in state.tensors() if key.part is Part.GRADIENT}

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._model.parameters()]

    def _forget(self) -> None:
        if self._seen is not None:
            _remove(self._seen.handles)
        self._seen = None

    def _reported(self, seen: _Seen, rows: Sequence[Row], notes: tuple[str, ...]) -> VerifyReport:
        return VerifyReport(
            target=f"call {self._num_calls} of {type(self._model).__name__}",
            engine=self._report().engine,
            num_steps=1 if rows else 0,
            num_replays=seen.num_replays if rows else 0,
            eager_calls=dict(seen.eager_calls),
            rows=tuple(rows),
            first=_first(rows, type(self._model).__name__),
            tolerance=str(self._tolerances),
            notes=notes,
        )


def _settling(shadow: weakref.ref[CallShadow]) -> Callable[..., None]:
    """Before weights are updated, the call that was watched is compared."""

    def settle(*_step: Any) -> None:
        if (found := shadow()) is not None:
            found.settle()

    return settle


def _first(rows: Sequence[Row], model: str) -> Culprit | None:
    """The first row that differs: forward in the order of calls, then state, then gradients from the last module."""
    for part in (Part.FORWARD, Part.BUFFER, Part.OTHER, Part.RANDOM, Part.GRADIENT):
        found = [row for row in rows if row.part is part and not row.is_equal and row.difference is not None]
        if found:
            row = found[-1] if part is Part.GRADIENT else found[0]
            if row.difference is not None:
                return Culprit(
                    row.module or model, part, row.difference, "of one call; captured modules are not looked into"
                )
    return None


def _copied(arguments: Any) -> Any:
    """The same nesting with copies of the tensors, which want a gradient if those did."""
    tensors, structure = flatten(arguments)
    return unflatten(structure, [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])


def _named_results(path: str, name: str, result: Any) -> dict[Key, Tensor]:
    tensors, structure = flatten(result)
    names = tensor_paths(structure, name)
    return {Key(path, Part.FORWARD, n): t.detach().clone() for n, t in zip(names, tensors, strict=True)}


def _with_gradient(result: Any) -> dict[int, Tensor]:
    """The tensors of a result that have a gradient, by position; one that is there twice has its first."""
    found = {id(t): (position, t) for position, t in reversed(list(enumerate(flatten(result)[0]))) if t.requires_grad}
    return dict(sorted(found.values(), key=lambda each: each[0]))


def _sources(tensors: dict[int, Tensor]) -> dict[int, set[int]]:
    """For each tensor the others on the way of its backward."""
    positions = {tensor.grad_fn: position for position, tensor in tensors.items() if tensor.grad_fn is not None}
    return {
        position: {
            positions[each] for each in nodes_behind([tensors[position]]) if each in positions and each is not node
        }
        for node, position in positions.items()
    }


def _instead(gradient: Tensor, _found: Tensor) -> Tensor:
    """A hook that puts a gradient in the place of another one."""
    return gradient


def _on_host(tensors: dict[Key, Tensor]) -> dict[Key, Tensor]:
    return {key: tensor.to("cpu") for key, tensor in tensors.items()}


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _replays(report: CaptureReport) -> int:
    return sum(row.num_replays for row in report.rows)


def _eager_calls(report: CaptureReport) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in report.rows:
        found.update({str(reason): count for reason, count in row.eager_calls.items()})
    return found
