"""The cache of keys and values that models of transformers make in training too, where nobody reads it.

Most configurations say ``use_cache=True``. A graph cannot fill the cache, so layers that are captured run without one,
which gives the same result as long as it is empty, and the model then returns none. A caller who says
``use_cache=True`` himself gets it; the layers run eagerly then.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import torch
from torch import Tensor, nn

_CACHES: Final = ("past_key_values", "cache", "cache_params", "layer_past", "past_key_value")


def is_cache(value: Any) -> bool:
    """True for a cache of transformers: that of a decoder with an encoder consists of two."""
    is_one = callable(getattr(value, "update", None)) or hasattr(value, "self_attention_cache")
    return is_one and callable(getattr(value, "get_seq_length", None))


class UnusedCache:
    """Watches the calls of a module that runs layers, and tells those whether anybody reads the cache that they get.

    It also has a plain causal model make that cache where the caller wants none, for the sake of the mask: without a
    cache, transformers looks for several sequences in one row of positions, which it has just made itself, and waits
    for the device to read what it has found.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_unused = False
        """True while the call that is under way made its cache itself."""
        self._makes_cache = _is_plain_causal(module)
        self._handles: list[Any] = []

    def install(self) -> None:
        """Put hooks on the module."""
        self._handles = [
            self.module.register_forward_pre_hook(self._before, with_kwargs=True),
            self.module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take them off. May be called twice."""
        while self._handles:
            self._handles.pop().remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module gets one that does nothing: its layers are not captured."""
        return UnusedCache, (self.module,)

    def without_cache(
        self, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a layer without a cache that is empty and that nobody reads."""
        if not self.is_unused:
            return arguments, named
        if any(map(_is_empty_cache, arguments)):
            arguments = tuple(None if _is_empty_cache(value) else value for value in arguments)
        for name in _CACHES:
            if _is_empty_cache(named.get(name)):
                named = {**named, name: None}
        return arguments, named

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self._handles:
            return None
        has_cache = any(named.get(name) is not None for name in _CACHES) or any(
            is_cache(value) for value in arguments if not isinstance(value, Tensor)
        )
        wants_cache = named.get("use_cache")
        self.is_unused = bool(module.training and torch.is_grad_enabled() and not has_cache and not wants_cache)
        is_plain = named.get("attention_mask") is None and named.get("position_ids") is None and len(arguments) <= 1
        if not (self.is_unused and self._makes_cache and is_plain) or getattr(module, "gradient_checkpointing", False):
            return None
        return arguments, {**named, "use_cache": True}

    def _after(self, module: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
        is_unused, self.is_unused = self.is_unused, False
        if not is_unused:
            return None
        if isinstance(result, tuple):
            return tuple(value for value in result if not is_cache(value)) if any(map(is_cache, result)) else None
        if isinstance(result, OrderedDict):
            for name in [name for name, value in result.items() if is_cache(value)]:
                # Results of models are dicts whose entries cannot be deleted by their own methods.
                OrderedDict.__delitem__(result, name)
                object.__setattr__(result, name, None)
        return None


def _is_empty_cache(value: Any) -> bool:
    if value is None or isinstance(value, Tensor):
        return False
    return is_cache(value) and bool(value.get_seq_length() == 0)


def _is_plain_causal(module: nn.Module) -> bool:
    """True if every layer of a model attends to all that is before: its mask is the same with an empty cache."""
    config = getattr(module, "config", None)
    if getattr(config, "sliding_window", None) is not None or not getattr(config, "is_causal", True):
        return False
    kinds = getattr(config, "layer_types", None) or ()
    return all(kind == "full_attention" for kind in kinds) and hasattr(config, "num_attention_heads")
