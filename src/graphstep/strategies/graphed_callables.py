"""``make_graphed_callables``: graphs for modules and functions of anyone's loop, in an order given by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Unpack

import torch
from torch import Tensor, nn

from graphstep.capture.chain import Chain
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.lanes import Lanes
from graphstep.capture.pair_capture import NoGradientError
from graphstep.capture.plan import Event, Key, Phase, PlanObserver, Variant
from graphstep.capture.region import Region
from graphstep.capture.report import ModuleReference
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.capture.tree import flatten
from graphstep.errors import CaptureError
from graphstep.strategies.callable_checks import argument_names, layout_guard, names_of
from graphstep.strategies.callable_graphs import (
    CallableGraphs,
    CapturedCallable,
    CurrentMicrobatch,
    GraphedCallable,
    ScheduledCallable,
)
from graphstep.strategies.callable_modules import all_modules_of, device_of, modules_of, name_of
from graphstep.strategies.fp8_callables import Fp8Callables, Fp8Keywords
from graphstep.strategies.graphed_arguments import GraphedArguments, Hooks
from graphstep.strategies.local_capture import (
    EVERY_PARAMETER,
    Order,
    RegionFailedError,
    capture_chains,
    shared_parameters,
)
from graphstep.strategies.local_forward import InstalledForward, own_forward
from graphstep.strategies.order_cursor import OrderCursor, Turn
from graphstep.strategies.sample_chains import results_among
from graphstep.strategies.settled import settle, tensors_kept

_MAX_SMALL: Final = 1024
"""Entries of results that callers always get as copies."""


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
    **fp8: Unpack[Fp8Keywords],
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
            shapes, dtypes, devices or values is refused. They are copied, and may be used for anything afterwards. A
            sample that the callable before returned for its own sample says that later calls get its results as well:
            those are read where they are, without a copy. A callable whose results need no gradient, such as a frozen
            one, gets no graphs and runs eagerly at any time, with a warning.
        num_warmup_iters: eager runs of each callable before its capture.
        allow_unused_input: do not mind arguments and parameters that want a gradient and get none. Where no result
            needs one then, the callable runs eagerly, as a frozen one does.
        sample_kwargs: keyword arguments: one dict, or one for each entry of ``sample_args``.
        pool: accepted; memory is shared among callables that are given together, and not with other graphs. Also as the
            fifth positional argument, as torch has it.
        retain_graph_in_backward: accepted; what a backward needs is kept for its replays in any case.
        _order: of a pipeline schedule: ``+n`` the forward of chunk n, ``-n`` its backward, chunks from 1; see
            :func:`graphstep.strategies.pipeline_order.pipeline_order`. A list of callables is returned then, one for
            each entry of ``sample_args``, and they have to be called in this order. With ``-n - 0.5`` for each ``-n``,
            backwards give the gradients of inputs only; ``backward_dw()`` of each callable, last layer first, computes
            and accumulates those of parameters in that turn.
        _num_layers_per_chunk: how many of the callables each chunk has; by default as many in each.
        _reuse_graph_input_output_buffers: as many sets of graphs and buffers as there are microbatches in flight, and
            not as many as there are microbatches.
        clone_param_grads_on_return: accepted; gradients never alias memory of the graphs.
        accumulate_param_grads: add the gradients of parameters to ``.grad`` (or ``main_grad``) inside the graphs, with
            no launches of their own. Hooks that want to see each gradient keep their parameter out of this; hooks after
            accumulation find ``.grad`` empty where there is a ``main_grad``. Not for modules in
            DistributedDataParallel, nor for parameters that other calls of this function, or eager code, use too:
            the parts of their gradient would be added one by one, and rounded so.
        capture_time_hooks: for each callable ``None`` or a mapping with ``forward_pre_hooks``, ``forward_hooks``,
            ``backward_pre_hooks``, ``backward_hooks``: a function of the callable, or several. They run around each
            capture, outside of it, and have to return ``None``.
        pre_warmup_hook: called once before anything runs.
        post_warmup_hook: called once when all is captured.
        fp8: ``fp8_enabled`` (for all, or for each callable), ``fp8_calibrating``, ``fp8_recipe``, ``fp8_group``,
            ``fp8_weight_caching``, or Transformer Engine's newer names of them. Its modules run inside of its autocast
            then. ``Float8Linear`` takes the recipe. With caching each call has to say ``is_first_microbatch=``.

    Returns:
        What replays: in the form of ``callables``; with ``_order`` a list. Each has ``reset()`` (for a module
        ``module.forward.reset()``), which frees the graphs of all, ``report()``, and ``backward_dw()``. Results may be
        kept: no replay overwrites one that somebody holds.

    Raises:
        ConfigError: arguments that do not fit each other: all problems at once.
        CaptureError: names the callable that cannot be captured. Nothing is left behind.

    Calls raise InputMismatchError (names the argument), PlanError (out of turn: names the expected turn and the actual
    one; or a microbatch in flight needs the memory), StaleAddressError and LifecycleError; a backward may raise what
    those of :class:`graphstep.CudaGraphManager` may. A call that the graphs are not for runs eagerly and is counted in
    ``report()`` with its reason: other modes than at the capture (grad mode off, training flags), an attribute or hook
    that has changed, a result that is still held, recompute around it.
    """
    del retain_graph_in_backward, clone_param_grads_on_return, pool
    if _is_pool(sample_kwargs):
        sample_kwargs = None  # In torch's order of arguments.
    asked = GraphedArguments.read(
        callables, sample_args, sample_kwargs, num_warmup_iters, _order, _num_layers_per_chunk, capture_time_hooks
    )
    modules = [all_modules_of(each) for each in asked.callables]
    fp8_callables = Fp8Callables.read(modules, fp8)
    if pre_warmup_hook is not None:
        pre_warmup_hook()
    eager: set[tuple[int, Signature]] = set()
    while True:
        made = _Making(asked, num_warmup_iters, fp8_callables, eager, reuses=_reuse_graph_input_output_buffers)
        try:
            with fp8_callables.captured():
                return made.run(
                    accumulates=accumulate_param_grads, allows_unused=allow_unused_input, afterwards=post_warmup_hook
                )
        except RegionFailedError as error:
            if not isinstance(error.__cause__, NoGradientError):
                raise
            if not allow_unused_input:
                raise CaptureError(
                    "parameters or arguments want a gradient, and no result needs one",
                    where=error.__cause__.region.name,
                    fix="compute a result outside of no_grad() and detach(); or set requires_grad=False, or give "
                    "allow_unused_input=True, and it runs eagerly",
                ) from error
            eager.add(made.index_and_signature(error.__cause__))
            fp8_callables = Fp8Callables.read(modules, fp8)


