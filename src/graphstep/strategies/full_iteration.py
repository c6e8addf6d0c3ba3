"""``full_iteration``: forward and backward of all microbatches of a step in one graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.capture.places import Place
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.tree import flatten, values_of
from graphstep.config.switches import CapturePolicy, MismatchPolicy
from graphstep.errors import CaptureError, ConfigError, Problem
from graphstep.strategies.iteration_graphs import IterationGraphs, Step
from graphstep.strategies.optimizers_inside import OptimizersInside
from graphstep.strategies.protocol import ForwardBackward
from graphstep.strategies.step_reads import StepReads

STAGES = ("training", "validation")


class FullCudaGraphWrapper:
    """Wraps a forward-backward function: eager for the first calls, one graph launch for each later call.

    There is one graph for each key: training or forward-only, number of microbatches, layout and non-tensor values of
    the batches, training flags, grad and autocast modes. A key that was not seen warms up and is captured anew; it is
    never served by the graph of another key. Past ``max_graphs`` graphs, the one used longest ago is dropped.
    When a plain attribute of a module (a dropout probability, say) or the hooks on a module or parameter have changed
    since a capture, its graph is dropped and captured again after a new warmup; attributes that the step itself sets
    do not count, and a counter, a history or dice of the host among them is refused. Hooks run when the step is
    captured and not when it is replayed: what they compute is in the graph.

    Gradients accumulate inside the graph into ``main_grad`` or ``.grad``; the optimizer and gradient clipping stay
    outside, unless the function makes whole steps. The order of microbatches and of random draws is that of the wrapped
    function, so results equal eager execution bit for bit where the kernels are deterministic. Batches that want a
    gradient run eagerly: it could not reach them.

    Args:
        forward_backward_func: see :class:`ForwardBackward`; called with batches on the session's device.
        model: its parameters and buffers are watched: replay is refused when one has moved.
        session: owner of the graphs.
        cuda_graph_warmup_steps: eager calls of each key before its capture. They are real steps of training. With 0,
            the capture is preceded by one observed run that leaves no trace.
        max_graphs: most graphs that are kept.
        policy: what becomes of a step that cannot be captured, see :class:`CapturePolicy`.
        on_mismatch: what becomes of another key in a stage that has a graph, see :class:`MismatchPolicy`.
        use_single_mempool: training and validation graphs share one memory pool.
        optimizers: those that step in ``forward_backward_func``, if it makes whole steps. They need ``fused=True`` or
            ``capturable=True``; their learning rates follow a schedule, see :class:`OptimizersInside`.
    """

    launches_graphs: Final = True
    """Not to be used inside of another captured step."""

    def __init__(
        self,
        forward_backward_func: ForwardBackward,
        *,
        model: nn.Module,
        session: GraphSession,
        cuda_graph_warmup_steps: int = 3,
        max_graphs: int = 16,
        policy: CapturePolicy = CapturePolicy.required,
        on_mismatch: MismatchPolicy = MismatchPolicy.recapture,
        use_single_mempool: bool = True,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
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
        )
        self._inside = tuple(optimizers)
        self._optimizers = OptimizersInside(self._inside, session.device)
        self._steps = {forward_only: self._step(forward_only) for forward_only in (False, True)}

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Read the microbatches, then run the step.

        Returns:
            [num_microbatches] fp32 losses, a copy that later steps do not change.

        Raises:
            CaptureError: the step cannot be captured. Gradients, buffers and generators are as before the call; the
                batches of this call are consumed. A function that returns no tensor is refused after its first eager
                step, which has run.
            StaleAddressError: a parameter, buffer or gradient has moved since the capture, or a module was replaced.
            InputMismatchError: ``on_mismatch`` is ``error``, and the batches differ from all that were captured.
            LifecycleError: the wrapper is closed.

        Cost of a replay: one copy an input tensor, one launch, one copy of the losses; no wait for the device.
        """
        self._session.require_open()
        batches = [next(data_iterator) for _ in range(num_microbatches)]
        losses: Tensor = self._graphs.run(self._steps[forward_only], batches)
        return losses

    def __call__(self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False) -> Tensor:
        """The same as :meth:`forward_backward`."""
        return self.forward_backward(
            data_iterator=data_iterator, num_microbatches=num_microbatches, forward_only=forward_only
        )

    @property
    def session(self) -> GraphSession:
        """Owner of the graphs."""
        return self._session

    @property
    def function(self) -> ForwardBackward:
        """What is captured."""
        return self._function

    @property
    def model(self) -> nn.Module:
        """What the function is called with."""
        return self._model

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those that step in the function."""
        return self._inside

    def eager(self, batches: Sequence[Any], *, forward_only: bool = False) -> Tensor:
        """Run the step on some microbatches as it is, on the stream of the graphs; nothing is counted or captured."""
        losses: Tensor = self._graphs.eager(self._steps[forward_only], list(batches))
        return losses

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
            function=lambda batches: self._run(batches, forward_only),
            modules=[("", self._model)],
            optimizers=OptimizersInside((), self._session.device) if forward_only else self._optimizers,
            fills_gradients=not forward_only,
            reads=self._reads,
        )

    def _reads(self, batches: Any) -> list[Place]:
        found = StepReads()
        found.add_function(self._function)
        found.add_modules([self._model])
        found.add_values(values_of(flatten(batches)[1]))
        return found.places

    def _run(self, batches: list[Any], forward_only: bool) -> Tensor:
        losses: Any = self._function(
            data_iterator=iter(batches), model=self._model, num_microbatches=len(batches), forward_only=forward_only
        )
        if not isinstance(losses, Tensor):
            what = f"the forward-backward function returned {type(losses).__name__}, not a tensor of losses"
            raise CaptureError(what, where=_WHERE, fix="return one tensor [num_microbatches]")
        return losses


_WHERE = "full_iteration, the forward-backward function"
