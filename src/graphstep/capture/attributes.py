"""What Python reads from modules besides their tensors: a recording has it baked in."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from types import MemberDescriptorType, ModuleType
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphstep.capture.attribute_look import FastLook
from graphstep.capture.callables import held_by, refuse_collected
from graphstep.capture.host_arrays import HostArray
from graphstep.capture.places import GONE, PLAIN, Place, join, key_name, storage_of
from graphstep.capture.randomness import set_state, state_of
from graphstep.engine import torch_private
from graphstep.errors import CaptureError
from graphstep.native.interface import Facts

_MODULE_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SEQUENCES: Final = (list, tuple, deque, set, frozenset)
OF_LIBRARIES: Final = frozenset(sys.stdlib_module_names) - {"types", "argparse"} | {"torch", "numpy"}
"""Not looked into, except for namespaces: loggers, locks and the like change without a meaning."""
_DEPTH: Final = 3
_MOST_ENTRIES: Final = 1000

Named = tuple[str, nn.Module]


class Attributes:
    """Plain attributes of some modules, and the hooks on them and their parameters, as they were when noted.

    What lies in an attribute that is a list, tuple, deque, set, dict or an object of the user's own counts as well, and
    what lies in that, three levels deep; of more than a thousand entries in one place only their number. So do the own
    attributes and ``training`` of a module that lies there.

    Numbers, strings, flags and small arrays of numpy are compared by value, everything else by identity. ``training``
    of the modules themselves is left to the signature of the call, and so is ``forward`` of the first one, which is
    replaced.

    Args:
        modules: name and module, each once; first the one whose forward is captured.
        hooks_of: name and module of those whose hooks run inside the recording.
        parameters_of: name and module of those whose parameters' hooks run inside the recording.
        places: what else is read. Lists and dicts there may be filled by a run.
    """

    def __init__(
        self,
        modules: Iterable[Named],
        *,
        hooks_of: Iterable[Named] = (),
        parameters_of: Iterable[Named] = (),
        callables: Iterable[Any] = (),
        places: Iterable[Place] = (),
    ) -> None:
        self._modules, self._places = list(modules), list(places)
        self._callables = [(f"argument {getattr(c, '__qualname__', type(c).__name__)}", c) for c in callables]
        self._noted = self._walked()
        self._module_hooks: list[tuple[str, Mapping[int, Any], tuple[int, ...]]] = []
        self._tensor_hooks: list[tuple[str, Tensor, str, tuple[int, ...]]] = []
        has_inner = False
        for path, module in hooks_of:
            for name in _MODULE_HOOKS:
                hooks: Mapping[int, Any] = getattr(module, name)
                self._module_hooks.append((join(path, "hooks"), hooks, tuple(hooks)))
            has_inner = True
        if has_inner:
            for hooks in torch_private.global_module_hooks():
                self._module_hooks.append(("hooks of all modules", hooks, tuple(hooks)))
        for path, module in parameters_of:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    for name in _TENSOR_HOOKS:
                        found = tuple(getattr(parameter, name, None) or ())
                        self._tensor_hooks.append((join(path, f"{key}.hooks"), parameter, name, found))

        self._look = FastLook([self])

    def _walked(self) -> _Noted:
        return _walk(self._modules, self._callables, self._places)

    def _refuse_collected(self, now: _Noted, where: str) -> None:
        roots = tuple(path for path, _ in self._callables)
        changed = [
            path
            for path in dict.fromkeys([*self._noted.values, *now.values])
            if path.startswith(roots) and not _is_same(now.values.get(path, GONE), self._noted.values.get(path, GONE))
        ]
        refuse_collected(changed, where)

    def ignore_changed(self) -> None:
        """Leave out those that have another value by now, or are new: the captured function sets them itself."""
        if self._look.holds():
            return
        now = self._walked()
        gone = {p for p, value in self._noted.values.items() if not _is_same(now.values.get(p, GONE), value)}
        self._noted = now.without({*gone, *(path for path in now.values if path not in self._noted.values)})
        self._look = FastLook([self])

    def hold(self) -> bool:
        """True if surely nothing has changed. Cost: less than 0.1 microseconds an attribute or kind of hook."""
        return self._look.holds()

    def add_to(self, facts: Facts) -> bool:
        """Have the compiled part look at the same. False if it cannot."""
        return self._look.add_to(facts)

    def changed(self) -> list[str]:
        """The paths of what is not as it was."""
        if self._look.holds():
            return []
        found = self._noted.changed()
        found += [path for path, hooks, before in self._module_hooks if (hooks or before) and tuple(hooks) != before]
        for path, parameter, name, before in self._tensor_hooks:
            hooks_now = getattr(parameter, name, None)
            if (hooks_now or before) and tuple(hooks_now or ()) != before:
                found.append(path)
        return found

    # ----- around a run

    def again(self, callables: Iterable[Any] = ()) -> Attributes:
        """The attributes of the same modules as they are now, those that were left out as well; no hooks.

        Args:
            callables: what they hold is noted too: the object of a method, the variables of a closure.
        """
        return Attributes(self._modules, callables=callables, places=self._places)

    def places(self) -> Iterator[tuple[Any, Any, Any]]:
        """Owner, key and noted value: of dicts, attributes and slots, and of lists by position."""
        yield from ((owner, key, value) for _, owner, key, value in self._noted.entries)
        yield from ((owner, name, value) for _, owner, name, value in self._noted.slots)
        for _, owner, elements in self._noted.sequences:
            if isinstance(owner, list):
                yield from ((owner, index, element) for index, element in enumerate(elements))

    @property
    def noted(self) -> _Noted:
        """What was noted, for those who tell more of it than this class."""
        return self._noted

    def put_back(self) -> None:
        """Give attributes, what lies in them, and generators of random numbers the values that were noted."""
        self._noted.put_back()

    def refuse_changes(
        self, where: str, used: Iterable[Tensor], *, may_leave_losses: bool = False, may_fill: bool = True
    ) -> None:
        """Refuse what a run since has done and a replay could not do again.

        Args:
            where: name of the region that has run.
            used: tensors over the storages that existed before the run, and that it used.
            may_leave_losses: the run has its own backward: a tensor with a gradient may stay for its value.
            may_fill: lists and dicts of places may have got longer, as caches do in the first run of their kind.

        Raises:
            CaptureError: it counted, kept a history, carried a tensor over to the next run, left one that has a
                gradient, or drew random numbers on the host.
        """
        now = self._walked()
        if self._callables:
            self._refuse_collected(now, where)
        drawn = [path for path, generator, state in self._noted.generators if state_of(generator) != state]
        if drawn:
            raise CaptureError(
                f"each run draws host randomness from {', '.join(drawn)}; a replay runs no Python, and would go on "
                "with the numbers of the capture",
                where=where,
                fix="draw on the device with torch, or draw outside of the captured module and give it as an argument",
            )
        counted = list(self._noted.counted(now, may_fill=may_fill))
        if counted:
            raise CaptureError(
                f"each run changes {', '.join(counted)}; a replay runs no Python, and would go on with one value",
                where=where,
                fix="keep it in a buffer and update that in place, or change it outside of the captured module",
            )
        storages = {storage_of(tensor) for tensor in used} - {None}
        carried = [
            path
            for path, value in self._noted.values.items()
            if isinstance(value, Tensor)
            and now.values.get(path) is not value
            and storage_of(value) in storages
            and storage_of(now.values.get(path)) != storage_of(value)
        ]
        carried += [
            path
            for path, owner, before in self._noted.sequences[self._noted.num_strict :]
            if isinstance(owner, list | deque)
            and len(owner) != len(before)
            and any(isinstance(each, Tensor) and storage_of(each) in storages for each in before)
        ]
        if carried:
            raise CaptureError(
                f"each run reads the tensor in {', '.join(carried)} and replaces it by another one; a replay would "
                "read the one of the capture",
                where=where,
                fix="keep it in a buffer and write into that (copy_)",
            )
        computed = {join(path, name) for path, module in self._modules for name in _set_by_hooks(module)}
        left = [
            path
            for path, value in now.values.items()
            if isinstance(value, Tensor)
            and value.requires_grad
            and self._noted.values.get(path) is not value
            and path not in computed
        ]
        if left and not may_leave_losses:
            raise CaptureError(
                f"each run leaves a tensor with a gradient in {', '.join(left)}; after a replay it would belong to no "
                "graph of autograd",
                where=where,
                fix="return it from the captured module, or detach it if only its value is wanted",
            )


@dataclass(slots=True)
class _Noted:
    """What a walk has found."""

    values: dict[str, Any] = field(default_factory=dict)
    """Of every path."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Numbers of entries of lists, dicts and the like, those of places last."""
    num_sizes: int = 0
    """How many of them are of modules."""
    entries: list[tuple[str, dict[Any, Any], Any, Any]] = field(default_factory=list)
    slots: list[tuple[str, Any, str, Any]] = field(default_factory=list)
    dicts: list[tuple[str, dict[Any, Any], tuple[Any, ...]]] = field(default_factory=list)
    """Those of modules and objects too, each with its keys."""
    sequences: list[tuple[str, Any, tuple[Any, ...]]] = field(default_factory=list)
    """Lists, deques and sets, each with what is in it."""
    num_strict: int = 0
    """How many of them, from the first, are of modules: a run that fills others may fill them once, as caches are."""
    large: list[tuple[str, Any, int]] = field(default_factory=list)
    generators: list[tuple[str, Any, Any]] = field(default_factory=list)
    arrays: list[HostArray] = field(default_factory=list)

    def changed(self) -> list[str]:
        """The paths of what is not as it was."""
        found = [path for path, owner, key, value in self.entries if not _is_same(owner.get(key, GONE), value)]
        found += [p for p, owner, name, value in self.slots if not _is_same(getattr(owner, name, GONE), value)]
        found += [path for path, owner, size in self.large if len(owner) != size]
        found += [each.path for each in self.arrays if each.has_changed()]
        for path, owner, before in self.sequences:
            if isinstance(owner, set) or len(owner) != len(before):
                found += [path] if len(owner) != len(before) or owner != set(before) else []
            else:
                pairs = enumerate(zip(owner, before, strict=True))
                found += [f"{path}[{index}]" for index, (now, then) in pairs if not _is_same(now, then)]
        for path, owner, keys in self.dicts:
            if len(owner) != len(keys):
                found += [join(path, key_name(key)) for key in owner.keys() - set(keys)]
        return found

    def counted(self, now: _Noted, *, may_fill: bool) -> Iterator[str]:
        """Numbers, texts and flags that are no longer as they were, and what is kept in another way, in words."""
        for path, value in self.values.items():
            after = now.values.get(path, GONE)
            if isinstance(value, (*PLAIN, Enum)) and after is not GONE and not _is_same(after, value):
                yield f"{path} ({value!r} before, {after!r} after)"
        yield from (f"{each.path} (its content)" for each in self.arrays if each.has_changed())
        for path, size in islice(self.sizes.items(), self.num_sizes if may_fill else None):
            if now.sizes.get(path, size) != size:
                yield f"{path} ({size} entries before, {now.sizes[path]} after)"
        for path, owner, before in self.sequences[: self.num_strict]:
            if len(owner) != len(before):
                continue
            is_moved = list(map(id, owner)) != list(map(id, before))
            if isinstance(owner, list):  # A place that is only written is as good as an attribute.
                is_moved = is_moved and sorted(map(id, owner)) == sorted(map(id, before))
            if isinstance(owner, set):
                is_moved = owner != set(before)
            if is_moved:
                yield f"{path} (its entries)"

    def put_back(self) -> None:
        """Give everything the value that was noted."""
        for _, owner, keys in self.dicts:
            for key in owner.keys() - set(keys):
                del owner[key]
        for _, owner, key, value in self.entries:
            if owner.get(key, GONE) is not value:
                owner[key] = value
        for _, owner, name, value in self.slots:
            if value is GONE and hasattr(owner, name):
                object.__delattr__(owner, name)
            elif getattr(owner, name, GONE) is not value:
                (type if isinstance(owner, type) else object).__setattr__(owner, name, value)
        for _, owner, before in self.sequences:
            if list(map(id, owner)) != list(map(id, before)):
                owner.clear()
                (owner.update if isinstance(owner, set) else owner.extend)(before)
        for _, generator, state in self.generators:
            if state_of(generator) != state:
                set_state(generator, state)
        for array in self.arrays:
            array.put_back()

    def without(self, paths: set[str]) -> _Noted:
        """All but these and what lies in them."""

        def keeps(entry: tuple[Any, ...]) -> bool:
            path = entry[0]
            return path not in paths and not any(path[:end] in paths for end, sign in enumerate(path) if sign in ".[")

        return _Noted(
            values={path: value for path, value in self.values.items() if keeps((path,))},
            sizes={path: size for path, size in self.sizes.items() if keeps((path,))},
            num_sizes=sum(keeps((path,)) for path in islice(self.sizes, self.num_sizes)),
            entries=list(filter(keeps, self.entries)),
            slots=list(filter(keeps, self.slots)),
            dicts=list(filter(keeps, self.dicts)),
            sequences=[each for each in self.sequences if keeps(each) and not _holds_any(each, paths)],
            num_strict=sum(map(keeps, self.sequences[: self.num_strict])),
            large=list(filter(keeps, self.large)),
            generators=list(filter(keeps, self.generators)),
            arrays=list(filter(keeps, self.arrays)),
        )


