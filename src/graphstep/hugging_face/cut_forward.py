"""A forward in several parts, cut where it calls certain submodules; its code stays as its author wrote it.

The first part runs the forward until it calls the first of these submodules (a *hole*) and leaves it by an exception.
What was computed so far has been noted: the results of the submodules and of the functions of torch that the forward
calls itself. A later part runs the same Python again from its beginning, and gets the noted results instead of
computing them, up to the call of the hole, whose result it is given; from there on it computes. So every part is a
function of tensors, and what the Python between them does is done by itself. A part returns those tensors only that a
later one can still read: the arguments of the hole, and what lies in local variables that are read later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphstep.capture.tree import Node, Value, flatten, unflatten
from graphstep.engine.module_calls import module_calls_replaced
from graphstep.errors import CaptureError
from graphstep.hugging_face.forward_code import forward_code, live_names

_FIX = "capture the layer whole, or name the modules inside of it that are to be captured: attach(model, regions=...)"


@dataclass(slots=True)
class Handed:
    """What a part returns that has reached a hole: how to call it, and what the next part needs besides its result."""

    hole: int
    """Which of the holes is called."""
    script: int
    """What was noted so far, by its number."""
    arguments: tuple[Any, ...]
    """Of the hole. A tensor that the forward was given is a :class:`Given`: it is not made by the part."""
    named: dict[str, Any]
    has_given: bool
    live: tuple[Tensor, ...]

    def call_of(self, first: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of the hole, with those of the forward in their places."""
        if not self.has_given:
            return self.arguments, self.named
        tensors = [first, *flatten((arguments, named))[0]]

        def put(value: Any) -> Any:
            return tensors[value] if isinstance(value, Given) else value

        return _mapped(self.arguments, put), _mapped(self.named, put)


class Given(int):
    """The number of a tensor among the arguments of the forward."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One call that was noted."""

    name: str
    structure: Node | Value
    refs: tuple[int, ...]
    """Numbers of the tensors in its result."""


@dataclass(frozen=True, slots=True)
class _Script:
    """The calls up to a hole."""

    entries: tuple[_Entry, ...]
    live: tuple[int, ...]
    """Numbers of the tensors that the next part gets."""
    num_refs: int


