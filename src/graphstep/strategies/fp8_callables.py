"""The fp8 arguments of ``make_graphed_callables``: for layers of this package, and for those of Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypedDict

import torch
from torch import Tensor, nn

from graphstep.capture.tree import flatten
from graphstep.engine import torch_private
from graphstep.errors import ConfigError, InputMismatchError, Problem
from graphstep.strategies.transformer_engine_interop import TransformerEngine, fp8_state_kept, has_fp8_state

_NEW_NAMES: Final = {
    "enabled": "fp8_enabled",
    "calibrating": "fp8_calibrating",
    "recipe": "fp8_recipe",
    "amax_reduction_group": "fp8_group",
    "cache_quantized_params": "fp8_weight_caching",
}
_FLAG: Final = "is_first_microbatch"


class Fp8Keywords(TypedDict, total=False):
    """Names as in Transformer Engine; those of the second half are its newer ones for the same."""

    fp8_enabled: bool | Sequence[bool]
    fp8_calibrating: bool
    fp8_recipe: Any
    fp8_group: Any
    fp8_weight_caching: bool
    enabled: bool | Sequence[bool]
    calibrating: bool
    recipe: Any
    amax_reduction_group: Any
    cache_quantized_params: bool


class Fp8Callables:
    """What the fp8 arguments ask for.

    Args:
        modules: of each callable, all that it uses.
        enabled: for each callable.
        given: the other arguments by their older names.
        library: Transformer Engine, where it is of use.
    """

    def __init__(
        self,
        modules: Sequence[Sequence[nn.Module]],
        enabled: Sequence[bool],
        given: Mapping[str, Any],
        library: TransformerEngine | None,
    ) -> None:
        self._modules, self._enabled, self._library = modules, enabled, library
        self._calibrating = bool(given.get("fp8_calibrating", False))
        self._recipe, self._group = given.get("fp8_recipe"), given.get("fp8_group")
        self._caches = bool(given.get("fp8_weight_caching", False))
        self._is_making = False
        asked = (each for each, is_on in zip(modules, enabled, strict=True) if is_on)
        self._layers: list[Any] = list(dict.fromkeys(m for each in asked for m in each if _is_layer(m)))
        self._before = [(layer, layer.recipe, layer.caches_weight, dict(layer._buffers)) for layer in self._layers]

    @classmethod
    def read(cls, modules: Sequence[Iterable[nn.Module]], keywords: Mapping[str, Any]) -> Fp8Callables:
        """Check the arguments.

        Raises:
            TypeError: one that there is not.
            ConfigError: all that do not fit each other, or need what is not installed.
        """
        unknown = sorted(set(keywords) - set(_NEW_NAMES) - set(_NEW_NAMES.values()))
        if unknown:
            raise TypeError(f"make_graphed_callables() got an unexpected keyword argument {unknown[0]!r}")
        used = [list(each) for each in modules]
        problems = [
            _problem(new, f"it was given together with {old}, which means the same", "give one of the two")
            for new, old in _NEW_NAMES.items()
            if new in keywords and old in keywords
        ]
        given = {_NEW_NAMES.get(name, name): value for name, value in keywords.items()}
        wanted = given.pop("fp8_enabled", False)
        enabled = list(wanted) if isinstance(wanted, tuple | list) else [wanted] * len(used)
        if len(enabled) != len(used):
            problems.append(
                _problem("fp8_enabled", f"{len(enabled)} values for {len(used)} callables", "give one for each")
            )
            enabled = (enabled + [False] * len(used))[: len(used)]
        is_on = any(enabled)
        has_state = any(has_fp8_state(module) for each in used for module in each)
        library = TransformerEngine.found(imports=is_on) if is_on or has_state else None
        if not is_on:
            # A recipe and a group may wait for a switch that is said to be off; calibration without fp8 is TE's own.
            is_said = "fp8_enabled" in keywords or "enabled" in keywords
            idle = ["fp8_weight_caching", *([] if is_said else ["fp8_recipe", "fp8_group"])]
            idle += ["fp8_calibrating"] if library is None else []
            problems += [
                _problem(name, "it is given without fp8_enabled", "add fp8_enabled=True, or leave it out")
                for name in idle
                if given.get(name) not in (None, False)
            ]
        if library is None and is_on:
            problems += _without_the_library(used, enabled, given)
        if problems:
            raise ConfigError(problems)
        return cls(used, [bool(each) for each in enabled], given, library)

    @property
    def has_part_in_calls(self) -> bool:
        """True if calls go through :meth:`call`."""
        return any(self._enabled) and (self._library is not None or self._caches)

    # ----- the capture

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around warmup and capture: layers take the recipe, and fp8 state is afterwards as before."""
        try:
            for layer in self._layers:
                recipe = layer.recipe if self._recipe is None else self._recipe
                if self._caches or self._recipe is not None:
                    layer.use_recipe(recipe, caches_weight=self._caches or layer.caches_weight)
            self._is_making = True
            with fp8_state_kept([module for each in self._modules for module in each], self._library):
                if self._library is not None and self._caches:
                    self._library.skip_weight_update(False)
                yield
        except BaseException:
            for layer, recipe, caches, buffers in self._before:
                layer.recipe, layer.caches_weight = recipe, caches
                layer._buffers.clear()
                layer._buffers.update(buffers)
            raise
        finally:
            self._is_making = False

    def close(self) -> None:
        """When the graphs go: weights are quantised in each forward again, where they were before."""
        for layer, _, caches, _ in self._before:
            if layer.caches_weight != caches:
                layer.use_recipe(layer.recipe, caches_weight=caches)

    def needs_a_first_run(self, index: int) -> bool:
        """True if modules set flags or make state in their first forward, which is too late in a warmup."""
        return any(map(has_fp8_state, self._modules[index]))

    def wrapped(self, index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """The callable inside of Transformer Engine's autocast, where that is of use."""
        if self._library is None or not any(self._enabled):
            return function

        def run(*arguments: Any, **named: Any) -> Any:
            with self._autocast(index):
                return function(*arguments, **named)

        return run

    # ----- calls

    def around(self, index_of: Mapping[Any, int]) -> Callable[..., Any]:
        """What runs the calls of graphs, given the index of the callable of each region."""

        def call(run: Callable[..., Any], scheduled: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            region, stats = scheduled.captured.region, scheduled.captured.stats

            def counted(named: dict[str, Any]) -> tuple[Any, bool]:
                before = stats.num_replays
                result = run(scheduled, arguments, named)
                return result, stats.num_replays > before

            return self.call(index_of[region], counted, named, region.name)

        return call

    def call(
        self, index: int, function: Callable[[dict[str, Any]], tuple[Any, bool]], named: dict[str, Any], where: str
    ) -> Any:
        """Run a call of a callable.

        Args:
            index: of the callable.
            function: given the keyword arguments, gives the result and whether that came from a replay.
            named: keyword arguments, ``is_first_microbatch`` among them where weights are cached.
            where: name of the callable.

        Raises:
            InputMismatchError: weights are cached, and it is not said whether the microbatch is the first one.
        """
        named = self._marked(index, named, where)
        library = self._library
        if library is None or not self._enabled[index]:
            return function(named)[0]
        with self._autocast(index):
            is_first = library.register(self._modules[index])
            result, is_replay = function(named)
        wanted = [tensor for tensor in flatten(result)[0] if tensor.requires_grad]
        if is_replay and is_first and wanted:

            def backward_begins(_gradient: Tensor) -> None:
                torch_private.after_backward_pass(library.update_after_backward)

            torch.autograd.graph.register_multi_grad_hook(wanted, backward_begins, mode="any")
        return result

    def _marked(self, index: int, named: dict[str, Any], where: str) -> dict[str, Any]:
        if not self._caches or not self._enabled[index]:
            return named
        is_first = named.get(_FLAG)
        if not isinstance(is_first, bool):
            raise InputMismatchError(
                f"fp8_weight_caching was asked for, and {_FLAG} is {is_first!r}",
                where=where,
                fix=f"call it with {_FLAG}=True for the first microbatch of a step, and False for the others",
            )
        flags: list[Any] = [m.skip_weight_update for m in self._modules[index] if _is_layer(m) and m.training]
        if is_first and flags:
            torch._foreach_zero_(flags)  # Each layer sets its own again.
        if self._library is not None:
            self._library.skip_weight_update(not is_first)
        return {name: value for name, value in named.items() if name != _FLAG}

    def _autocast(self, index: int) -> AbstractContextManager[Any]:
        library = self._library
        if library is None or (library.is_enabled and not self._is_making):
            return nullcontext()  # The caller's own.
        return library.autocast(
            enabled=self._enabled[index],
            calibrating=self._calibrating,
            recipe=self._recipe,
            group=self._group,
            in_graph=self._is_making,
        )


def _is_layer(module: Any) -> bool:
    """True for ``Float8Linear`` and what works like it: strategies know no models."""
    return hasattr(module, "use_recipe") and isinstance(getattr(module, "skip_weight_update", None), Tensor)


def _without_the_library(
    used: Sequence[Sequence[nn.Module]], enabled: Sequence[bool], given: Mapping[str, Any]
) -> list[Problem]:
    problems = [
        _problem(
            "fp8_enabled",
            f"callables[{index}] has no layer that multiplies in fp8, and Transformer Engine is not installed",
            "build it from graphstep.models.Float8Linear, or install transformer_engine[pytorch] and its modules",
        )
        for index, (each, is_on) in enumerate(zip(used, enabled, strict=True))
        if is_on and not any(map(_is_layer, each))
    ]
    if given.get("fp8_calibrating"):
        problems.append(_problem("fp8_calibrating", "Float8Linear does not calibrate", "leave it out"))
    if given.get("fp8_group") is not None:
        fix = "call graphstep.models.reduce_amax(model, group) at the end of a step instead"
        problems.append(_problem("fp8_group", "Float8Linear does not reduce in its forward", fix))
    return problems


def _problem(where: str, what: str, fix: str) -> Problem:
    return Problem(f"graphed-callables-{where.replace('_', '-')}", f"{where}: {what}", where, fix)
