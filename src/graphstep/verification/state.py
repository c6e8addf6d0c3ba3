"""What a step reads and writes besides its arguments: copied, put back, and compared by module."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.capture.attributes import Attributes
from graphstep.engine import torch_private
from graphstep.engine.tape_ops import OperationTable
from graphstep.engine.undo import UndoLog, WriteObserver
from graphstep.strategies.local_forward import graphs_left_out
from graphstep.verification.compare import same_bits
from graphstep.verification.report import Part

Named = tuple[str, nn.Module]
_GRADIENTS: Final = ("grad", "main_grad")
_PYTHON, _NUMPY, _HOST, _DEVICE = "Python's random module", "numpy.random", "torch on the host", "torch on the device"


class Key(NamedTuple):
    """What a tensor of the state is."""

    module: str
    part: Part
    name: str


class HasPutBack(Protocol):
    """Keeps what Python has changed since."""

    def put_back(self) -> None:
        """Give everything the value that it had."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state at one moment. Tensors are on the host."""

    tensors: Mapping[Key, Tensor]
    gradients: Sequence[tuple[Tensor, Tensor | None]]
    """Each parameter with the object that was its ``.grad``."""
    generators: Mapping[str, Any]
    members: Sequence[tuple[dict[str, Any], str, Tensor | None]] = ()
    """Where modules keep parameters and buffers, with the objects that were there."""