class _HoleReached(BaseException):
    """Leaves the forward. No ``Exception``: code that catches those must not keep it."""

    def __init__(self, hole: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.hole, self.arguments, self.named = hole, arguments, named


class UncutError(CaptureError):
    """A forward that does not run the same way a second time."""


class CutForward:
    """The parts of a module's forward between its holes.

    Args:
        module: whose forward it is.
        holes: submodules, in the order in which they are called.
        name: path of the module, for errors.
    """

    def __init__(self, module: nn.Module, holes: Sequence[nn.Module], name: str) -> None:
        self.module, self.holes, self.name = module, tuple(holes), name
        self.around = ancestors_of(module, holes)
        self.units = _units(self.around, holes)
        # Found now: the forward of the module is replaced later.
        self._codes = {code for code in map(forward_code, self.around) if code is not None}
        self._scripts: list[_Script] = []
        self._numbers: dict[_Script, int] = {}
        self.dead = torch.empty((), device="meta")

    @property
    def num_parts(self) -> int:
        """One more than there are holes."""
        return len(self.holes) + 1

    def run(self, forward: Callable[..., Any], part: int, given: Any, arguments: Any, named: dict[str, Any]) -> Any:
        """Run one part.

        Args:
            forward: the module's forward.
            part: its number, from 0.
            given: the first argument of the forward; for a later part the result of the hole, the number of the script
                and the live tensors.
            arguments: the others.
            named: those by name.

        Returns:
            :class:`Handed`, or what the forward returns.
        """
        if not self.holes:
            return forward(given, *arguments, **named)
        hooked = [type(module).__name__ for module in self.around[1:] if module._forward_pre_hooks]
        if hooked:
            raise self.error(f"hooks before {', '.join(hooked)} once more")
        script, result, live = None, None, ()
        first = given
        if part:
            result, number, live = given
            script = self._scripts[number]
            first = self.dead
        run = _Run(self, script, result, is_last=part == len(self.holes))
        first = run.begin(first, arguments, named, live)
        try:
            with run, run.units_watched():
                return forward(first, *arguments, **named)
        except _HoleReached as reached:
            return self._handed(run, reached)

    def error(self, what: str) -> UncutError:
        """Of a second run that differs."""
        return UncutError(
            f"its forward cannot be cut at {', '.join(type(hole).__name__ for hole in self.holes)}: run a second time, "
            f"it called {what}",
            where=self.name,
            fix=_FIX,
        )

    def _handed(self, run: _Run, reached: _HoleReached) -> Handed:
        found = self._live(run, reached.__traceback__)
        reached.__traceback__ = None
        script = _Script(tuple(run.entries), tuple(found), run.num_refs)
        number = self._numbers.get(script)
        if number is None:
            number = self._numbers[script] = len(self._scripts)
            self._scripts.append(script)
        # The first argument, handed on, gets memory of its own, as a replay returns it: whoever watches the calls would
        # take it for the result of the call before.
        live = tuple(tensor.clone() if ref == 0 else tensor for ref, tensor in found.items())
        has_given = False

        def given(value: Any) -> Any:
            nonlocal has_given
            ref = run.refs.get(id(value)) if isinstance(value, Tensor) else None
            if ref is None or ref > run.num_others:
                return value
            has_given = True
            return Given(ref)

        arguments, named = _mapped(reached.arguments, given), _mapped(reached.named, given)
        return Handed(reached.hole, number, arguments, named, has_given, live)

    def _live(self, run: _Run, trace: TracebackType | None) -> dict[int, Tensor]:
        """The tensors in local variables that are read later, by their numbers."""
        found: dict[int, Tensor] = {}
        while trace is not None:
            code, variables = trace.tb_frame.f_code, trace.tb_frame.f_locals
            if code in self._codes:
                for name in sorted(live_names(code, trace.tb_lasti)):
                    for tensor in _tensors_in(variables.get(name)):
                        if tensor is self.dead:
                            continue
                        ref = run.refs.get(id(tensor))
                        if ref is not None and not 0 < ref <= run.num_others:  # Those are given to each part.
                            found[ref] = tensor
            trace = trace.tb_next
        return dict(sorted(found.items()))


class _Run(TorchFunctionMode):
    """One run of the forward for a part: notes calls, and answers those that were noted before."""

    def __init__(self, cut: CutForward, script: _Script | None, result: Any, *, is_last: bool) -> None:
        super().__init__()
        self._cut, self._script, self._result, self._is_last = cut, script, result, is_last
        self.entries: list[_Entry] = list(script.entries) if script is not None else []
        self.num_refs = script.num_refs if script is not None else 0
        self.refs: dict[int, int] = {}
        """Numbers of tensors, by identity."""
        self._known: dict[int, Tensor] = {}
        self.num_others = 0
        self._position = 0
        self._num_inside = 0
        self._awaits_result = script is not None
        self._has_dead = False

    def begin(self, first: Any, arguments: Any, named: dict[str, Any], live: Sequence[Tensor]) -> Any:
        """Number the arguments. Returns the first one, or what stands for it."""
        if self._script is not None:
            self._known = dict(zip(self._script.live, live, strict=True))
            first = self._known.get(0, first)
            self._has_dead = first is self._cut.dead
        others, _ = flatten((arguments, named))
        for number, tensor in enumerate([first, *others]):
            if tensor is not self._cut.dead:
                self._known.setdefault(number, tensor)
        self.num_others = len(others)
        self.num_refs = max(self.num_refs, 1 + len(others))
        self.refs = {id(tensor): number for number, tensor in self._known.items()}
        return first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._num_inside:
            return func(*args, **(kwargs or {}))
        return self._called(getattr(func, "__name__", ""), func, args, kwargs or {})

    @contextmanager
    def units_watched(self) -> Iterator[None]:
        """Have the submodules and the holes called through this object."""
        instead: list[tuple[nn.Module, Callable[[Callable[..., Any]], Callable[..., Any]]]] = []
        for number, unit in enumerate(self._cut.units):
            instead.append((unit, self._unit(f"unit {number}")))
        for number, hole in enumerate(self._cut.holes):
            instead.append((hole, self._hole(number)))
        with module_calls_replaced(instead):
            yield

    def _unit(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(call: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                if self._num_inside:
                    return call(*args, **kwargs)

                def inside(*args: Any, **kwargs: Any) -> Any:
                    self._num_inside += 1
                    try:
                        return call(*args, **kwargs)
                    finally:
                        self._num_inside -= 1

                return self._called(name, inside, args, kwargs)

            return watched

        return make

    def _hole(self, number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(call: Callable[..., Any]) -> Callable[..., Any]:
            def reached(*args: Any, **kwargs: Any) -> Any:
                name = f"hole {number}"
                if self._position < len(self.entries):
                    return self._again(name)
                if self._awaits_result:
                    self._awaits_result = False
                    self._note(name, self._result)
                    self._position = len(self.entries)
                    return self._result
                if self._is_last:
                    return call(*args, **kwargs)
                raise _HoleReached(number, args, kwargs)

            return reached

        return make

    def _called(self, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if self._position < len(self.entries):
            return self._again(name)
        if self._awaits_result:
            raise self._cut.error(f"{name} instead of the submodule that it called before")
        if self._has_dead and any(tensor is self._cut.dead for tensor in flatten((args, kwargs))[0]):
            raise self._cut.error(f"{name} with a tensor that was not kept in a variable")
        result = call(*args, **kwargs)
        if not self._is_last:
            self._note(name, result)
            self._position = len(self.entries)
        return result

    def _again(self, name: str) -> Any:
        entry = self.entries[self._position]
        if entry.name != name:
            raise self._cut.error(f"{name} where it called {entry.name} before")
        self._position += 1
        tensors = [self._known.get(ref, self._cut.dead) for ref in entry.refs]
        self._has_dead = self._has_dead or any(tensor is self._cut.dead for tensor in tensors)
        return unflatten(entry.structure, tensors)

    def _note(self, name: str, result: Any) -> None:
        tensors, structure = flatten(result)
        refs = []
        for tensor in tensors:
            ref = self.refs.get(id(tensor))
            if ref is None:
                ref = self.refs[id(tensor)] = self.num_refs
                self.num_refs += 1
                self._known[ref] = tensor  # Holds it, so that its identity stays its own.
            refs.append(ref)
        self.entries.append(_Entry(name, structure, tuple(refs)))


def ancestors_of(module: nn.Module, holes: Sequence[nn.Module]) -> list[nn.Module]:
    """A module and those inside of it that hold one of the holes."""
    wanted = set(map(id, holes))
    return [m for m in module.modules() if id(m) not in wanted and any(id(each) in wanted for each in m.modules())]


def _units(around: Sequence[nn.Module], holes: Sequence[nn.Module]) -> list[nn.Module]:
    """The submodules whose calls are noted as one."""
    apart = {*map(id, around), *map(id, holes)}
    found: dict[int, nn.Module] = {}

    def add(parent: nn.Module) -> None:
        for child in parent.children():
            if id(child) in apart:
                continue
            if type(child).forward is nn.Module.forward or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                add(child)  # It is never called itself.
            else:
                found[id(child)] = child

    for each in around:
        add(each)
    return list(found.values())


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same containers with other contents."""
    kind = type(value)
    if kind in (tuple, list):
        return kind(_mapped(item, change) for item in value)
    if kind is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    return change(value)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return flatten(value)[0] if isinstance(value, (tuple, list, dict)) else []
