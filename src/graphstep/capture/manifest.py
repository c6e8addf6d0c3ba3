"""The tensors that recordings read or write and did not allocate, with names, owners and addresses."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from graphstep.capture.fast_check import FastCheck
from graphstep.errors import StaleAddressError

DROP: Final = "drop the graphs (reset(), reset_cuda_graph(), or close and attach or build again)"
ATTACH_AGAIN: Final = "drop the graphs (close() the manager and attach again)"
_MOST_NAMED: Final = 12


class Role(enum.Enum):
    """What a tensor is to the recordings."""

    WEIGHT = "weight"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor, or the lack of one, as it was when it was noted. ``container[key]`` is where it is kept."""

    name: str
    role: Role
    tensor: Tensor | None
    facts: tuple[Any, ...] | None
    """Address, whether it wants a gradient, shape, strides."""
    container: dict[str, Any]
    key: str
    may_be_frozen: bool = False
    """Whether it wants a gradient is asked elsewhere."""

    def has_changed(self) -> bool:
        """True if a recording that was made for this tensor must not run."""
        current = self.container.get(self.key)
        if current is None or self.facts is None:
            return current is not self.tensor
        # Another parameter over the same memory has a gradient of its own, which the recording does not know.
        if current is not self.tensor and self.role is Role.WEIGHT:
            return True
        facts = _facts_of(current)
        return facts != self.facts and not (
            self.may_be_frozen and (facts[0], *facts[2:]) == (self.facts[0], *self.facts[2:])
        )

    def explain(self) -> str:
        """How it differs from what was noted."""
        current = self.container.get(self.key)
        what = f"{self.role.value} {self.name}"
        if self.tensor is None or self.facts is None:
            return f"{what} was not there at capture"
        if current is None:
            return f"{what} was removed"
        address, requires_grad, shape, stride = self.facts
        if current is not self.tensor:
            return f"{what} was replaced by another tensor: captured at {address:#x}, now at {current.data_ptr():#x}"
        if current.data_ptr() != address:
            return f"{what} moved: captured at {address:#x}, now at {current.data_ptr():#x}"
        if current.requires_grad != requires_grad and not self.may_be_frozen:
            return f"{what} had requires_grad={requires_grad} at capture, now {current.requires_grad}"
        now = f"{tuple(current.shape)} with strides {current.stride()}"
        return f"{what} changed its layout: captured {tuple(shape)} with strides {stride}, now {now}"


@dataclass(frozen=True, slots=True)
class Child:
    """One submodule as it was when it was noted."""

    name: str
    module: nn.Module | None
    container: Mapping[str, nn.Module | None]
    key: str


@dataclass(frozen=True, slots=True)
class Watched:
    """Everything about some modules that must be as it was for a recording of them to run."""

    entries: tuple[Entry, ...]
    children: tuple[Child, ...]
    sizes: tuple[tuple[str, dict[str, Any], int], ...]
    """Module path, the dict of its parameters, buffers or submodules, and how many those were."""
    fast: FastCheck

    def is_unchanged(self) -> bool:
        """Compare, reading only host data. Cost: about a quarter of a microsecond a parameter if nothing changed."""
        return self.fast.holds() or not (
            any(entry.has_changed() for entry in self.entries)
            or any(child.container.get(child.key) is not child.module for child in self.children)
            or any(len(contents) != size for _, contents, size in self.sizes)
        )

    def changes(self) -> list[str]:
        """Everything that was moved, replaced, removed or added, in words."""
        found = [entry.explain() for entry in self.entries if entry.has_changed()]
        for child in self.children:
            if child.container.get(child.key) is not child.module:
                how = "replaced by another module" if child.key in child.container else "removed"
                found.append(f"module {child.name} was {how}")
        known = {(id(entry.container), entry.key) for entry in self.entries}
        known |= {(id(child.container), child.key) for child in self.children}
        for path, contents, _ in self.sizes:
            added = [key for key in contents if (id(contents), key) not in known]
            found.extend(f"{_join(path, key)} was not there at capture" for key in added)
        return found

    def put_back(self) -> list[str]:
        """Give the modules back the tensors that they had, and name those that they had no longer."""
        replaced = [entry for entry in self.entries if entry.container.get(entry.key) is not entry.tensor]
        for entry in replaced:
            entry.container[entry.key] = entry.tensor
        return [f"{entry.role.value} {entry.name}" for entry in replaced]


class Manifest:
    """Addresses that a session's recordings depend on, by the names that the modules give them.

    Tensors that no module owns have no name and cannot be replaced behind the session's back: the session keeps them
    alive with the recordings instead.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, str], Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def watch(
        self, modules: Iterable[tuple[str, nn.Module]], leaves: Iterable[Tensor] = (), *, may_be_frozen: bool = False
    ) -> Watched:
        """Note every parameter, buffer and submodule of the modules as they are now.

        Args:
            modules: name and module; their descendants are included.
            may_be_frozen: another ``requires_grad`` is no change.
            leaves: tensors that a backward pass accumulates into; those that no module owns are noted as well.
        """
        entries: dict[tuple[int, str], Entry] = {}
        children: list[Child] = []
        sizes: list[tuple[str, dict[str, Any], int]] = []
        for prefix, root in modules:
            for path, module in root.named_modules(prefix=prefix):
                for container, role in ((module._parameters, Role.WEIGHT), (module._buffers, Role.STATE)):
                    for key, tensor in container.items():
                        entries[id(container), key] = _entry(
                            _join(path, key), role, tensor, container, key, may_be_frozen=may_be_frozen
                        )
                    sizes.append((path, container, len(container)))
                children.extend(
                    Child(_join(path, key), child, module._modules, key) for key, child in module._modules.items()
                )
                sizes.append((path, module._modules, len(module._modules)))
        owned = {id(entry.tensor) for entry in entries.values()}
        for leaf in leaves:
            if id(leaf) not in owned:
                name = f"of shape {tuple(leaf.shape)} outside the model"
                entries[id(leaf), ""] = _entry(name, Role.WEIGHT, leaf, {"": leaf}, "")
        self._entries.update(entries)
        tensors = [entry.tensor for entry in entries.values() if entry.tensor is not None]
        fast = FastCheck((contents for _, contents, _ in sizes), tensors)
        return Watched(tuple(entries.values()), tuple(children), tuple(sizes), fast)

    def forget(self) -> None:
        """Drop all entries and let go of the tensors."""
        self._entries.clear()


def verify(watched: Watched, where: str, *, instead: str = DROP) -> None:
    """Refuse to go on if something moved since it was noted. Reads only host data.

    Args:
        watched: what was noted.
        where: for the error.
        instead: how whoever owns the graphs is told to drop them.

    Raises:
        StaleAddressError: names what changed; of very much the first, and how many there are.
    """
    if not watched.is_unchanged():
        changes = watched.changes()
        more = f"; and {len(changes) - _MOST_NAMED} more" if len(changes) > _MOST_NAMED else ""
        raise StaleAddressError(
            "; ".join(changes[:_MOST_NAMED]) + more,
            where=where,
            fix=f"write new values into the captured tensors (load_state_dict, copy_), or {instead} and let them be "
            "captured anew",
        )


def _entry(
    name: str, role: Role, tensor: Tensor | None, container: dict[str, Any], key: str, *, may_be_frozen: bool = False
) -> Entry:
    return Entry(name, role, tensor, None if tensor is None else _facts_of(tensor), container, key, may_be_frozen)


def _facts_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.requires_grad, tensor.shape, tensor.stride()


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
