"""What Python reads from modules besides their tensors: a recording has it baked in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any, Final

from torch import Tensor, nn

from graphstep.capture.fast_check import all_same

_GONE: Final = object()
_MODULE_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Attributes:
    """Plain attributes of some modules, and the hooks on them and their parameters, as they were when noted.

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
            (_join(path, name), module.__dict__, name, value)
            for path, module in modules
            for name, value in module.__dict__.items()
            if name not in left_out
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


def _is_equal(mine: Any, theirs: Any) -> bool:
    return type(mine) is type(theirs) and isinstance(mine, (bool, int, float, str)) and bool(mine == theirs)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
