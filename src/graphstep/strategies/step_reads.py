"""What the Python of a step reads besides its arguments: variables, and attributes of objects, found in its code."""

from __future__ import annotations

import dis
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn
from torch.autograd import Function
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphstep.capture.attributes import OF_LIBRARIES
from graphstep.capture.places import GONE, Place

_NOT_FOLLOWED: Final = OF_LIBRARIES | {"graphstep"}
_CONTAINERS: Final = (list, dict, set, deque)
_FILLS: Final = frozenset({"append", "appendleft", "extend", "add"})
_MOST_FUNCTIONS: Final = 500
_MOST_ENTRIES: Final = 1000
_DEPTH: Final = 3
_LOADS: Final = {
    "LOAD_FAST": "local",
    "LOAD_FAST_CHECK": "local",
    "LOAD_FAST_BORROW": "local",
    "LOAD_DEREF": "free",
    "LOAD_CLASSDEREF": "free",
    "LOAD_GLOBAL": "global",
    "LOAD_NAME": "global",
}
_ATTRIBUTES: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"})
_NO_MATTER: Final = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "COPY", "SWAP", "NOP", "RESUME", "PRECALL"})
"""Between the load of a variable and that of its attribute."""

_READS_THE_RATE: Final = frozenset({"get_last_lr", "_last_lr", "last_epoch", "get_lr"})
"""Attributes of a scheduler that change as it steps."""

_OF_OPTIMIZERS: Final = frozenset(
    {
        *("defaults", "state", "param_groups", "step", "grad_scale", "found_inf"),
        *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
        *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
        *("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused", "_opt_called", "_step_count"),
    }
)
"""Attributes of an optimizer that torch, its schedulers and scalers set, and that are watched elsewhere if at all."""

_OF_FUNCTIONS: Final = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")
"""Methods of a function of autograd."""

_LAUNCHES: Final = frozenset({"step", "forward_backward", "__call__"})
"""Attributes of what launches graphs of its own."""

Chain = tuple[str, str, tuple[str, ...]]
"""``self.model.scale`` is ``("local", "self", ("model", "scale"))``."""


