"""The tensors that recordings read or write and did not allocate, with names, owners and addresses."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphstep.errors import StaleAddressError


class Role(enum.Enum):
    """What a tensor is to the recordings."""

    WEIGHT = "weight"
    STATE = "state"
    GRADIENT = "gradient"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor at its captured address. ``container[key]`` is where the module keeps it."""

    name: str
    role: Role
    tensor: Tensor
    address: int
    nbytes: int
    container: dict[str, Any]
    key: str

    def explain(self) -> str | None:
        """How it moved since the capture, or ``None`` if it did not."""
        current = self.container.get(self.key)
        if current is None:
            return f"{self.role.value} {self.name} was removed"
        if current.data_ptr() != self.address:
            how = "moved" if current is self.tensor else "was replaced by another tensor"
            return f"{self.role.value} {self.name} {how}: captured at {self.address:#x}, now at {current.data_ptr():#x}"
        return None


class Manifest:
    """Addresses that a session's recordings depend on.

    Tensors are named by the modules that own them. Tensors that no module owns have no name and cannot be replaced
    behind the session's back: the session keeps them alive instead.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, str], Entry] = {}
        self._constants: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> tuple[Entry, ...]:
        """Note every parameter and buffer of the modules, each with its path, and return their entries.

        Args:
            modules: name and module; their descendants are included.
        """
        entries = []
        for prefix, root in modules:
            for path, module in root.named_modules(prefix=prefix):
                for container, role in ((module._parameters, Role.WEIGHT), (module._buffers, Role.STATE)):
                    for key, tensor in container.items():
                        if tensor is not None:
                            entries.append(self._add(f"{path}.{key}" if path else key, role, tensor, container, key))
        return tuple(entries)

    def _add(self, name: str, role: Role, tensor: Tensor, container: dict[str, Any], key: str) -> Entry:
        slot = (id(container), key)
        entry = self._entries.get(slot)
        if entry is None:
            entry = Entry(name, role, tensor, tensor.data_ptr(), tensor.nbytes, container, key)
            self._entries[slot] = entry
        return entry

    def keep_alive(self, tensors: Iterable[Tensor]) -> None:
        """Hold tensors without a name for as long as the manifest lives."""
        self._constants.extend(tensors)

    def forget(self) -> None:
        """Drop all entries and let go of the tensors."""
        self._entries.clear()
        self._constants.clear()


def verify(entries: Sequence[Entry], where: str) -> None:
    """Compare addresses with those of the capture. Reads only host data.

    Raises:
        StaleAddressError: names every tensor that moved.
    """
    for entry in entries:
        current = entry.container.get(entry.key)
        if current is None or current.data_ptr() != entry.address:
            break
    else:
        return
    moved = [text for text in (entry.explain() for entry in entries) if text is not None]
    raise StaleAddressError(
        "; ".join(moved),
        where=where,
        fix="write new values into the captured tensors (load_state_dict, copy_), or capture again in a new session",
    )
