"""A region: a named boundary of a model inside which operations are captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A function of tensors that belongs to some modules of a model. Compared by identity."""

    name: str
    """Module path, with the segments where it is not a whole module: ``layers.3.attention``."""
    kind: str
    """``attn``, ``mlp``, ``layer``, ``iteration``, ..."""
    function: Callable[..., Any] = field(repr=False)
    """Any nesting of tensors in and out. Changes no Python state."""
    modules: tuple[nn.Module, ...] = field(repr=False)
    """The modules inside, descendants included: their training flags are part of the signature."""
    is_rest: bool = False
    """It begins inside of a layer and ends with it: it is launched together with what follows it directly."""

    @property
    def is_parametrized(self) -> bool:
        """True if weights of the modules are computed from others (``torch.nn.utils.parametrize``)."""
        return any("parametrizations" in module._modules for module in self.modules)

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the modules, as they are now."""
        each = (parameter for module in self.modules for parameter in module._parameters.values())
        return [parameter for parameter in each if parameter is not None]

    def containers(self) -> list[dict[str, Any]]:
        """The dicts in which the modules keep parameters, buffers and submodules."""
        return [each for module in self.modules for each in (module._parameters, module._buffers, module._modules)]

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of the modules, as they are now."""
        dicts = [contents for module in self.modules for contents in (module._parameters, module._buffers)]
        return [tensor for contents in dicts for tensor in contents.values() if tensor is not None]
