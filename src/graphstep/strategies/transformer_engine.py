"""``transformer_engine``: layers captured on request, for the order of a pipeline schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor, nn

from graphstep.capture.plan import Phase, Variant
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.static_inputs import to_device
from graphstep.config import CudaGraphConfig
from graphstep.errors import ConfigError, InputMismatchError, LifecycleError, PlanError, Problem
from graphstep.strategies.order_problems import is_whole, raise_if_any, size_problems
from graphstep.strategies.order_steps import steps_of
from graphstep.strategies.ordered_graphs import OrderedGraphs
from graphstep.strategies.pipeline_order import pipeline_order
from graphstep.strategies.protocol import ForwardBackward


class TECudaGraphHelper:
    """Graphs for the layers of a model in a training loop of one's own, with the calls that Megatron's users know.

    From construction on, the layers record how they are called; everything runs eagerly. After the first steps
    :meth:`create_cudagraphs` captures them for the order of the schedule, and from then on they replay in that order: a
    forward or backward out of turn raises ``PlanError``, a weight that moved ``StaleAddressError``. Evaluation (grad
    mode or training flags off) stays eager at any time. Nothing of Transformer Engine is needed.

    Each signature (shapes, types, modes) that a layer was seen with before the capture gets graphs, up to
    ``config.max_signatures``. Calls with another one run eagerly and are counted with the reason, or raise
    ``InputMismatchError`` with ``config.on_mismatch='error'``. A layer whose results need no gradient, such as a frozen
    first one, runs eagerly too, and so does one whose earlier result is still held: from then on callers get copies,
    and what they keep for ``config.capture_after`` steps gets its slot replaced by a new capture. A microbatch may skip
    layers.

    Args:
        model: the model, or its chunks on this rank; wrappers are looked into.
        config: what to capture; ``impl`` is ``transformer_engine``.
        seq_length: tokens of a sequence; each layer has to be seen with these sizes, among others.
        micro_batch_size: sequences of a microbatch; checked as well.
        optimizers: accepted; a capture leaves gradients as they are.
        num_microbatches: of a step. Of a single stage with one chunk any number may be run.
        pipeline_size: stages.
        pipeline_rank: of this stage, from 0.
        microbatch_group_size: of an interleaved schedule; by default the number of stages.
        order: in place of the numbers above, as ``_order`` of :func:`graphstep.make_graphed_callables`. Where it has
            entries for weight gradients, each is a call of :meth:`backward_dw`.
        session: owner of the graphs; by default a new one on the device of the first parameter.

    Raises:
        ConfigError: no layer can be captured, sizes or an order that make no schedule, or another ``impl``.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        config: CudaGraphConfig,
        seq_length: int,
        micro_batch_size: int,
        optimizers: Sequence[Any] = (),
        *,
        num_microbatches: int = 1,
        pipeline_size: int = 1,
        pipeline_rank: int = 0,
        microbatch_group_size: int | None = None,
        order: Sequence[float] | None = None,
        session: GraphSession | None = None,
    ) -> None:
        del optimizers
        chunks = _checked_chunks(model, config, {"seq_length": seq_length, "micro_batch_size": micro_batch_size})
        sizes = (num_microbatches, pipeline_size, pipeline_rank, microbatch_group_size)
        if order is not None and sizes != (1, 1, 0, None):
            what = "order says what the numbers of microbatches and stages would, and some were given as well"
            raise ConfigError(Problem("te-order-and-sizes", what, "argument order", "give either order or the numbers"))
        if order is None:
            is_single = pipeline_size == 1 and len(chunks) == 1
            order = pipeline_order(
                1 if is_single else num_microbatches,
                pipeline_size=pipeline_size,
                pipeline_rank=pipeline_rank,
                num_model_chunks=len(chunks),
                microbatch_group_size=microbatch_group_size,
            )
        self.steps = steps_of(order, num_chunks=len(chunks), names="order")
        """The schedule that is captured."""
        self._sizes = micro_batch_size, seq_length
        try:
            self._graphs = OrderedGraphs(chunks, config, session=session)
        except ConfigError as error:
            raise ConfigError([_without_flags(problem) for problem in error.problems]) from None
        self._has_captured = self._is_deleted = False
        self._warn_of_empty_chunks(len(chunks))

    def _warn_of_empty_chunks(self, num_chunks: int) -> None:
        # Of several chunks, the names of layers begin with the number of theirs.
        found = {row.name.partition(".")[0] for row in self._graphs.report().rows}
        empty = [str(n + 1) for n in range(num_chunks) if str(n) not in found]
        if num_chunks > 1 and found and empty:
            what = f"no layer of model chunk {', '.join(empty)} is captured: all of it runs eagerly"
            warnings.warn(what, UserWarning, stacklevel=3)

    @property
    def num_buffer_sets(self) -> tuple[int, ...]:
        """For each chunk, sets of static buffers and graphs: microbatches in flight, however many a step has."""
        return self._graphs.num_slots if self.graphs_created() else ()

    @property
    def is_recorded(self) -> bool:
        """True once every layer that has a backward has run forward and backward, so that graphs can be created."""
        return not self._is_deleted and self._graphs.is_recorded

    def create_cudagraphs(self) -> None:
        """Capture the layers. Does nothing if that has been done.

        Raises:
            LifecycleError: called before a training step, in the middle of one, or after :meth:`delete_cuda_graphs`.
            InputMismatchError: no recorded call of a layer has the sizes that this object was made for.
            CaptureError: names the layer; or no layer has a backward. Nothing is left behind, and this may be called
                again.
        """
        graphs = self._opened("create_cudagraphs")
        if graphs.is_captured:
            return
        if graphs.is_recorded:
            self._check_sizes(graphs)
        graphs.capture(self.steps, self._has_sizes)
        self._has_captured = True

    def _check_sizes(self, graphs: OrderedGraphs) -> None:
        recorded = [variant for variant, _ in graphs.observer.plan.calls] if graphs.observer is not None else []
        fitting = {variant.region for variant in recorded if self._has_sizes(variant)}
        other = {variant.region.name: variant for variant in recorded if variant.region not in fitting}
        if other:
            shapes = {str(tuple(variant.signature.layouts[0].shape)) for variant in other.values()}
            raise InputMismatchError(
                f"called with tensors of shape {', '.join(sorted(shapes))} only, which have not the micro-batch size "
                f"{self._sizes[0]} and the sequence length {self._sizes[1]}",
                where=", ".join(other),
                fix="give TECudaGraphHelper the sizes of the training step",
            )

    def _has_sizes(self, variant: Variant) -> bool:
        layouts = variant.signature.layouts
        shape = layouts[0].shape if layouts else ()
        return len(shape) < 2 or sorted(shape[:2]) == sorted(self._sizes)

    def cuda_graph_set_manual_hooks(self, hook: Callable[[nn.Module], object] | None = None) -> None:
        """Have a function called with every captured module that has parameters, before each replay of its layer.

        For what hooks inside of the captured layers do eagerly, such as gathering weights.

        Args:
            hook: by default the one that the chunk's wrapper makes (``_make_forward_pre_hook``), as Megatron's does;
                without either nothing happens.

        Raises:
            LifecycleError: there are no graphs yet, or no more.
        """
        graphs = self._opened("cuda_graph_set_manual_hooks")
        if not graphs.is_captured:
            raise LifecycleError(
                "there are no graphs to set hooks for",
                where="cuda_graph_set_manual_hooks",
                fix="call create_cudagraphs() first",
            )
        graphs.set_manual_hooks(hook)

    def backward_dw(self, chunk: int = 0) -> None:
        """Accumulate the weight gradients of the next microbatch of a model chunk, last layer first.

        For orders with entries for weight gradients. Backwards of captured layers give the gradients of the inputs
        only then; weights outside of them have theirs from the backward. Before :meth:`create_cudagraphs` and after
        :meth:`delete_cuda_graphs` backwards compute everything, and this does nothing: so it may be called from the
        first step on.

        Args:
            chunk: from 0.

        Raises:
            PlanError: names the turn that was expected and the one that came; or the order has no such entries.
            ConfigError: there is no such chunk.
            LifecycleError: a result of a layer was changed in place, or a parameter got a hook, since its forward; or
                this is called inside of a backward.
            StaleAddressError: a gradient has moved.
        """
        if not any(step.phase is Phase.WEIGHT_GRADIENT for step in self.steps):
            raise PlanError(
                "backwards compute the gradients of the weights as well; they have no turn of their own",
                where="backward_dw",
                fix="leave backward_dw() out, or give order with an entry -n - 0.5 for each backward -n",
            )
        num_chunks = 1 + max(step.chunk for step in self.steps)
        if not is_whole(chunk) or not 0 <= chunk < num_chunks:
            what = f"a model chunk is from 0 and below {num_chunks}, got {chunk!r}"
            raise ConfigError(Problem("te-chunk", what, "argument chunk", "count the chunks from 0"))
        self._graphs.weight_gradients(chunk)

    def capture_finished(self) -> bool:
        """True once :meth:`create_cudagraphs` has succeeded; stays so after :meth:`delete_cuda_graphs`."""
        return self._has_captured

    def graphs_created(self) -> bool:
        """True while there are graphs."""
        return self._graphs.is_captured

    def delete_cuda_graphs(self) -> None:
        """Free the graphs; the layers run eagerly from now on. May be called at any time, and twice.

        What is in flight keeps its backward: memory is free when the last one has run, or its results are gone. Weight
        gradients that wait for their turn are computed here.
        """
        self._is_deleted = True
        self._graphs.delete()

    def report(self) -> CaptureReport:
        """What has been captured, and how it was used; also after :meth:`delete_cuda_graphs`."""
        return self._graphs.report()

    def _opened(self, where: str) -> OrderedGraphs:
        if self._is_deleted:
            raise LifecycleError(
                "delete_cuda_graphs() was called, and the layers record nothing any more",
                where=where,
                fix="make a new TECudaGraphHelper, run a training step, then call create_cudagraphs()",
            )
        return self._graphs