def _holds_any(sequence: tuple[str, Any, tuple[Any, ...]], paths: set[str]) -> bool:
    """True if one of the paths is of an element: the whole is left out then."""
    path, _, elements = sequence
    return any(f"{path}[{index}]" in paths for index in range(len(elements)))


def _walk(modules: Iterable[Named], callables: Iterable[tuple[str, Any]] = (), places: Iterable[Place] = ()) -> _Noted:
    """Note everything, the nearest first, and each object once."""
    modules, places = list(modules), list(places)
    found = _Noted()
    own = frozenset(vars(nn.Module())) | torch_private.OF_DATA_PARALLEL
    seen = {id(module) for _, module in modules}
    level: list[tuple[str, Any]] = []
    for index, (path, module) in enumerate(modules):
        left_out = own if index else own | {"forward"}
        level += _note_dict(found, path, module.__dict__, left_out)
    for path, value in callables:
        held = held_by(path, value)
        found.slots += held.cells
        level += held.values
        level += [each for place, owner in held.dicts for each in _note_dict(found, place, owner)]
    _descend(found, level, seen, own)
    found.num_strict = len(found.sequences)
    found.num_sizes = len(found.sizes)
    level = []
    for place in places:
        value = place.value()
        kind = found.entries if isinstance(place.owner, dict) else found.slots
        kind.append((place.path, place.owner, place.key, value))
        if place.is_whole:
            level.append((place.path, value))
        else:
            found.values[place.path] = value
    _descend(found, level, seen, own)
    for place in places:
        if not place.is_read:
            found.sizes.pop(place.path, None)
    return found


