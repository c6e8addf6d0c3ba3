"""Transformer Engine, where it is installed: its autocast, and the fp8 state of its modules around a capture.

Nothing here imports it unless a caller asks for fp8. Its kernels write past the dispatcher, so what a warmup does to
their state is not seen, and has to be saved by name: what ``fp8_meta`` of its modules holds (scales, histories), and
what its manager holds for the whole process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Final

from torch import Tensor, nn

_NAME: Final = "transformer_engine.pytorch"
_MANAGER: Final = "FP8GlobalStateManager"
_BASE: Final = "TransformerEngineBaseModule"
_TENSORS: Final = ("scale", "scale_inv", "amax_history")
_PLAIN: Final = (bool, int, float, str, type(None))

Place = tuple[Any, Any, Tensor]
"""Owner, name or key there, tensor."""


def has_fp8_state(module: nn.Module) -> bool:
    """True for a module of Transformer Engine, or one that keeps its state in the same way."""
    if any(kind.__name__ == _BASE for kind in type(module).__mro__):
        return True
    return isinstance(getattr(module, "fp8_meta", None), dict) and hasattr(module, "fp8_initialized")


class TransformerEngine:
    """The library, as far as it is used.

    Args:
        library: ``transformer_engine.pytorch``.
        manager: the class that holds its state for the process.
    """

    def __init__(self, library: ModuleType, manager: Any) -> None:
        self._library, self.manager = library, manager
        self._skips: bool | None = None

    @classmethod
    def found(cls, *, imports: bool) -> TransformerEngine | None:
        """The library if it is imported, or if ``imports`` and it can be; else ``None``."""
        library = sys.modules.get(_NAME)
        if library is None and imports:
            try:
                library = importlib.import_module(_NAME)
            except ImportError:
                return None
        if library is None:
            return None
        # It moved from one file to another between versions.
        places = (library, *(sys.modules.get(f"{_NAME}.{name}") for name in ("fp8", "quantization")))
        manager = next((found for each in places if (found := getattr(each, _MANAGER, None)) is not None), None)
        return None if manager is None else cls(library, manager)

    def autocast(
        self, *, enabled: bool, calibrating: bool, recipe: Any, group: Any, in_graph: bool
    ) -> AbstractContextManager[Any]:
        """Its context for forwards. ``in_graph``: it does not update scales at its end."""
        names = ("recipe", "amax_reduction_group")
        entered = getattr(self._library, "autocast", None)
        if entered is None:
            entered, names = self._library.fp8_autocast, ("fp8_recipe", "fp8_group")
        given = dict(zip(names, (recipe, group), strict=True))
        context: AbstractContextManager[Any] = entered(
            enabled=enabled, calibrating=calibrating, _graph=in_graph, **given
        )
        return context

    @property
    def is_enabled(self) -> bool:
        """True inside of an autocast to fp8."""
        return bool(self.manager.is_fp8_enabled())

    def register(self, modules: Iterable[nn.Module]) -> bool:
        """Before a replay: have the update of scales include these modules. True if the first of them is the step's."""
        for module in modules:
            if has_fp8_state(module):
                meta: Any = module.fp8_meta
                now = (("fp8_group", self.manager.get_fp8_group()), ("recipe", self.manager.get_fp8_recipe()))
                # An equal one stays: that another object is in its place would count as a change of the module.
                meta.update((name, value) for name, value in now if meta.get(name) != value)
                self.manager.add_fp8_tensors_to_global_buffer(meta)
        return bool(self.manager.is_first_fp8_module())

    def update_after_backward(self) -> None:
        """Update the scales of gradients, as the first module does at the end of its backward."""
        self.manager.reduce_and_update_fp8_tensors(forward=False)

    def skip_weight_update(self, skips: bool) -> None:
        """Write the flag on the device that keeps weights as they were quantised. Written where it changes only."""
        if skips == self._skips:
            return
        setter = getattr(self.manager, "set_skip_fp8_weight_update_tensor", None)
        if setter is not None:
            setter(skips)
        else:  # Later versions have a field for it.
            flag = getattr(self.manager.quantization_state, "skip_fp8_weight_update_tensor", None)
            if isinstance(flag, Tensor):
                flag.fill_(skips)
        self._skips = skips