class State:
    """Weights, buffers, gradients, states of optimizers and generators, and further tensors that a step writes.

    Args:
        modules: path and module of the outermost ones.
        device: where the step runs.
        optimizers: those that step in it.
        weights: further weights by the paths of the parameters that they belong to, such as copies in fp32.
    """

    def __init__(
        self,
        modules: Iterable[Named],
        device: torch.device,
        optimizers: Iterable[Optimizer] = (),
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._weights = {name: (*_split(name), tensor) for name, tensor in weights.items()}
        self.optimizers = list(optimizers)
        self._modules: list[Named] = []
        self._further: dict[Key, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        """Those that get a gradient and are no parameters of the modules."""
        self._generators: dict[str, torch.Generator] = {_HOST: torch.default_generator}
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generators[_DEVICE] = torch.cuda.default_generators[index]
        self.set_modules(modules)

    def set_modules(self, modules: Iterable[Named]) -> None:
        """From now on these are the outermost modules."""
        found = {id(m): (path, m) for prefix, root in modules for path, m in root.named_modules(prefix=prefix)}
        self._modules = list(found.values())

    @property
    def modules(self) -> Sequence[Named]:
        """All modules with their paths."""
        return self._modules

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Path of the module, name and parameter, each parameter once."""
        seen: set[int] = set()
        for path, module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield path, name, parameter

    def tensors(self) -> Iterator[tuple[Key, Tensor]]:
        """Everything, as it is now."""
        owners: dict[int, tuple[str, str]] = {}
        for path, name, parameter in self.parameters():
            owners[id(parameter)] = (path, name)
            yield Key(path, Part.WEIGHT, name), parameter
            for attribute in _GRADIENTS:
                gradient = getattr(parameter, attribute, None)
                if isinstance(gradient, Tensor):
                    yield Key(path, Part.GRADIENT, f"{name}.{attribute}"), gradient
        for path, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield Key(path, Part.BUFFER, name), buffer
        for path, name, weight in self._weights.values():
            owners[id(weight)] = (path, name)
            yield Key(path, Part.WEIGHT, f"{name} (main)"), weight
        for name, leaf in self._leaves.items():
            if leaf.grad is not None:
                yield Key("", Part.GRADIENT, name), leaf.grad
        yield from self._of_optimizers(owners)
        yield from self._further.items()

    def _of_optimizers(self, owners: Mapping[int, tuple[str, str]]) -> Iterator[tuple[Key, Tensor]]:
        for number, optimizer in enumerate(self.optimizers):
            for place, (trained, state) in enumerate(optimizer.state.items()):
                path, name = owners.get(id(trained), ("", f"optimizer {number}, tensor {place}"))
                for entry, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor):
                        yield Key(path, Part.OPTIMIZER, f"{name}.{entry}"), value

    def copy(self, parts: Collection[Part] = tuple(Part)) -> StateCopy:
        """The state of this moment, on the host, or some parts of it. Waits for the device."""
        tensors = {key: t.detach().to("cpu", copy=True) for key, t in self.tensors() if key.part in parts}
        if Part.GRADIENT not in parts:
            return StateCopy(tensors, (), self.generators(), self._members())
        leaves = [*(parameter for _, _, parameter in self.parameters()), *self._leaves.values()]
        gradients = [(leaf, leaf.grad) for leaf in leaves]
        return StateCopy(tensors, gradients, self.generators(), self._members())

    def _members(self) -> list[tuple[dict[str, Any], str, Tensor | None]]:
        owners: list[dict[str, Any]] = []
        for _, module in self._modules:
            owners += (module._parameters, module._buffers)
        return [(owner, name, member) for owner in owners for name, member in owner.items()]

    def restore(self, kept: StateCopy) -> None:
        """Give everything the content that it had. What has not changed is not written: caches that are made anew
        after a write would hide that they are stale.
        """
        for owner, name, member in kept.members:
            if owner.get(name) is not member:
                owner[name] = member
        for leaf, gradient in kept.gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient
        with torch.no_grad():
            for key, tensor in self.tensors():
                before = kept.tensors.get(key)
                if before is not None and not same_bits(tensor.detach().to("cpu"), before):
                    tensor.copy_(before)
        self._set_generators(kept.generators)

    def generators(self) -> dict[str, Any]:
        """States of all generators of random numbers, by name."""
        found: dict[str, Any] = {name: generator.get_state() for name, generator in self._generators.items()}
        found[_PYTHON] = random.getstate()
        found[_NUMPY] = pickle.dumps(np.random.get_state(legacy=False))
        return found

    def _set_generators(self, states: Mapping[str, Any]) -> None:
        now = self.generators()
        for name, state in states.items():
            if same_state(now[name], state):
                continue
            if name == _PYTHON:
                random.setstate(state)
            elif name == _NUMPY:
                np.random.set_state(pickle.loads(state))
            else:
                self._generators[name].set_state(state)

    def learn(self, run: Callable[[], Any], modules: Callable[[], Iterable[Named]]) -> None:
        """Run something eagerly, see what it writes and which generators it draws from, and undo it.

        Args:
            run: a step.
            modules: the outermost modules, asked when it has run.

        Raises:
            Whatever ``run`` raises; it is undone then too.
        """
        kept, log = self.copy(), UndoLog()
        watcher = WriteObserver(log, OperationTable())
        written: list[Tensor] = []
        try:
            with watcher:
                run()
        finally:
            self.set_modules(modules())
            known = {torch_private.storage_key(tensor) for _, tensor in self.tensors()}
            contents = {torch_private.storage_key(content) for content in log.contents()}
            written = [t for t in watcher.externals if torch_private.storage_key(t) in contents]
            watcher.restore_gradients()
            watcher.restore_generators()
            log.restore()
            # What is cached for the values of a tensor is found by its version.
            torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])
            self.restore(kept)
        parameters = {id(parameter) for _, _, parameter in self.parameters()}
        for leaf in watcher.leaves:
            if id(leaf) not in parameters:
                self._leaves[f"leaf {len(self._leaves)} of shape {tuple(leaf.shape)}"] = leaf
        self._name_further([tensor for tensor in written if torch_private.storage_key(tensor) not in known])
        for generator in watcher.generators:
            if not any(generator is each for each in self._generators.values()):
                self._generators[f"generator {len(self._generators)}"] = generator

    def _name_further(self, tensors: Sequence[Tensor]) -> None:
        places = dict(self._attributes())
        for number, tensor in enumerate(tensors):
            shape = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            path, name = places.get(torch_private.storage_key(tensor), ("", f"tensor {number} of shape {shape}"))
            self._further[Key(path, Part.OTHER, name)] = tensor

    def _attributes(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Tensors that are plain attributes of modules: storage, path and name."""
        for path, module in self._modules:
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield torch_private.storage_key(value), (path, name)


def attributes_of(named: Iterable[Named]) -> Attributes:
    """What Python keeps in modules, without what their strategies have put there."""
    modules = list(named)
    with graphs_left_out(module for _, module in modules):
        return Attributes(modules)


def put_back_python(kept: Iterable[HasPutBack], modules: Sequence[nn.Module]) -> None:
    """Put back what is no tensor, but for what stands in place of the forward of modules: that is their strategy's."""
    installed = [(module, module.__dict__.get("forward")) for module in modules]
    for each in kept:
        each.put_back()
    for module, forward in installed:
        module.__dict__.pop("forward", None)
        if forward is not None:
            module.__dict__["forward"] = forward


def _split(name: str) -> tuple[str, str]:
    """The path of a module and the name of a parameter in it."""
    path, _, own = name.rpartition(".")
    return path, own


def same_state(left: Any, right: Any) -> bool:
    """True for equal states of a generator."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return bool(left == right)
