"""What Python reads from modules besides their tensors: a recording has it baked in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from types import ModuleType
from typing import Any, Final

from torch import Tensor, nn

from graphstep.capture.fast_check import all_same

_GONE: Final = object()
_MODULE_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN: Final = (bool, int, float, str)
_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Attributes:
    """Plain attributes of some modules, and the hooks on them and their parameters, as they were when noted.

    What lies directly in an attribute that is a dict or an object of the user's own counts as well.

    Numbers, strings and flags are compared by value, everything else by identity. ``training`` is left to the
    signature of the call.

    Args:
        modules: name and module, each once.
        hooks_of: name and module of those whose hooks run inside the recording.
        parameters_of: name and module of those whose parameters' hooks run inside the recording.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        *,
        hooks_of: Iterable[tuple[str, nn.Module]] = (),
        parameters_of: Iterable[tuple[str, nn.Module]] = (),
    ) -> None:
        left_out = {*vars(nn.Module()), "forward"}
        self._noted = [
            noted
            for path, module in modules
            for name, value in module.__dict__.items()
            if name not in left_out
            for noted in _entries(_join(path, name), module.__dict__, name, value)
        ]
        self._module_hooks: list[tuple[str, Mapping[int, Any], tuple[int, ...]]] = []
        self._tensor_hooks: list[tuple[str, Tensor, str, tuple[int, ...]]] = []
        for path, module in hooks_of:
            for name in _MODULE_HOOKS:
                hooks: Mapping[int, Any] = getattr(module, name)
                self._module_hooks.append((_join(path, "hooks"), hooks, tuple(hooks)))
        for path, module in parameters_of:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    for name in _TENSOR_HOOKS:
                        found = tuple(getattr(parameter, name, None) or ())
                        self._tensor_hooks.append((_join(path, f"{key}.hooks"), parameter, name, found))

        self._look = FastLook([self])

    def ignore_changed(self) -> None:
        """Leave out those that have another value by now: the captured function sets them itself."""
        changed = set(self.changed())
        self._noted = [noted for noted in self._noted if noted[0] not in changed]
        self._look = FastLook([self])

    def counted(self) -> list[str]:
        """Numbers, texts and flags that are no longer as they were, with both values."""
        return [
            f"{path} ({value!r} before, {attributes[name]!r} after)"
            for path, attributes, name, value in self._noted
            if isinstance(value, _PLAIN) and name in attributes and not _is_equal(attributes[name], value)
        ]

    def changed(self) -> list[str]:
        """The paths of what is not as it was. Cost: less than 0.1 microseconds an attribute or kind of hook."""
        if self._look.holds():
            return []
        found = [
            path
            for path, attributes, name, value in self._noted
            if attributes.get(name, _GONE) is not value and not _is_equal(attributes.get(name, _GONE), value)
        ]
        found += [path for path, hooks, before in self._module_hooks if (hooks or before) and tuple(hooks) != before]
        for path, parameter, name, before in self._tensor_hooks:
            hooks_now = getattr(parameter, name, None)
            if (hooks_now or before) and tuple(hooks_now or ()) != before:
                found.append(path)
        return found


class FastLook:
    """For several of them: answers "surely as they were", or "look closer", at the speed of C."""

    def __init__(self, watched: Iterable[Attributes]) -> None:
        watched = list(watched)
        noted = [each for attributes in watched for each in attributes._noted]
        self._attributes = [attributes for _, attributes, _, _ in noted]
        self._names = [name for _, _, name, _ in noted]
        self._values = [value for _, _, _, value in noted]
        module_hooks = {id(hooks): hooks for each in watched for _, hooks, _ in each._module_hooks}
        self._module_hooks = list(module_hooks.values())
        tensor_hooks = [(parameter, name) for each in watched for _, parameter, name, _ in each._tensor_hooks]
        self._parameters = [parameter for parameter, _ in tensor_hooks]
        self._hook_names = [name for _, name in tensor_hooks]
        kinds = [each._module_hooks for each in watched], [each._tensor_hooks for each in watched]
        self._had_hooks = any(entry[-1] for kind in kinds for entries in kind for entry in entries)

    def holds(self) -> bool:
        """True if all attributes are the same objects, and there are no hooks and were none."""
        return (
            not self._had_hooks
            and not any(self._module_hooks)
            and not any(map(getattr, self._parameters, self._hook_names, repeat(None)))
            and all_same(self._values, map(dict.get, self._attributes, self._names))
        )


def _entries(path: str, owner: dict[str, Any], name: str, value: Any) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """An attribute, and what is directly in it if it is a plain object or a dict: planners and caches are such."""
    yield path, owner, name, value
    inside = value if type(value) is dict else _attributes_of(value)
    yield from ((_join(path, key), inside, key, each) for key, each in inside.items() if isinstance(key, str))


def _attributes_of(value: Any) -> dict[str, Any]:
    kind = type(value)
    is_library = kind.__module__.partition(".")[0] in {"torch", "builtins", "numpy", "functools", "collections"}
    if is_library or isinstance(value, (nn.Module, Tensor, type, ModuleType)) or callable(value):
        return {}
    found: dict[str, Any] = getattr(value, "__dict__", {})
    return found


def _is_equal(mine: Any, theirs: Any) -> bool:
    return type(mine) is type(theirs) and isinstance(mine, _PLAIN) and bool(mine == theirs)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
