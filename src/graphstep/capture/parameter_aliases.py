"""Fresh leaves over the memory of a region's parameters, for the time of a capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ParameterAliases:
    """Stands in for the parameters of some modules while a region is captured.

    The node that accumulates a parameter's gradient runs on the stream on which it was made, and lives as long as
    anybody holds a graph with it: a loss that the loop has kept, or DistributedDataParallel. A backward that is
    captured must not reach such a node. A fresh leaf over the same memory has a node of its own, of the capture stream.

    Args:
        modules: whose own parameters are replaced; descendants are named by the caller.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._alias_of: dict[int, Tensor] = {}
        self._original_of: dict[int, Tensor] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the modules use the aliases in the body. A parameter that the body replaces stays replaced."""
        swapped = [
            (module._parameters, key, parameter)
            for module in self._modules
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter.is_leaf
        ]
        for container, key, parameter in swapped:
            container[key] = self.leaf_for(parameter)  # type: ignore[assignment]
        try:
            yield
        finally:
            for container, key, parameter in swapped:
                if container.get(key) is self._alias_of[id(parameter)]:
                    container[key] = parameter

    def leaf_for(self, parameter: Tensor) -> Tensor:
        """The alias of a parameter of the modules, made on first use."""
        found = self._alias_of.get(id(parameter))
        if found is None:
            with torch.no_grad():
                found = parameter.detach()
            if isinstance(parameter, nn.Parameter):
                found = nn.Parameter(found, requires_grad=parameter.requires_grad)
            else:
                found.requires_grad_(parameter.requires_grad)
            found.__dict__.update(parameter.__dict__)  # Such as `main_grad`, which a forward may look for.
            self._alias_of[id(parameter)] = found
            self._original_of[id(found)] = parameter
        return found

    def original_of(self, leaf: Tensor) -> Tensor:
        """The parameter that a leaf of the autograd graph stands for; the leaf itself if it is no alias."""
        return self._original_of.get(id(leaf), leaf)

    def current_leaf(self, parameter: Tensor) -> Tensor:
        """The leaf that stands for a parameter in a graph made under :meth:`installed`."""
        return self._alias_of.get(id(parameter), parameter)
