"""Models of Hugging Face's transformers: their layers, and a callback for its ``Trainer``.

Nothing of transformers is imported before it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphstep.hugging_face.callback import GraphstepCallback
    from graphstep.hugging_face.causal_attention import use_causal_attention

__all__ = ["GraphstepCallback", "use_causal_attention"]

_HOMES: Mapping[str, str] = {
    "GraphstepCallback": "graphstep.hugging_face.callback",
    "use_causal_attention": "graphstep.hugging_face.causal_attention",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