class StepReads:
    """Where a function of the user's finds what is no argument of it, as far as its code tells.

    Its code is followed into the functions and methods it calls that are the user's own. Of an object of which the code
    reads single attributes, these count; of one that is passed on or called, all that lies in it. Where a function
    takes an attribute of what it is given, that may be any object that is passed on. Groups and state of optimizers,
    and schedulers, are watched elsewhere. What code does not name is not found: variables of libraries, and names made
    at run time.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], Place] = {}
        self._paths: set[str] = set()
        self._followed: set[tuple[int, int]] = set()
        self._modules: dict[int, nn.Module] = {}
        self._kinds: dict[type[nn.Module], None] = {}
        """Of modules that run, and of all in them."""
        self._passed: dict[int, tuple[str, Any]] = {}
        """Path and object of what is passed on, by identity."""
        self._asked: dict[tuple[str, ...], None] = {}
        """Attributes that code takes from what it is given."""
        self._answered: set[tuple[int, tuple[str, ...]]] = set()
        """Identities of objects and classes, with the attributes that were taken from them."""

    @property
    def places(self) -> list[Place]:
        """All that was found."""
        self._answer()
        return list(self._places.values())

    @property
    def modules(self) -> dict[int, nn.Module]:
        """Those that are passed on or called, by identity."""
        self._answer()
        return self._modules

    def add_function(self, function: Callable[..., Any]) -> None:
        """Find what a function reads."""
        self._follow(function)

    def add_values(self, values: Iterable[Any]) -> None:
        """Values among the arguments, which are compared by identity."""
        held = {f"argument[{index}]": value for index, value in enumerate(values) if not _is_plain(value)}
        for name, value in held.items():
            self._use(_named(value) or name, held, name, value)

    def add_modules(self, modules: Iterable[nn.Module]) -> None:
        """Variables that the forward of modules and of all in them reads; their attributes are watched elsewhere."""
        for root in modules:
            for module in root.modules():
                self._kinds[type(module)] = None
                # Not asked of the class itself, since that of a scripted module answers for its objects alone.
                self._follow(module.__dict__.get("forward", inspect.getattr_static(type(module), "forward", None)))

    def add_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """What optimizers of the user's own keep besides groups and state, and what the code of their step reads."""
        for optimizer in optimizers:
            kind = type(optimizer)
            if _is_of_library(kind):
                continue
            for name, value in vars(optimizer).items():
                if name not in _OF_OPTIMIZERS:
                    self._use(f"{kind.__name__}.{name}", vars(optimizer), name, value)
            self._follow(inspect.unwrap(kind.step), optimizer, kind.__name__)

    # ----- functions

    def _follow(self, function: Any, bound: Any = GONE, path: str = "") -> None:
        """Read a function; ``path`` is where ``bound``, its first argument, was found."""
        if isinstance(function, functools.partial):
            self._follow(function.func)
            self.add_values([*function.args, *function.keywords.values()])
        elif isinstance(function, MethodType):
            owner = function.__self__
            if isinstance(owner, type) and issubclass(owner, Function):  # A variable may hold its ``apply``.
                self._follow_class(path, owner, function.__name__)
            self._follow(function.__func__, owner, path)
        elif isinstance(function, FunctionType):
            if _is_users(function):
                self._read(function, bound, path)
            if (inner := getattr(function, "__wrapped__", None)) is not None:  # A decorator hands on its arguments.
                self._follow(inner, bound, path)
        elif (wrapped := getattr(function, "__wrapped__", None)) is not None and not _is_ours(function):
            self._follow(wrapped)  # functools.cache, for example
        elif not isinstance(function, type | nn.Module) and not _is_of_library(type(function)):
            self._follow(inspect.getattr_static(type(function), "__call__", None), function, path)

    def _read(self, function: FunctionType, bound: Any, path: str) -> None:
        code = function.__code__
        key = (id(code), id(bound))
        if key in self._followed or len(self._followed) >= _MOST_FUNCTIONS:
            return
        self._followed.add(key)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._note(f"defaults of {function.__name__}", function, name, is_whole=True)
        known: dict[str, tuple[str, Any]] = {}
        positional, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
        given = zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
        for name, value in (*given, *(function.__kwdefaults__ or {}).items()):
            known[name] = name, value
        if bound is not GONE and code.co_argcount:
            known[code.co_varnames[0]] = path or code.co_varnames[0], bound
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        self._scan(code, function.__globals__, cells, known, known)

    def _scan(
        self,
        code: CodeType,
        variables: dict[str, Any],
        cells: dict[str, Any],
        local: dict[str, tuple[str, Any]],
        outer: dict[str, tuple[str, Any]],
    ) -> None:
        """One code object and those inside of it.

        Args:
            code: what to read.
            variables: global ones.
            cells: variables of enclosing functions that ran already.
            local: path and object that a variable of this code stands for.
            outer: the same of this code and of what it lies in.
        """
        for kind, name, attributes in _chains(code):
            if kind == "global":
                if name in variables:
                    self._walk(name, variables, name, attributes)
            elif kind == "super" and name in outer:
                self._follow_class(*outer[name], attributes[0])
            elif kind == "given":
                self._asked[attributes] = None
            elif name in (local if kind == "local" else outer):
                self._walk_object(*outer[name], attributes)
            elif kind == "free" and name in cells and _content(cells[name]) is not GONE:
                self._walk(name, cells[name], "cell_contents", attributes)
            elif attributes:
                self._asked[attributes] = None
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._scan(inner, variables, cells, {}, outer)

    # ----- values

    def _walk(self, path: str, owner: Any, key: str, attributes: tuple[str, ...]) -> None:
        """Follow attributes from what lies in one place."""
        value = Place(path, owner, key, False).value()
        if not attributes:
            self._use(path, owner, key, value)
            return
        if isinstance(value, ModuleType):
            if not _is_of_library_module(value) and attributes[0] in vars(value):
                self._walk(f"{path}.{attributes[0]}", vars(value), attributes[0], attributes[1:])
            return
        if isinstance(value, _CONTAINERS):  # A method of it is called.
            self._use(path, owner, key, value, is_read=attributes[0] not in _FILLS)
            return
        if value is GONE or _is_plain(value) or isinstance(value, FunctionType | MethodType):
            self._use(path, owner, key, value)
            if isinstance(value, FunctionType) and attributes[0] in vars(value) and attributes[0] != "__wrapped__":
                self._walk(f"{path}.{attributes[0]}", vars(value), attributes[0], attributes[1:])
            return
        if getattr(type(value), "launches_graphs", False) and attributes[0] not in _LAUNCHES:
            return  # Its report is read, say.
        self._note(path, owner, key, is_whole=False)
        self._walk_object(path, value, attributes)

    def _walk_object(self, path: str, value: Any, attributes: tuple[str, ...]) -> None:
        """Follow attributes of an object that is known to be the same always."""
        if not attributes:
            held = {path: value}
            self._use(path, held, path, value)
            return
        name, rest = attributes[0], attributes[1:]
        if isinstance(value, LRScheduler) and name in _READS_THE_RATE:
            self._note(f"{path}.last_epoch", vars(value), "last_epoch", is_whole=False)
        if not isinstance(value, nn.Module | type | threading.local) and _is_of_library(type(value)):
            return
        if isinstance(value, Optimizer | LRScheduler):
            self._follow_class(path, value, name)
            return
        for owner in _dicts_of(value):
            if name in owner:
                self._walk(f"{path}.{name}", owner, name, rest)
                return
        self._follow_class(path, value, name)
        kind = value if isinstance(value, type) else type(value)
        found = inspect.getattr_static(kind, name, GONE)
        is_code = isinstance(found, property | classmethod | staticmethod | functools.cached_property)
        if found is not GONE and not is_code and not inspect.isroutine(found):
            self._walk(f"{path}.{name}", value, name, rest)

    def _follow_class(self, path: str, value: Any, name: str) -> None:
        """Read what the class of an object has under a name, if it is code."""
        kind = value if isinstance(value, type) else type(value)
        bound = GONE if isinstance(value, type) else value
        if name == "apply" and issubclass(kind, Function):  # Autograd calls what the class has.
            for part in _OF_FUNCTIONS:
                self._follow_class(path, kind, part)
        # Those that are overridden may be called through super().
        for each in [vars(base)[name] for base in kind.__mro__ if name in vars(base)]:
            if isinstance(each, property):
                self._follow(each.fget, bound, path)
            elif isinstance(each, classmethod | staticmethod):
                self._follow(each.__func__, kind if isinstance(each, classmethod) else GONE, path)
            elif isinstance(each, functools.cached_property):
                self._follow(each.func, bound, path)
            elif isinstance(each, FunctionType):
                self._follow(each, bound, path)

    def _answer(self) -> None:
        """Take the attributes that code takes from what it is given from all that it may be."""
        while True:
            before = len(self._answered)
            for attributes in list(self._asked):
                for kind in list(self._kinds):
                    if self._is_new(kind, attributes):
                        self._follow_class(kind.__name__, kind, attributes[0])
                for path, value in list(self._passed.values()):
                    if self._is_new(value, attributes) and _has_code(value, attributes):
                        self._walk_object(path, value, attributes)
            if len(self._answered) == before:
                return

    def _is_new(self, value: Any, attributes: tuple[str, ...]) -> bool:
        key = id(value), attributes
        is_new = key not in self._answered
        self._answered.add(key)
        return is_new

    def _pass(self, path: str, value: Any, depth: int = _DEPTH) -> None:
        """What may be given to any function: an object, or those in a container."""
        if isinstance(value, (*_CONTAINERS, tuple)):
            if depth and len(value) <= _MOST_ENTRIES:
                for each in value.values() if isinstance(value, dict) else value:
                    self._pass(path, each, depth - 1)
        elif isinstance(value, FunctionType | MethodType):
            self._follow(value)
        elif not (_is_plain(value) or _is_of_library(type(value)) or _is_ours(value)) and not isinstance(
            value, ModuleType | nn.Module | Optimizer | LRScheduler
        ):
            self._passed.setdefault(id(value), (path, value))

    def _use(self, path: str, owner: Any, key: str, value: Any, *, is_read: bool = True) -> None:
        """A value that the code uses as a whole."""
        if value is GONE or isinstance(value, ModuleType):
            return
        value = getattr(value, "_orig_mod", value)  # what torch.compile has wrapped
        if isinstance(value, nn.Module):
            self._modules[id(value)] = value
            self.add_modules([value])
        is_function = isinstance(value, FunctionType | MethodType | functools.partial | type)
        is_whole = not is_function and not _is_ours(value) and not isinstance(value, Optimizer | LRScheduler)
        self._note(path, owner, key, is_whole=is_whole, is_read=is_read)
        self._pass(path, value)
        if callable(value):
            self._follow(value, path="" if isinstance(value, MethodType) else path)

    def _note(self, path: str, owner: Any, key: str, *, is_whole: bool, is_read: bool = True) -> None:
        known = self._places.get((id(owner), key))
        if known is not None:
            is_whole, is_read = is_whole or known.is_whole, is_read or known.is_read
            self._places[id(owner), key] = known._replace(is_whole=is_whole, is_read=is_read)
            return
        unique, number = path, 2
        while unique in self._paths:
            unique, number = f"{path} ({number})", number + 1
        self._paths.add(unique)
        self._places[id(owner), key] = Place(unique, owner, key, is_whole, is_read)