def _is_pool(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, int) for each in value)


def _result(asked: GraphedArguments, graphs: CallableGraphs, scheduled: Sequence[ScheduledCallable]) -> Any:
    """What the caller gets."""
    if asked.is_ordered:
        around: dict[nn.Module, CurrentMicrobatch] = {}
        for each in asked.callables:
            if isinstance(each, nn.Module) and each not in around:
                around[each] = CurrentMicrobatch(graphs, each, own_forward(each))
                _install(each, graphs, around[each])
        found = ((each, each.captured.module) for each in scheduled)
        return [GraphedCallable(graphs, each, around[m] if m is not None else None) for each, m in found]
    made = [
        _install(each, graphs, GraphedCallable(graphs, one))
        if isinstance(each, nn.Module)
        else GraphedCallable(graphs, one)
        for each, one in zip(asked.callables, scheduled, strict=True)
    ]
    return made[0] if asked.is_single else tuple(made)


def _install(module: nn.Module, graphs: CallableGraphs, forward: Callable[..., Any]) -> nn.Module:
    own = module.__dict__.get("forward")
    installed = InstalledForward(module, forward, own_forward(module))
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

    def __init__(
        self,
        asked: GraphedArguments,
        num_warmup_runs: int,
        fp8: Fp8Callables,
        eager: Collection[tuple[int, Signature]],
        *,
        reuses: bool,
    ) -> None:
        self._asked = asked
        self._fp8 = fp8
        self._eager = eager
        """Index of a callable and signature of a call: what is known to have no result that needs a gradient."""
        self._num_warmup_runs = num_warmup_runs
        self._reuses = reuses
        self.scheduled: list[ScheduledCallable] = []
        self._observer = PlanObserver()
        self._keys: dict[int, Key] = {}
        """By index of a sample: what serves it."""
        self._results: dict[int, Mapping[int, Tensor]] = {}
        """By index of a sample: which of its results are among the sample of the next callable."""
        self._callable_of: dict[Region, int] = {}
        self._chunk_of: dict[Region, int] = {}

    def run(self, *, accumulates: bool, allows_unused: bool, afterwards: Callable[[], None] | None) -> Any:
        """Capture everything; returns what the caller gets.

        Raises:
            CaptureError: names the callable.
        """
        asked = self._asked
        tensors = [tensor for sample in asked.samples for tensor in flatten(sample)[0]]
        device = device_of(tensors, asked.callables)
        session = GraphSession(device)
        graphs = CallableGraphs(session)
        try:
            self._schedule(session)
            graphs.note_roots(root for each in self.scheduled for root in each.captured.roots)
            left_out = self._leave_out_without_gradient(session)
            self._follow_fp8(graphs)
            self._link(session)
            turns = self._plan()
            graphs.cursor = OrderCursor(turns, graphs.is_idle) if asked.is_ordered else None
            result = _result(asked, graphs, self.scheduled)
            receivers = {each.captured.region: each.captured for each in self.scheduled}
            for captured in receivers.values():
                captured.note()
            with (
                torch.inference_mode(False),
                tensors_kept([each.watched for each in receivers.values()], where="make_graphed_callables"),
            ):
                chains = capture_chains(
                    Order(
                        plan=self._observer.plan,
                        handovers={},
                        session=session,
                        lanes=Lanes(),
                        receivers=receivers,
                        attributes={r: each.attributes for r, each in receivers.items() if each.attributes is not None},
                        num_warmup_runs=self._num_warmup_runs,
                        through_autograd=shared_parameters(each.modules for each in receivers)
                        if accumulates
                        else EVERY_PARAMETER,
                        apart={region: self._chunk_of[region] for region in receivers},
                        around=self._hooks_around,
                    )
                )
            settle(chains, session)
            self._settle(chains, allows_unused=allows_unused)
            graphs.captured(self.scheduled)
            if afterwards is not None:
                afterwards()
        except BaseException:
            graphs.close()
            raise
        if left_out:
            warnings.warn(
                f"{', '.join(left_out)} will run eagerly: no result needs a gradient, so that there is no backward",
                UserWarning,
                stacklevel=3,
            )
        return result

    def index_and_signature(self, error: NoGradientError) -> tuple[int, Signature]:
        """Of what has failed: the place of the callable in what was given, and what it was called with."""
        return self._callable_of[error.region], error.signature

    def _schedule(self, session: GraphSession) -> None:
        """Fill :attr:`scheduled`: for each sample its callable and its turns."""
        asked = self._asked
        regions = [self._captured(index, session) for index in range(len(asked.callables))]
        delayed = {step.chunk for step in asked.order if step.phase is Phase.WEIGHT_GRADIENT}
        for chunk, num_layers in enumerate(asked.layers_per_chunk):
            for microbatch in range(asked.num_microbatches):
                for layer in range(num_layers):
                    captured = regions[asked.callable_of(chunk, layer)]
                    arguments = asked.samples[asked.index_of(chunk, microbatch, layer)]
                    modules, device_type = captured.region.modules, session.device.type
                    signature = Signature.of(arguments, device_type=device_type, modules=modules)
                    turns = {phase: Turn(captured.region.name, chunk, microbatch, phase) for phase in Phase}
                    self._chunk_of[captured.region] = chunk
                    self.scheduled.append(
                        ScheduledCallable(
                            captured,
                            signature,
                            turns[Phase.FORWARD],
                            turns[Phase.BACKWARD],
                            turns[Phase.WEIGHT_GRADIENT] if chunk in delayed else None,
                            keywords={name: number for number, name in enumerate(arguments[1])},
                            guard=layout_guard(signature),
                        )
                    )

    def _leave_out_without_gradient(self, session: GraphSession) -> list[str]:
        """What is frozen, and has no argument that wants a gradient, has no backward to be captured.

        Returns:
            The names of such callables.
        """
        known: dict[tuple[Region, Signature], bool] = {}
        for scheduled, (arguments, named) in zip(self.scheduled, self._asked.samples, strict=True):
            region, key = scheduled.captured.region, (scheduled.captured.region, scheduled.signature)
            if key not in known:
                tensors = (*region.tensors(), *flatten((arguments, named))[0])
                known[key] = (self._callable_of[region], scheduled.signature) not in self._eager and (
                    any(tensor.requires_grad for tensor in tensors)
                    or _has_gradient(region.function, arguments, named, session)
                )
            scheduled.has_gradient = known[key]
        names = list(dict.fromkeys(region.name for (region, _), has_gradient in known.items() if not has_gradient))
        if not any(known.values()):
            raise CaptureError(
                f"there is nothing to capture: no result of {', '.join(names)} needs a gradient",
                where="make_graphed_callables",
                fix="let results depend on samples or parameters with requires_grad=True, outside of no_grad() and "
                "detach(); or leave the graphs out",
            )
        return names

    def _link(self, session: GraphSession) -> None:
        """Fill :attr:`_results`."""
        asked = self._asked
        known: dict[tuple[int, ...], Mapping[int, Tensor]] = {}
        for chunk, num_layers in enumerate(asked.layers_per_chunk):
            for microbatch in range(asked.num_microbatches):
                for layer in range(num_layers - 1):
                    index = asked.index_of(chunk, microbatch, layer)
                    following = flatten(asked.samples[asked.index_of(chunk, microbatch, layer + 1)])[0]
                    # Samples are often the same objects for all microbatches.
                    tensors = (*flatten(asked.samples[index])[0], *following)
                    same = (chunk, layer, *map(id, tensors))
                    if same not in known:
                        function = self.scheduled[index].captured.region.function
                        known[same] = results_among(function, asked.samples[index], following, session)
                    self._results[index] = known[same]

    def _plan(self) -> list[Turn]:
        asked = self._asked
        turns: list[Turn] = []
        for step in asked.order:
            layers = range(asked.layers_per_chunk[step.chunk])
            for layer in layers if step.phase is Phase.FORWARD else reversed(layers):
                index = asked.index_of(step.chunk, step.microbatch, layer)
                scheduled = self.scheduled[index]
                if not scheduled.has_gradient:
                    continue
                if step.phase is Phase.FORWARD:
                    self._note_forward(index, scheduled)
                    turns.append(scheduled.forward)
                elif step.phase is Phase.BACKWARD:
                    self._observer.backward(*self._keys[index], is_last=scheduled.weight_gradients is None)
                    turns.append(scheduled.backward)
                elif scheduled.weight_gradients is not None:
                    self._observer.weight_gradients(*self._keys[index])
                    turns.append(scheduled.weight_gradients)
        return turns

    def _note_forward(self, index: int, scheduled: ScheduledCallable) -> None:
        tensors, _ = flatten(self._asked.samples[index])
        taken = (
            [] if self._reuses else [slot for variant, slot in self._keys.values() if self._is_of(variant, scheduled)]
        )
        key = self._observer.forward(scheduled.captured.region, scheduled.signature, tensors, taken=taken)
        self._observer.plan.calls[key].samples = tuple(tensors)
        self._keys[index] = key
        results = self._results.get(index)
        if results:
            nothing = torch.empty(0)
            self._observer.outputs(*key, [results.get(number, nothing) for number in range(1 + max(results))])

    @staticmethod
    def _is_of(variant: Variant, scheduled: ScheduledCallable) -> bool:
        return variant.region is scheduled.captured.region and variant.signature == scheduled.signature

    def _follow_fp8(self, graphs: CallableGraphs) -> None:
        graphs.on_close(self._fp8.close)
        if self._fp8.has_part_in_calls:
            graphs.around = self._fp8.around(self._callable_of)
        for index, region in enumerate(self._callable_of):
            if self._fp8.needs_a_first_run(index):
                each = next(n for n, one in enumerate(self.scheduled) if one.captured.region is region)
                arguments, named = self._asked.samples[each]
                graphs.session.observe(partial(region.function, *arguments, **named))

    def _captured(self, index: int, session: GraphSession) -> CapturedCallable:
        function = self._asked.callables[index]
        name = f"callables[{index}] ({name_of(function)})"
        names = names_of(function)
        roots = tuple((name, module) for module in modules_of(function))
        modules = {id(module): module for _, root in roots for module in root.modules()}
        if isinstance(function, nn.Module):
            function = own_forward(function)
        function = self._fp8.wrapped(index, function)
        region = Region(name=name, kind="callable", function=function, modules=tuple(modules.values()))
        self._callable_of[region] = index
        captured = CapturedCallable(region, session.stats(name, region.kind), session.watch(roots), roots, names)
        captured.module = given if isinstance(given := self._asked.callables[index], nn.Module) else None
        captured.stats.module = ModuleReference(captured.module) if captured.module is not None else None
        return captured

    def _settle(self, chains: Sequence[Chain], *, allows_unused: bool) -> None:
        by_key: dict[Key, Chain] = {}
        variants = dict.fromkeys(self._keys.values())
        sources = {source for chain in chains for pair in chain.pairs for source in pair.sources()}
        for chain in chains:
            for pair in chain.pairs:
                key = next(
                    k
                    for k in variants
                    if k[0].region is pair.region and k[0].signature is pair.signature and k[1] == chain.slot
                )
                by_key[key] = chain
                # Losses and the like are kept for long.
                is_small = sum(output.numel() for output in pair.outputs) <= _MAX_SMALL
                pair.copies_results = is_small and pair not in sources
                if not allows_unused:
                    _refuse_unused(pair, next(s.captured for s in self.scheduled if s.captured.region is pair.region))
        for index, key in self._keys.items():
            self.scheduled[index].chain = by_key[key]
            self.scheduled[index].is_read_in_place = by_key[key].pairs[0] in sources
        for each in self.scheduled:
            each.captured.settle()

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


def _refuse_unused(pair: GraphPair, captured: CapturedCallable) -> None:
    arguments = argument_names(pair.signature, captured.names)
    unused = [
        arguments[position]
        for position, (tensor, gradient) in enumerate(zip(pair.inputs, pair.grad_inputs, strict=True))
        if tensor.requires_grad and gradient is None and position not in dict(pair.signature.repeated)
    ]
    used = {id(parameter) for parameter in pair.trained}
    unused += [
        f"parameter {name!r}"
        for _, module in captured.roots
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in used
    ]
    if unused:
        raise CaptureError(
            f"{', '.join(unused)} wants a gradient and gets none",
            where=pair.region.name,
            fix="use it in what the callable computes, outside of no_grad() and detach(); set requires_grad=False; or "
            "give allow_unused_input=True",
        )


def _has_gradient(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], session: GraphSession
) -> bool:
    """True if some result of a call needs a gradient. The call is undone."""
    found: list[bool] = []

    def run() -> None:
        with torch.enable_grad():
            found[:] = [tensor.requires_grad for tensor in flatten(function(*arguments, **named))[0]]

    session.observe(run)
    return any(found)
