"""Layers of other libraries' models, whose forward stays as it is: captured whole, or around eager submodules."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphstep.capture.reasons import EagerReason
from graphstep.capture.region import Region
from graphstep.capture.tree import flatten, unflatten
from graphstep.config import CudaGraphModule
from graphstep.engine import torch_private
from graphstep.hugging_face.cut_forward import CutForward, Handed, UncutError
from graphstep.hugging_face.forward_code import submodules_in_turn
from graphstep.hugging_face.recording import COLLECTED, Collected, collected_names, collecting, hand_on
from graphstep.hugging_face.structure import FoundLayer, Part
from graphstep.hugging_face.unused_cache import UnusedCache
from graphstep.native.interface import FastPath
from graphstep.strategies.local_calls import RegionCalls
from graphstep.strategies.local_forward import InstalledForward
from graphstep.strategies.local_layers import GraphedModule, MakeCalls

_PLAIN: Final = (Tensor, NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum)


class CutLayer(GraphedModule):
    """Runs a layer in parts: graphs, and between them the submodules that stay eager.

    Gradient checkpointing of the layer is done inside of each part, and around what is eager.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        layer: FoundLayer,
        holes: Sequence[Part],
        kinds: Sequence[CudaGraphModule],
        make_calls: MakeCalls,
        *,
        cache: UnusedCache | None,
        is_required: bool,
    ) -> None:
        self.module = layer.module
        self._cache = cache
        self._own = self.module.__dict__.get("forward")
        self._is_required = is_required
        self._is_broken = False
        self._recomputes = False
        self._first_name = _first_argument(self.module)
        in_turn = holes_in_turn(self.module, [hole.module for hole in holes])
        self._cut = CutForward(self.module, in_turn, layer.path)
        self._around = {id(m) for m in self._cut.around}
        self._plain: list[Any] = [None] * (self._cut.num_parts - 1)
        """For each part but the last, the structure of what its tuples stand for."""
        names = {id(hole.module): hole.path for hole in holes}
        self._parts: list[RegionCalls] = []
        for number, inside in enumerate(self._modules_of_parts()):
            name = _name(layer.path, [names[id(hole)] for hole in in_turn], number)
            region = Region(
                name=name,
                kind="+".join(kinds) if holes else "layer",
                function=partial(self._part, number),
                modules=tuple(inside),
                is_rest=bool(holes) and number == len(holes),
            )
            self._parts.append(make_calls(region, [(paths.get(id(m), name), m) for m in inside]))

    def _modules_of_parts(self) -> list[list[nn.Module]]:
        """For each part the modules that it runs: those on the way to an eager one belong to all of them."""
        holes = set(map(id, self._cut.holes))
        parts: list[dict[int, nn.Module]] = [{}]

        def visit(module: nn.Module) -> None:
            for child in submodules_in_turn(module):
                if id(child) in holes:
                    parts.append({})
                elif id(child) in self._around:
                    visit(child)
                else:
                    parts[-1].update((id(m), m) for m in child.modules())

        visit(self.module)
        parts += [{} for _ in range(self._cut.num_parts - len(parts))]
        shared = {id(m): m for m in self._cut.around} or {id(self.module): self.module}
        return [list({**shared, **part}.values()) for part in parts]

    @property
    def regions(self) -> tuple[RegionCalls, ...]:
        """The parts."""
        return tuple(self._parts)

    @property
    def in_parts(self) -> tuple[nn.Module, ...]:
        """Those on the way to what is eager."""
        return tuple(self._cut.around[1:])

    def install(self) -> None:
        """Put this object in place of the layer's forward; it takes over what the layer's call does for recompute."""
        self.module.__dict__["forward"] = InstalledForward(self.module, self.forward, self._without_graphs)
        layer: Any = self.module
        if type(layer).__call__ is not nn.Module.__call__ and getattr(layer, "gradient_checkpointing", False):
            layer.gradient_checkpointing = False
            self._recomputes = True

    def use(self, fast: FastPath) -> None:
        """See the base; arguments are looked at here first."""
        for calls in self._parts:
            if calls.entry is None:
                calls.entry = fast.Call(calls.__call__, calls.resume, False)

    def remove(self) -> None:
        """Put everything back. May be called twice."""
        super().remove()
        if self._recomputes:
            layer: Any = self.module
            layer.gradient_checkpointing = True
            self._recomputes = False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The layer's forward: same arguments and results."""
        if not torch.is_grad_enabled():
            return self._eager(EagerReason.EVALUATION, arguments, named)
        if self._is_broken:
            return self._eager(EagerReason.CAPTURE_FAILED, arguments, named)
        if self._cache is not None and self._cache.is_unused:
            arguments, named = self._cache.without_cache(arguments, named)
        if not (_are_plain(arguments) and _are_plain(named.values())):
            return self._eager(EagerReason.STATEFUL_ARGUMENT, arguments, named)
        if not arguments:
            if self._first_name not in named:
                return self._eager(EagerReason.OTHER_SIGNATURE, arguments, named)
            arguments = (named.pop(self._first_name),)
        names = collected_names()
        try:
            return self._in_parts(arguments[0], arguments[1:], {**named, COLLECTED: names} if names else named)
        except UncutError as error:
            if self._is_required:
                raise
            self._is_broken = True
            warnings.warn(f"{self._parts[0].region.name} runs eagerly: {error}", UserWarning, stacklevel=4)
            return self._eager(EagerReason.CAPTURE_FAILED, arguments, named)

    def _without_graphs(self, *arguments: Any, **named: Any) -> Any:
        """What replays are compared with: the layer's own forward, like them without a cache that nobody reads.

        With one, keys lie in memory otherwise, and attention rounds and draws its dropout otherwise.
        """
        if self._cache is not None and self._cache.is_unused and not torch.compiler.is_compiling():
            arguments, named = self._cache.without_cache(arguments, named)
        return own_forward_of(self.module, self._own)(*arguments, **named)

    def _in_parts(self, given: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = self._call(0)(given, *arguments, **named)
        part = 0
        while True:
            if isinstance(result, Collected):
                hand_on(result.found)
                result = result.result
            if part < len(self._plain):
                if isinstance(result, _Final):
                    return result.result
                handed = result if isinstance(result, Handed) else unflatten(self._plain[part], result)
            else:
                return result
            made = self._eager_part(self._cut.holes[handed.hole], *handed.call_of(given, arguments, named))
            part += 1
            result = self._call(part)((made, handed.script, handed.live), *arguments, **named)

    def _call(self, part: int) -> Callable[..., Any]:
        calls = self._parts[part]
        return calls if calls.entry is None else calls.entry

    def _eager_part(self, hole: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._is_recomputed():
            return checkpoint(hole, *arguments, use_reentrant=False, **named)
        return hole(*arguments, **named)

    def _eager(self, reason: EagerReason, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        for calls in self._parts:
            calls.stats.eager_calls[reason] += 1
        return own_forward_of(self.module, self._own)(*arguments, **named)

    def _part(self, number: int, given: Any, *arguments: Any, **named: Any) -> Any:
        """The function of a region."""
        names = named.pop(COLLECTED, ())
        with collecting(names) as found:
            if self._is_recomputed():
                result = checkpoint(self._run, number, given, arguments, named, use_reentrant=False)
            else:
                result = self._run(number, given, arguments, named)
        return Collected(result, found) if names else result

    def _run(self, number: int, given: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        layer: Any = self.module
        is_set = layer.__dict__.get("gradient_checkpointing")
        if is_set:
            layer.__dict__["gradient_checkpointing"] = False
        try:
            result = self._cut.run(own_forward_of(layer, self._own), number, given, arguments, named)
        finally:
            if is_set:
                layer.__dict__["gradient_checkpointing"] = is_set
        return result if number == len(self._plain) else self._in_plain_form(number, result)

    def _in_plain_form(self, number: int, result: Any) -> Any:
        """What a part hands on as a tuple of tensors, which is the quickest to return from a replay.

        The form that comes first is the one that the tuple stands for; others come as they are. So do tensors that
        share memory, as a view that is handed on beside its base.
        """
        if not isinstance(result, Handed):
            return _Final(result)
        tensors, structure = flatten(result)
        if len(set(map(torch_private.storage_key, tensors))) < len(tensors):
            return result
        if self._plain[number] is None:
            self._plain[number] = structure
        return tuple(tensors) if self._plain[number] == structure else result

    def _is_recomputed(self) -> bool:
        layer: Any = self.module
        return layer.training and (self._recomputes or bool(getattr(layer, "gradient_checkpointing", False)))


@dataclass(slots=True)
class _Final:
    """What a part returns that has come to the end of the forward without a hole."""

    result: Any


def holes_in_turn(module: nn.Module, holes: Sequence[nn.Module]) -> list[nn.Module]:
    """The same submodules in the order in which the code of the forward names them."""
    wanted = set(map(id, holes))
    found: dict[int, nn.Module] = {}

    def visit(each: nn.Module) -> None:
        for child in submodules_in_turn(each):
            if id(child) in wanted:
                found[id(child)] = child
            elif any(id(m) in wanted for m in child.modules()):
                visit(child)

    visit(module)
    return list(found.values())


def own_forward_of(module: nn.Module, own: Any) -> Any:
    """A module's forward while another one stands in its place."""
    return own if own is not None else partial(type(module).forward, module)


def _name(path: str, holes: Sequence[str], number: int) -> str:
    if not holes:
        return path
    return f"{path}.before_{holes[0]}" if number == 0 else f"{path}.after_{holes[number - 1]}"


def _first_argument(module: nn.Module) -> str:
    names = list(inspect.signature(type(module).forward).parameters)
    return names[1] if len(names) > 1 else ""


def _are_plain(values: Iterable[Any]) -> bool:
    """True for tensors and values in containers of Python; not for objects, which a call may change."""
    for value in values:
        if isinstance(value, _PLAIN):
            continue
        if isinstance(value, dict):
            value = value.values()  # noqa: PLW2901
        elif not isinstance(value, (tuple, list)):
            return False
        if not _are_plain(value):
            return False
    return True