def _descend(found: _Noted, level: list[tuple[str, Any]], seen: set[int], own: frozenset[str]) -> None:
    """Note some values and what lies in them."""
    for depth in range(_DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            found.values[path] = value
            if value is None or isinstance(value, (*PLAIN, Tensor)) or id(value) in seen:
                continue
            if isinstance(value, (*_SEQUENCES, dict)):
                found.sizes[path] = len(value)
            if depth < _DEPTH:
                seen.add(id(value))
                below += _look_into(found, path, value, own)
        level = below


def _look_into(found: _Noted, path: str, value: Any, own: frozenset[str]) -> list[tuple[str, Any]]:
    """Note what lies directly in a value; returns it."""
    if isinstance(value, (*_SEQUENCES, dict)):
        is_fixed = isinstance(value, tuple | frozenset)
        if len(value) > _MOST_ENTRIES:
            found.large += [] if is_fixed else [(path, value, len(value))]
            return []
        if isinstance(value, dict):
            return _note_dict(found, path, value)
        if not is_fixed:
            found.sequences.append((path, value, tuple(value)))
        return [] if isinstance(value, set | frozenset) else [(f"{path}[{i}]", each) for i, each in enumerate(value)]
    if isinstance(value, nn.Module):
        return _note_dict(found, path, value.__dict__, own - {"training"})
    state = state_of(value)
    if state is not None:
        found.generators.append((path, value, state))
        return []
    return _look_into_object(found, path, value)


def _look_into_object(found: _Noted, path: str, value: Any) -> list[tuple[str, Any]]:
    found.arrays += HostArray.of(path, value)
    kind = type(value)
    if kind.__module__.partition(".")[0] in OF_LIBRARIES or isinstance(value, type | ModuleType | Enum):
        return []
    if isinstance(value, Optimizer | LRScheduler):
        return []
    inside: list[tuple[str, Any]] = []
    if isinstance(getattr(value, "__dict__", None), dict):
        inside += _note_dict(found, path, value.__dict__)
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType):
                each = getattr(value, name, GONE)
                found.slots.append((join(path, name), value, name, each))
                inside.append((join(path, name), each))
    return inside


def _note_dict(
    found: _Noted, path: str, owner: dict[Any, Any], left_out: frozenset[str] = frozenset()
) -> list[tuple[str, Any]]:
    found.dicts.append((path, owner, tuple(owner)))
    noted = [(join(path, key_name(key)), owner, key, value) for key, value in owner.items() if key not in left_out]
    found.entries += noted
    return [(entry[0], entry[-1]) for entry in noted]


def _set_by_hooks(module: nn.Module) -> Iterator[str]:
    """Attributes that a hook of the module computes for its own forward, as weight_norm and pruning do."""
    for hook in module._forward_pre_hooks.values():
        yield from (str(getattr(hook, name)) for name in ("name", "_tensor_name") if hasattr(hook, name))


def _is_same(mine: Any, theirs: Any) -> bool:
    if mine is theirs:
        return True
    if type(mine) is not type(theirs):
        return False
    is_plain_list = isinstance(mine, list) and all(isinstance(element, PLAIN) for element in mine)
    if isinstance(mine, tuple) or is_plain_list:  # Names of active adapters, say, made anew with the same content.
        return len(mine) == len(theirs) and all(map(_is_same, mine, theirs))
    return isinstance(mine, PLAIN) and bool(mine == theirs)