@contextmanager
def fp8_state_kept(modules: Sequence[nn.Module], library: TransformerEngine | None) -> Iterator[None]:
    """Leave fp8 state as it was before the body: bit for bit, in the tensors where it is.

    Where the body fails everything is as before. Where it does not, state that it has made stays, because graphs write
    to it, with the values of a fresh module: scales of one and empty histories.
    """
    stateful = [module for module in modules if has_fp8_state(module)]
    kept: list[_Kept | _Managed] = [_Kept(module) for module in stateful]
    owners = [] if library is None else [library.manager]
    state = getattr(library.manager, "quantization_state", None) if library is not None else None
    if hasattr(state, "__dict__"):
        owners.append(state)
    kept += [_Managed(owner) for owner in owners]
    try:
        yield
    except BaseException:
        for each in kept:
            each.put_back()
        raise
    for each in kept:
        each.restore_values()


class _Kept:
    """What one ``fp8_meta`` holds, and the flags beside it."""

    def __init__(self, module: nn.Module) -> None:
        self._meta: Any = module.fp8_meta
        self._flags = module.__dict__
        self._entries = _copy(self._meta)
        self._plain = {n: v for n, v in self._flags.items() if isinstance(v, _PLAIN)}
        self._tensors = {path: (place, place[2].clone()) for path, place in _tensors_of(self._meta, "")}

    def restore_values(self) -> None:
        """Give tensors their values, and those that are new the values of a fresh module."""
        for path, (_, name, tensor) in _tensors_of(self._meta, ""):
            kept = self._tensors.get(path)
            if kept is not None and kept[1].shape == tensor.shape:
                tensor.copy_(kept[1])
            else:
                tensor.fill_(0.0 if "amax" in str(name) else 1.0)

    def put_back(self) -> None:
        """Give everything what it was, and let go of what is new."""
        _refill(self._meta, self._entries)
        self._flags.update(self._plain)
        for (owner, name, tensor), kept in self._tensors.values():
            if isinstance(owner, dict):
                owner[name] = tensor
            elif not isinstance(owner, list | tuple):
                setattr(owner, name, tensor)
            tensor.copy_(kept)


class _Managed:
    """What lies in attributes of the manager, or of an object in it."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._values = {name: value for name, value in vars(owner).items() if _is_state(name, value)}
        self._containers = {n: _copy(v) for n, v in self._values.items() if isinstance(v, list | dict)}
        tensors = {id(tensor): tensor for _, (_, _, tensor) in _tensors_of(self._values, "")}
        self._tensors = [(tensor, tensor.clone()) for tensor in tensors.values()]

    def restore_values(self) -> None:
        """Give flags and tensors their values. What has been registered for graphs stays."""
        for name, value in self._values.items():
            is_made = value is None and isinstance(vars(self._owner).get(name), Tensor)  # Graphs read it.
            if not is_made and not isinstance(value, list | dict) and vars(self._owner).get(name) is not value:
                setattr(self._owner, name, value)
        for tensor, kept in self._tensors:
            tensor.copy_(kept)

    def put_back(self) -> None:
        """Give everything what it was."""
        for name, value in self._values.items():
            if vars(self._owner).get(name) is not value:
                setattr(self._owner, name, value)
            if name in self._containers:
                _refill(value, self._containers[name])
        for tensor, kept in self._tensors:
            tensor.copy_(kept)


def _is_state(name: str, value: Any) -> bool:
    return not name.startswith("__") and not callable(value) and not isinstance(value, classmethod | staticmethod)


def _tensors_of(value: Any, path: str) -> Iterator[tuple[str, Place]]:
    """Tensors in nested dicts, lists and objects with scales, each with its path."""
    if isinstance(value, dict):
        entries: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        entries = [(name, getattr(value, name)) for name in _TENSORS if isinstance(getattr(value, name, None), Tensor)]
    for name, each in list(entries):
        if isinstance(each, Tensor):
            yield f"{path}.{name}", (value, name, each)
        elif not isinstance(each, _PLAIN):
            yield from _tensors_of(each, f"{path}.{name}")


def _copy(value: Any) -> Any:
    """Lists and dicts copied, one in another; what lies in them is the same."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _refill(target: Any, content: Any) -> None:
    """Give a container what it had, and so those in it that are still the same object."""
    if isinstance(target, dict):
        inner = {key: target.get(key) for key in content}
        target.clear()
        target.update({key: _joined(inner[key], each) for key, each in content.items()})
    else:
        target[:] = content


def _joined(now: Any, content: Any) -> Any:
    if isinstance(content, list | dict) and type(now) is type(content):
        _refill(now, content)
        return now
    return content
