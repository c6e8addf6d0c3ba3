"""Arrays of numpy that Python keeps: compared by their content, as numbers are."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

_MOST_BYTES: Final = 1 << 20
"""Of an array whose content is compared: each look at it copies its bytes."""


class HostArray(NamedTuple):
    """One array, with what was in it."""

    path: str
    array: np.ndarray[Any, Any]
    content: bytes

    @classmethod
    def of(cls, path: str, value: Any) -> list[HostArray]:
        """The array that a value is; nothing for other values, large arrays and those of objects."""
        if not isinstance(value, np.ndarray) or value.nbytes > _MOST_BYTES or value.dtype.hasobject:
            return []
        return [cls(path, value, value.tobytes())]

    def has_changed(self) -> bool:
        """True if something else is in it by now."""
        return self.array.tobytes() != self.content

    def put_back(self) -> None:
        """Give it the content that was noted."""
        if self.has_changed():
            self.array[...] = np.frombuffer(self.content, self.array.dtype).reshape(self.array.shape)
