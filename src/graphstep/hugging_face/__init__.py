"""Models of Hugging Face's transformers: their layers, and a callback for its ``Trainer``.

Nothing of transformers is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphstep.hugging_face.callback import GraphstepCallback

__all__ = ["GraphstepCallback"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from graphstep.hugging_face import callback

    return getattr(callback, name)
