"""``make_graphed_callables``: graphs for modules and functions of anyone's loop, in an order given by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphstep.capture.chain import Chain
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.lanes import Lanes
from graphstep.capture.plan import Event, Key, Phase, PlanObserver, Variant
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.tree import flatten
from graphstep.errors import CaptureError, ConfigError, Problem
from graphstep.strategies import pipeline_order
from graphstep.strategies.callable_graphs import (
    CallableGraphs,
    Captured,
    GraphedCallable,
    Place,
    layout_guard,
    names_of,
)
from graphstep.strategies.local_capture import EVERY_PARAMETER, Order, capture_chains
from graphstep.strategies.local_forward import InstalledForward, own_forward
from graphstep.strategies.order_cursor import OrderCursor, Turn

Hooks = Mapping[str, Any]
_HOOK_KINDS: Final = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def make_graphed_callables(
    callables: Callable[..., Any] | Sequence[Callable[..., Any]],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Any = None,
    pool: Any = None,
    *,
    retain_graph_in_backward: bool = False,
    _order: Sequence[float] | None = None,
    _num_layers_per_chunk: Sequence[int] | None = None,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    accumulate_param_grads: bool = False,
    capture_time_hooks: Sequence[Hooks | None] | None = None,
    pre_warmup_hook: Callable[[], None] | None = None,
    post_warmup_hook: Callable[[], None] | None = None,
) -> Any:
    """Capture modules or functions, forward and backward, and give callables that replay them.

    Stands in for ``torch.cuda.make_graphed_callables`` and for Transformer Engine's function of that name. Runs where
    the samples are: on a GPU or, with the tape engine, on the CPU.

    Args:
        callables: a module or function, or a tuple of them, in the order in which a step runs them. Without ``_order``
            the ``forward`` of a module is replaced, and other callables are returned. Modules may have hooks: those on
            the module itself run around each replay, those inside of it when it is captured.
        sample_args: positional arguments of the callable, or a tuple of such for each one; with ``_order`` for each
            chunk, in it each microbatch, in it each layer. Tensors in any nesting and other values; a call with other
            shapes, dtypes, devices or values is refused. They are copied, and may be used for anything afterwards.
        num_warmup_iters: eager runs of each callable before its capture.
        allow_unused_input: do not mind arguments and parameters that want a gradient and get none.
        sample_kwargs: keyword arguments: one dict, or one for each entry of ``sample_args``.
        pool: accepted; memory is shared among callables that are given together, and not with other graphs. Also as the
            fifth positional argument, as torch has it.
        retain_graph_in_backward: accepted; what a backward needs is kept for its replays in any case.
        _order: of a pipeline schedule: ``+n`` the forward of chunk n, ``-n`` its backward, chunks from 1; see
            :func:`graphstep.strategies.pipeline_order.pipeline_order`. A list of callables is returned then, one for
            each entry of ``sample_args``, and they have to be called in this order.
        _num_layers_per_chunk: how many of the callables each chunk has; by default as many in each.
        _reuse_graph_input_output_buffers: as many sets of graphs and buffers as there are microbatches in flight, and
            not as many as there are microbatches.
        clone_param_grads_on_return: accepted; gradients never alias memory of the graphs.
        accumulate_param_grads: add the gradients of parameters to ``.grad`` (or ``main_grad``) inside the graphs, with
            no launches of their own. Hooks that want to see each gradient keep their parameter out of this; not for
            modules in DistributedDataParallel.
        capture_time_hooks: for each callable ``None`` or a mapping with ``forward_pre_hooks``, ``forward_hooks``,
            ``backward_pre_hooks``, ``backward_hooks``: a function of the callable, or several. They run around each
            capture, outside of it, and have to return ``None``.
        pre_warmup_hook: called once before anything runs.
        post_warmup_hook: called once when all is captured.

    Returns:
        What replays: in the form of ``callables``; with ``_order`` a list. Each has ``reset()`` (for a module
        ``module.forward.reset()``), which frees the graphs of all, and ``report()``.

    Raises:
        ConfigError: arguments that do not fit each other: all problems at once.
        CaptureError: names the callable that cannot be captured. Nothing is left behind.

    Calls raise InputMismatchError (names the argument), PlanError (names the expected turn and the actual one),
    StaleAddressError and LifecycleError; a backward may raise what those of :class:`graphstep.CudaGraphManager` may.
    In other modes than at the capture (grad mode off, training flags changed) they run eagerly.
    """
    del retain_graph_in_backward, clone_param_grads_on_return, pool
    if sample_kwargs is not None and not _is_kwargs(sample_kwargs):
        sample_kwargs = None  # A pool, in torch's order of arguments.
    asked = _Asked.read(callables, sample_args, sample_kwargs, _order, _num_layers_per_chunk, capture_time_hooks)
    made = _Making(asked, num_warmup_iters, reuses=_reuse_graph_input_output_buffers)
    if pre_warmup_hook is not None:
        pre_warmup_hook()
    result = made.run(accumulates=accumulate_param_grads, allows_unused=allow_unused_input)
    if post_warmup_hook is not None:
        post_warmup_hook()
    return result


def _is_kwargs(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple)) and all(isinstance(each, Mapping) for each in value)


@dataclass(slots=True)
class _Asked:
    """What to capture: checked arguments."""

    callables: tuple[Callable[..., Any], ...]
    samples: list[tuple[tuple[Any, ...], dict[str, Any]]]
    layers_per_chunk: tuple[int, ...]
    num_microbatches: int
    order: tuple[pipeline_order.OrderStep, ...]
    hooks: list[Hooks]
    is_single: bool
    is_ordered: bool

    @classmethod
    def read(
        cls,
        callables: Any,
        sample_args: Any,
        sample_kwargs: Any,
        order: Sequence[float] | None,
        layers_per_chunk: Sequence[int] | None,
        hooks: Sequence[Hooks | None] | None,
    ) -> _Asked:
        """Bring the arguments into one form.

        Raises:
            ConfigError: all problems at once.
        """
        is_single = not isinstance(callables, (tuple, list))
        given = (callables,) if is_single else tuple(callables)
        if is_single and order is None:
            sample_args = (sample_args,)
        problems = [
            _problem("callables", f"number {index + 1} is a {type(each).__name__} and cannot be called", "give modules")
            for index, each in enumerate(given)
            if not callable(each)
        ]
        if not given:
            problems.append(_problem("callables", "there are none", "give a module or a function"))
        chunks, num_microbatches, steps = _read_order(order, layers_per_chunk, len(given), problems)
        num_samples = num_microbatches * sum(chunks)
        samples = _read_samples(sample_args, sample_kwargs, num_samples, problems)
        if hooks is not None and len(hooks) != len(given):
            problems.append(
                _problem("capture_time_hooks", f"{len(hooks)} for {len(given)} callables", "give one or None for each")
            )
        known = [dict(each or {}) for each in hooks or [None] * len(given)]
        for index, each in enumerate(known):
            unknown = sorted(set(each) - set(_HOOK_KINDS))
            if unknown:
                what = f"{', '.join(map(repr, unknown))} of callable {index + 1} is no kind of hook"
                problems.append(_problem("capture_time_hooks", what, f"use {', '.join(_HOOK_KINDS)}"))
        if problems:
            raise ConfigError(problems)
        return cls(given, samples, chunks, num_microbatches, steps, list(known), is_single, order is not None)

    def index_of(self, chunk: int, microbatch: int, layer: int) -> int:
        """The place of a sample in the list of all."""
        return (
            self.num_microbatches * sum(self.layers_per_chunk[:chunk])
            + microbatch * self.layers_per_chunk[chunk]
            + layer
        )

    def callable_of(self, chunk: int, layer: int) -> int:
        """The place of a layer in the list of callables."""
        return sum(self.layers_per_chunk[:chunk]) + layer

    def result(self, graphs: CallableGraphs, places: Sequence[Place]) -> Any:
        """What the caller gets."""
        if self.is_ordered:
            return [GraphedCallable(graphs, place) for place in places]
        made = [
            _installed(each, graphs, place) if isinstance(each, nn.Module) else GraphedCallable(graphs, place)
            for each, place in zip(self.callables, places, strict=True)
        ]
        return made[0] if self.is_single else tuple(made)


def _read_order(
    order: Sequence[float] | None, layers_per_chunk: Sequence[int] | None, num_callables: int, problems: list[Problem]
) -> tuple[tuple[int, ...], int, tuple[pipeline_order.OrderStep, ...]]:
    if order is None:
        if layers_per_chunk is not None:
            problems.append(_problem("_num_layers_per_chunk", "it was given without _order", "give both or neither"))
        return (num_callables,), 1, pipeline_order.steps_of([1, -1], num_chunks=1)
    num_chunks = int(max((abs(entry) for entry in order), default=0))
    num_layers, rest = divmod(num_callables, max(1, num_chunks))
    chunks = tuple(layers_per_chunk) if layers_per_chunk is not None else (num_layers,) * num_chunks
    if layers_per_chunk is None and rest:
        what = f"{num_callables} callables are not as many for each of {num_chunks} chunks"
        problems.append(_problem("callables", what, "give _num_layers_per_chunk"))
    elif len(chunks) != num_chunks or sum(chunks) != num_callables or min(chunks, default=1) < 1:
        what = f"{list(chunks)} does not divide {num_callables} callables among {num_chunks} chunks"
        problems.append(_problem("_num_layers_per_chunk", what, "name a number for each chunk that _order names"))
    try:
        steps = pipeline_order.steps_of(order, num_chunks=max(1, num_chunks))
    except ConfigError as error:
        problems.extend(error.problems)
        return chunks, 0, ()
    if any(step.phase is pipeline_order.Phase.WEIGHT_GRADIENT for step in steps):
        what = "separate weight gradients are not captured yet"
        problems.append(_problem("_order", what, "leave out the entries with a half"))
    return chunks, 1 + max(step.microbatch for step in steps), steps


def _read_samples(
    sample_args: Any, sample_kwargs: Any, num_samples: int, problems: list[Problem]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    if not num_samples:
        return []
    arguments = list(sample_args) if isinstance(sample_args, (tuple, list)) else None
    if arguments is None or not all(isinstance(each, (tuple, list)) for each in arguments):
        what = "it has to be a tuple of arguments for one callable, and a tuple of such tuples for several"
        problems.append(_problem("sample_args", what, "write (x,) for a single argument"))
        return []
    if sample_kwargs is None or isinstance(sample_kwargs, Mapping):
        named = [dict(sample_kwargs or {}) for _ in range(num_samples)]
    else:
        named = [dict(each) for each in sample_kwargs]
    for name, found in (("sample_args", len(arguments)), ("sample_kwargs", len(named))):
        if found != num_samples:
            what = f"expected {num_samples} entries (callables times microbatches), got {found}"
            problems.append(_problem(name, what, "give one for each chunk, microbatch and layer, in that order"))
    return [(tuple(args), kwargs) for args, kwargs in zip(arguments, named, strict=False)]


def _problem(where: str, what: str, fix: str) -> Problem:
    return Problem(f"graphed-callables-{where.strip('_').replace('_', '-')}", f"{where}: {what}", where, fix)


def _installed(module: nn.Module, graphs: CallableGraphs, place: Place) -> nn.Module:
    own = module.__dict__.get("forward")
    installed = InstalledForward(module, GraphedCallable(graphs, place), own_forward(module))
    module.__dict__["forward"] = installed

    def put_back() -> None:
        if module.__dict__.get("forward") is installed:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own

    graphs.on_close(put_back)
    return module


class _Making:
    """Turns an order into a plan, and captures it."""

    def __init__(self, asked: _Asked, num_warmup_runs: int, *, reuses: bool) -> None:
        self._asked = asked
        self._num_warmup_runs = num_warmup_runs
        self._reuses = reuses
        self.places: list[Place] = []
        self._observer = PlanObserver()
        self._keys: dict[int, Key] = {}
        """By index of a sample: what serves it."""
        self._callable_of: dict[Region, int] = {}

    def run(self, *, accumulates: bool, allows_unused: bool) -> Any:
        """Capture everything; returns what the caller gets.

        Raises:
            CaptureError: names the callable.
        """
        asked = self._asked
        tensors = [tensor for sample in asked.samples for tensor in flatten(sample)[0]]
        device = _device_of(tensors, asked.callables)
        session = GraphSession(device)
        graphs = CallableGraphs(session)
        try:
            turns = self._plan(session)
            graphs.cursor = OrderCursor(turns, graphs.is_idle) if asked.is_ordered else None
            result = asked.result(graphs, self.places)
            receivers = {place.captured.region: place.captured for place in self.places}
            for captured in receivers.values():
                captured.note()
            with torch.inference_mode(False):
                chains = capture_chains(
                    Order(
                        plan=self._observer.plan,
                        handovers={},
                        session=session,
                        lanes=Lanes(),
                        receivers=receivers,
                        num_warmup_runs=self._num_warmup_runs,
                        through_autograd=frozenset() if accumulates else EVERY_PARAMETER,
                        around=self._hooks_around,
                    )
                )
            self._settle(chains, allows_unused=allows_unused)
        except BaseException:
            graphs.close()
            raise
        return result

    def _plan(self, session: GraphSession) -> list[Turn]:
        asked = self._asked
        regions = [self._captured(index, session) for index in range(len(asked.callables))]
        turns: list[Turn] = []
        for chunk, num_layers in enumerate(asked.layers_per_chunk):
            for microbatch in range(asked.num_microbatches):
                for layer in range(num_layers):
                    captured = regions[asked.callable_of(chunk, layer)]
                    arguments = asked.samples[asked.index_of(chunk, microbatch, layer)]
                    signature = Signature.of(
                        arguments, device_type=session.device.type, modules=captured.region.modules
                    )
                    forward, backward = (
                        Turn(captured.region.name, chunk, microbatch, phase)
                        for phase in (pipeline_order.Phase.FORWARD, pipeline_order.Phase.BACKWARD)
                    )
                    place = Place(captured, signature, forward, backward, guard=layout_guard(signature))
                    self.places.append(place)
        for step in asked.order:
            layers = range(asked.layers_per_chunk[step.chunk])
            is_forward = step.phase is pipeline_order.Phase.FORWARD
            for layer in layers if is_forward else reversed(layers):
                index = asked.index_of(step.chunk, step.microbatch, layer)
                place = self.places[index]
                if is_forward:
                    self._note_forward(index, place)
                    turns.append(place.forward)
                else:
                    self._observer.backward(*self._keys[index])
                    turns.append(place.backward)
        return turns

    def _note_forward(self, index: int, place: Place) -> None:
        tensors, _ = flatten(self._asked.samples[index])
        taken = [] if self._reuses else [slot for variant, slot in self._keys.values() if self._is_of(variant, place)]
        key = self._observer.forward(place.captured.region, place.signature, tensors, taken=taken)
        self._observer.plan.calls[key].samples = tuple(tensors)
        self._keys[index] = key

    @staticmethod
    def _is_of(variant: Variant, place: Place) -> bool:
        return variant.region is place.captured.region and variant.signature == place.signature

    def _captured(self, index: int, session: GraphSession) -> Captured:
        function = self._asked.callables[index]
        modules: tuple[nn.Module, ...] = ()
        name = f"callables[{index}] ({getattr(function, '__name__', type(function).__name__)})"
        names = names_of(function)
        if isinstance(function, nn.Module):
            modules = tuple(function.modules())
            function = own_forward(function)
        region = Region(name=name, kind="callable", function=function, modules=modules)
        self._callable_of[region] = index
        watched = session.watch([(name, module) for module in modules[:1]])
        return Captured(region, session.stats(name, region.kind), watched, names)

    def _settle(self, chains: Sequence[Chain], *, allows_unused: bool) -> None:
        by_key: dict[Key, Chain] = {}
        variants = dict.fromkeys(self._keys.values())
        for chain in chains:
            for pair in chain.pairs:
                key = next(
                    k
                    for k in variants
                    if k[0].region is pair.region and k[0].signature is pair.signature and k[1] == chain.slot
                )
                by_key[key] = chain
                pair.homes.hide_new()
                pair.is_held()  # From now on, more holders than at this moment are callers.
                chain.lane.add(pair)
                if not allows_unused:
                    _refuse_unused(pair)
        for home in (home for chain in chains for pair in chain.pairs for home in pair.session.gradient_homes.values()):
            home.note_holders()
        for index, key in self._keys.items():
            self.places[index].chain = by_key[key]
        for place in self.places:
            place.captured.settle()

    @contextmanager
    def _hooks_around(self, event: Event) -> Iterator[None]:
        index = self._callable_of[event.variant.region]
        half = "forward" if event.phase is Phase.FORWARD else "backward"
        self._call_hooks(index, f"{half}_pre_hooks")
        yield
        self._call_hooks(index, f"{half}_hooks")

    def _call_hooks(self, index: int, kind: str) -> None:
        hooks = self._asked.hooks[index].get(kind, ())
        for hook in hooks.values() if isinstance(hooks, Mapping) else (hooks,) if callable(hooks) else hooks:
            if hook(self._asked.callables[index]) is not None:
                raise CaptureError(
                    f"a hook of capture_time_hooks[{index}][{kind!r}] returned something",
                    where=f"callables[{index}]",
                    fix="return None: such a hook cannot change what is captured",
                )


def _refuse_unused(pair: GraphPair) -> None:
    unused = [
        f"argument tensor {position + 1}"
        for position, (tensor, gradient) in enumerate(zip(pair.inputs, pair.grad_inputs, strict=True))
        if tensor.requires_grad and gradient is None and position not in dict(pair.signature.repeated)
    ]
    used = {id(parameter) for parameter in pair.trained}
    unused += [
        name
        for module in pair.region.modules[:1]
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in used
    ]
    if unused:
        raise CaptureError(
            f"{', '.join(unused)} wants a gradient and gets none",
            where=pair.region.name,
            fix="use it in what the callable computes, set requires_grad=False, or give allow_unused_input=True",
        )


def _device_of(tensors: Sequence[Tensor], callables: Sequence[Callable[..., Any]]) -> torch.device:
    parameters = (p for each in callables if isinstance(each, nn.Module) for p in each.parameters())
    devices = {tensor.device: None for tensor in (*tensors, *parameters)}
    accelerated = [device for device in devices if device.type != "cpu"]
    return accelerated[0] if accelerated else torch.device("cpu")