def _checked_chunks(model: Any, config: Any, sizes: Mapping[str, int]) -> list[nn.Module]:
    problems = size_problems(sizes)
    chunks = list(model) if isinstance(model, Iterable) and not isinstance(model, nn.Module) else [model]
    if not chunks:
        problems.append(Problem("te-no-model", "there is no model chunk", "model", "give a module"))
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            what = f"a model chunk is a torch.nn.Module, got a {type(chunk).__name__}"
            problems.append(Problem("te-no-module", what, "model", "give the model, or a list of its chunks"))
    if not isinstance(config, CudaGraphConfig):
        what = f"config is a CudaGraphConfig, got a {type(config).__name__}"
        fix = "give graphstep.config.CudaGraphConfig(impl='transformer_engine')"
        problems.append(Problem("te-config", what, "config", fix))
    raise_if_any(problems)
    return chunks


def _without_flags(problem: Problem) -> Problem:
    """For a loop of one's own, which has no command line."""
    if problem.code != "nothing-to-capture":
        return problem
    fix = problem.fix
    if "attach(" in fix:
        fix = "make them of segments (graphstep.models.SegmentedModule), or use graphstep.make_graphed_callables"
    return replace(problem, where="CudaGraphConfig.modules", fix=fix)


class TransformerEngineGraphs:
    """``transformer_engine`` as a strategy of the training loop: captures after the warmup steps.

    Args:
        forward_backward_func: runs the step, one microbatch after another; called with batches on the session's device.
        model: contains at least one layer that is to be captured.
        session: owner of the graphs.
        config: what to capture and how.

    Raises:
        ConfigError: see :class:`TECudaGraphHelper`.
    """

    def __init__(
        self,
        forward_backward_func: ForwardBackward,
        *,
        model: nn.Module,
        session: GraphSession,
        config: CudaGraphConfig,
    ) -> None:
        self._function, self._model, self._session = forward_backward_func, model, session
        self._num_warmup_steps = config.warmup_steps
        self._num_steps = 0
        steps = steps_of(pipeline_order(1), num_chunks=1)
        self._steps, self._graphs = steps, OrderedGraphs([model], config, session=session)

    @property
    def session(self) -> GraphSession:
        """Owner of the graphs."""
        return self._session

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Run the step: eager code with replays in it. Returns losses [num_microbatches].

        Raises:
            CaptureError: names the layer that cannot be captured.
            InputMismatchError: a layer is called in another way than in the warmup steps, with ``on_mismatch='error'``;
                otherwise such calls run eagerly.
            PlanError: the function runs several microbatches at a time.
            StaleAddressError: a parameter, buffer or gradient has moved since the capture.
            LifecycleError: this object is closed, or a layer took no part in the warmup steps.
        """
        self._session.require_open()
        if not forward_only and self._num_steps >= max(1, self._num_warmup_steps) and not self._graphs.is_captured:
            self._graphs.capture(self._steps)
        if not forward_only and not self._num_steps and not self._num_warmup_steps:
            warnings.warn(
                "--cuda-graph-warmup-steps 0: the first step runs eagerly all the same, because layers are captured "
                "with the arguments of a real call",
                UserWarning,
                stacklevel=2,
            )
        device = self._session.device
        batches = (to_device(batch, device) for batch in islice(data_iterator, num_microbatches))
        losses = self._function(
            data_iterator=batches, model=self._model, num_microbatches=num_microbatches, forward_only=forward_only
        )
        self._num_steps += not forward_only
        return losses

    def end_step(self) -> None:
        """Nothing to do: the next step captures."""

    def report(self) -> CaptureReport:
        """What has been captured so far."""
        return self._graphs.report()

    def close(self) -> None:
        """Put the layers' own ``forward`` back and free the graphs. May be called twice."""
        self._graphs.close()
