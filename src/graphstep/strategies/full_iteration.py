"""``full_iteration``: forward and backward of all microbatches of a step in one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from graphstep.capture.places import Place
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.tree import flatten, values_of
from graphstep.config.switches import CapturePolicy, MismatchPolicy
from graphstep.errors import ConfigError, Problem
from graphstep.strategies.iteration_graphs import IterationGraphs
from graphstep.strategies.iteration_state import Step
from graphstep.strategies.optimizers_inside import OptimizersInside
from graphstep.strategies.step_options import checked
from graphstep.strategies.step_reads import StepReads

STAGES = ("training", "validation")
Data = Iterator[Any] | Sequence[Iterator[Any] | None] | None


class FullCudaGraphWrapper:
    """Wraps a forward-backward function: eager for the first calls, one graph launch for each later call.

    There is one graph for each key: training or forward-only, number of microbatches, layout and non-tensor values of
    the batches, further arguments, training flags, grad and autocast modes. A key that was not seen warms up and is
    captured anew; it is never served by the graph of another key. Past ``max_graphs`` graphs, the one used longest ago
    is dropped.
    When a plain attribute of a module (a dropout probability, say) or the hooks on a module or parameter have changed
    since a capture, its graph is dropped and captured again after a new warmup; attributes that the step itself sets
    do not count, and a counter, a history or dice of the host among them is refused. Hooks run when the step is
    captured and not when it is replayed: what they compute is in the graph.

    Gradients accumulate inside the graph into ``main_grad`` or ``.grad``; the optimizer and gradient clipping stay
    outside, unless the function makes whole steps. The order of microbatches and of random draws is that of the wrapped
    function, so results equal eager execution bit for bit where the kernels are deterministic. Batches that want a
    gradient run eagerly: it could not reach them.

    Args:
        forward_backward_func: see :class:`ForwardBackward`; called with batches on the session's device, with ``model``
            as it is given here, and with any further arguments of the call. Returns any nesting of tensors and of
            values that never change.
        model: its parameters and buffers are watched: replay is refused when one has moved. Several model chunks are
            given as a list.
        session: owner of the graphs.
        cuda_graph_warmup_steps: eager calls of each key before its capture. They are real steps of training. With 0,
            the capture is preceded by one observed run that leaves no trace.
        max_graphs: most graphs that are kept.
        policy: what becomes of a step that cannot be captured, see :class:`CapturePolicy`.
        on_mismatch: what becomes of another key in a stage that has a graph, see :class:`MismatchPolicy`.
        use_single_mempool: training and validation graphs share one memory pool.
        gather_gradients: gradients that are added to are added many at a time, at the end of each backward pass or when
            32 MiB of them wait, in place of a launch for each. Those that the step itself looks at during the pass,
            those in memory that others write, and those with hooks that run after the addition are added at once.
        parallel_gradients: weight and bias gradients of linear layers are computed on a branch of the graph, beside the
            rest of the backward pass, and gathered, and added there. Gradients are zeroed beside the forward, and
            the launches of a fused optimizer run side by side. The arithmetic is the same; kernels that add in no fixed
            order (the backward of cuDNN's attention) may add in another one than alone. What the step looks at, others
            write or hooks wait for is done in its place. Takes up to 64 MiB for gradients that wait, and 32 MiB for a
            workspace of cuBLAS.
        optimizers: those that step in ``forward_backward_func``, if it makes whole steps. They need ``fused=True`` or
            ``capturable=True``; their learning rates follow a schedule, see :class:`OptimizersInside`.

    Raises:
        ConfigError: a number or policy that there is not.
    """

    launches_graphs: Final = True
    """Not to be used inside of another captured step."""

    def __init__(
        self,
        forward_backward_func: Callable[..., Any],
        *,
        model: nn.Module | Sequence[nn.Module],
        session: GraphSession,
        cuda_graph_warmup_steps: int = 3,
        max_graphs: int = 16,
        policy: CapturePolicy | str = CapturePolicy.required,
        on_mismatch: MismatchPolicy | str = MismatchPolicy.recapture,
        use_single_mempool: bool = True,
        gather_gradients: bool = False,
        parallel_gradients: bool = False,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        policy, on_mismatch = checked(
            "FullCudaGraphWrapper",
            warmup_steps=cuda_graph_warmup_steps,
            max_graphs=max_graphs,
            policy=policy,
            on_mismatch=on_mismatch,
        )
        self._function = forward_backward_func
        self._model = model
        self._session = session
        self._graphs = IterationGraphs(
            session,
            warmup_steps=cuda_graph_warmup_steps,
            max_graphs=max_graphs,
            policy=policy,
            on_mismatch=on_mismatch,
            use_single_mempool=use_single_mempool,
            gather_gradients=gather_gradients,
            parallel_gradients=parallel_gradients,
        )
        self._inside = tuple(optimizers)
        self._optimizers = OptimizersInside(self._inside, session.device)
        self._steps = {forward_only: self._step(forward_only) for forward_only in (False, True)}

    def forward_backward(
        self, *, data_iterator: Data, num_microbatches: int, forward_only: bool = False, **others: Any
    ) -> Any:
        """Read the microbatches, then run the step.

        Args:
            data_iterator: of batches in any nesting; for several model chunks a list, with one for each. What is
                ``None``, as where another stage of the pipeline has the data, stays ``None``.
            num_microbatches: batches to take from each.
            forward_only: given to the function; such calls have graphs of their own, without gradients.
            others: given to the function. Tensors are copied to static inputs, other values are part of the key.

        Returns:
            What the function returns: as a rule [num_microbatches] fp32 losses. Copies, that later steps do not change.

        Raises:
            CaptureError: the step cannot be captured. Gradients, buffers and generators are as before the call; the
                batches of this call are consumed.
            StaleAddressError: a parameter, buffer or gradient has moved since the capture, or a module was replaced.
            InputMismatchError: ``on_mismatch`` is ``error``, and the batches differ from all that were captured.
            ConfigError: ``model`` is among the arguments, and is another than that of the wrapper.
            LifecycleError: the wrapper is closed.

        Cost of a replay: one copy an input tensor, one launch, one copy of the losses; no wait for the device.
        """
        self._session.require_open()
        if others and others.pop("model", self._model) is not self._model:
            what = "the call names another model than that which the wrapper watches"
            raise ConfigError(Problem("another-model", what, "FullCudaGraphWrapper", "make a wrapper for each model"))
        batches: Any
        if isinstance(data_iterator, Sequence):
            batches = _OfChunks(_read(each, num_microbatches) for each in data_iterator)
        else:
            batches = _read(data_iterator, num_microbatches)
        is_plain = isinstance(batches, list) and not isinstance(batches, _OfChunks) and not others
        call = batches if is_plain else _Call(batches, num_microbatches, others)
        return self._graphs.run(self._steps[forward_only], call)

    def __call__(self, *, data_iterator: Data, num_microbatches: int, forward_only: bool = False, **others: Any) -> Any:
        """The same as :meth:`forward_backward`."""
        return self.forward_backward(
            data_iterator=data_iterator, num_microbatches=num_microbatches, forward_only=forward_only, **others
        )

    @property
    def session(self) -> GraphSession:
        """Owner of the graphs."""
        return self._session

    @property
    def function(self) -> Callable[..., Any]:
        """What is captured."""
        return self._function

    @property
    def model(self) -> nn.Module:
        """What the function is called with; of model chunks, a list of them."""
        return self._model if isinstance(self._model, nn.Module) else nn.ModuleList(self._model)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those that step in the function."""
        return self._inside

    def eager(self, batches: Sequence[Any], *, forward_only: bool = False) -> Any:
        """Run the step on some microbatches as it is, on the stream of the graphs; nothing is counted or captured."""
        return self._graphs.eager(self._steps[forward_only], list(batches))

    def reset_cuda_graph(self, stage: str | None = None) -> None:
        """Drop the graphs of ``training`` or ``validation``, or all; they warm up and are captured again when used.

        Raises:
            ConfigError: there is no such stage.
        """
        if stage is not None and stage not in STAGES:
            raise ConfigError(
                Problem("unknown-stage", f"there is no stage {stage!r}", "reset_cuda_graph", f"one of {STAGES} or None")
            )
        self._graphs.reset(STAGES if stage is None else [stage])

    def end_step(self) -> None:
        """Nothing to do: the step is one call."""

    def report(self) -> CaptureReport:
        """What has been captured so far."""
        return self._session.report()

    def close(self) -> None:
        """Close the session and forget the graphs."""
        self._graphs.close()

    def _step(self, forward_only: bool) -> Step:
        return Step(
            stage=STAGES[1 if forward_only else 0],
            kind="iteration",
            function=lambda call: self._run(call, forward_only),
            modules=[("", self._model)] if isinstance(self._model, nn.Module) else _named(self._model),
            optimizers=OptimizersInside((), self._session.device) if forward_only else self._optimizers,
            fills_gradients=not forward_only,
            reads=self._reads,
        )

    def _reads(self, call: Any) -> list[Place]:
        found = StepReads()
        found.add_function(self._function)
        found.add_modules([self._model] if isinstance(self._model, nn.Module) else self._model)
        found.add_values(values_of(flatten(call)[1]))
        found.add_optimizers(self._inside)
        return found.places

    def _run(self, given: Any, forward_only: bool) -> Any:
        call = given if isinstance(given, _Call) else _Call(given, len(given), {})
        is_of_chunks = isinstance(call.batches, _OfChunks)
        return self._function(
            data_iterator=[_given(each) for each in call.batches] if is_of_chunks else _given(call.batches),
            model=self._model,
            num_microbatches=call.num_microbatches,
            forward_only=forward_only,
            **call.others,
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call gives to the function, where it is more than the batches of one iterator."""

    batches: Any
    num_microbatches: int
    others: dict[str, Any]


class _OfChunks(list[Any]):
    """The batches of each model chunk."""


def _named(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(f"model[{index}]", chunk) for index, chunk in enumerate(chunks)]


def _read(data_iterator: Iterator[Any] | None, number: int) -> list[Any] | None:
    return None if data_iterator is None else [next(data_iterator) for _ in range(number)]


def _given(batches: list[Any] | None) -> Iterator[Any] | None:
    return None if batches is None else iter(batches)