def _chains(code: CodeType) -> Iterator[Chain]:
    """Every variable that code loads, with the attributes that it takes from it at once."""
    cells = {*code.co_cellvars, *code.co_freevars}
    current: tuple[str, str] | None = None
    attributes: list[str] = []
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in _NO_MATTER:
            continue
        if current is None and name in _ATTRIBUTES and name != "STORE_ATTR":
            current = "given", ""
        if current is not None and name == "LOAD_SUPER_ATTR":
            yield "super", current[1], (str(instruction.argval),)
            current, attributes = None, []
            continue
        if current is not None and name in _ATTRIBUTES:
            attributes.append(str(instruction.argval))
            if name != "STORE_ATTR":
                continue
            yield *current, tuple(attributes)
            current, attributes = None, []
            continue
        if current is not None:
            yield *current, tuple(attributes)
            current, attributes = None, []
        if name in _LOADS:
            kind, variable = _LOADS[name], str(instruction.argval)
            if kind != "local" or variable not in cells:  # Else it hands the variable to a function inside.
                current = kind, variable
        elif name.startswith("LOAD_FAST") and isinstance(instruction.argval, tuple):  # two at once
            yield "local", str(instruction.argval[0]), ()
            current = "local", str(instruction.argval[1])


def _has_code(value: Any, attributes: tuple[str, ...]) -> bool:
    """False where the first of these attributes is no more than a value of the object, which counts anyhow."""
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and attributes[0] in own:
        return len(attributes) > 1 or callable(own[attributes[0]])
    kind = value if isinstance(value, type) else type(value)
    return inspect.getattr_static(kind, attributes[0], GONE) is not GONE


def _dicts_of(value: Any) -> Iterator[dict[str, Any]]:
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield own
    if isinstance(value, nn.Module):
        yield from (value._modules, value._parameters, value._buffers)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # deleted, or not assigned yet
        return GONE


def _named(value: Any) -> str | None:
    """A name for a value among the arguments."""
    return type(value).__name__ if not isinstance(value, FunctionType | type) else value.__name__


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | Enum | Tensor)


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "graphstep"


def _is_users(function: FunctionType) -> bool:
    path = function.__code__.co_filename
    return (function.__module__ or "").partition(".")[0] not in _NOT_FOLLOWED and not _is_installed(path)


def _is_installed(path: str) -> bool:
    return "site-packages" in path or "dist-packages" in path


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _NOT_FOLLOWED


def _is_of_library_module(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] in _NOT_FOLLOWED or _is_installed(getattr(module, "__file__", None) or "")
