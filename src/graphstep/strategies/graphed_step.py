"""``graph_step``: any function of a batch as one graph launch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import MethodType
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from graphstep.capture.places import Place
from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.static_inputs import copies_of, to_device
from graphstep.capture.tree import flatten, values_of
from graphstep.config.switches import CapturePolicy, MismatchPolicy
from graphstep.errors import ConfigError, Problem
from graphstep.strategies.iteration_graphs import LANE, IterationGraphs
from graphstep.strategies.iteration_state import Step
from graphstep.strategies.optimizers_inside import OptimizersInside
from graphstep.strategies.step_options import checked
from graphstep.strategies.step_parts import StepParts
from graphstep.strategies.step_reads import StepReads

P = ParamSpec("P")
R = TypeVar("R")


class GraphedStep(Generic[P, R]):
    """A function that runs eagerly for its first calls and as one graph launch from then on. See :func:`graph_step`."""

    launches_graphs: Final = True
    """Not to be used inside of another captured step."""

    def __init__(
        self,
        step_fn: Callable[P, R],
        *,
        modules: Iterable[nn.Module] = (),
        optimizers: Iterable[Optimizer] = (),
        cuda_graph_warmup_steps: int = 3,
        policy: CapturePolicy | str = CapturePolicy.required,
        on_mismatch: MismatchPolicy | str = MismatchPolicy.recapture,
        max_graphs: int = 16,
        gather_gradients: bool = False,
        parallel_gradients: bool = False,
        session: GraphSession | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "modules": (modules := tuple(modules)),
            "optimizers": (optimizers := tuple(optimizers)),
            "cuda_graph_warmup_steps": cuda_graph_warmup_steps,
            "policy": policy,
            "on_mismatch": on_mismatch,
            "max_graphs": max_graphs,
            "gather_gradients": gather_gradients,
            "parallel_gradients": parallel_gradients,
            "session": session,
        }
        policy, on_mismatch = checked(
            "graph_step",
            warmup_steps=cuda_graph_warmup_steps,
            least_warmup=2,
            max_graphs=max_graphs,
            policy=policy,
            on_mismatch=on_mismatch,
        )
        functools.update_wrapper(self, step_fn)
        self._function = step_fn
        self._parts = StepParts(modules, optimizers)
        self._name = self._attribute = getattr(step_fn, "__name__", type(step_fn).__name__)
        self.session = session if session is not None else GraphSession(_device_of(modules))
        self._is_own = session is None
        # The first call of all has to show what there is; it counts as one of the warmup.
        self._graphs = IterationGraphs(
            self.session,
            warmup_steps=max(1, cuda_graph_warmup_steps - 1),
            max_graphs=max_graphs,
            policy=policy,
            on_mismatch=on_mismatch,
            gather_gradients=gather_gradients,
            parallel_gradients=parallel_gradients,
        )
        self._policy = policy
        self._step: Step | None = None
        self._num_parts = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step. Results may be kept: later calls do not change them.

        Raises:
            CaptureError: the step cannot be captured; it has run eagerly up to the call before this one.
            StaleAddressError: a parameter or buffer has moved since the capture.
            InputMismatchError: ``on_mismatch`` is ``error``, and the arguments differ from all that were captured.
            LifecycleError: the step is closed.
        """
        batch = (args, kwargs)
        self.session.require_open()
        if self._step is None:
            self.session.stats(self._name, "iteration").eager_calls["warmup"] += 1
            args, kwargs = to_device(batch, self.session.device)  # As graphs have it.
            with self.session.engine.capture_stream(), ExitStack() as rates:

                def put_rates(optimizer: Optimizer) -> None:
                    if self._policy is not CapturePolicy.off:
                        rates.enter_context(OptimizersInside([optimizer], self.session.device).on_device())

                def run() -> R:
                    with self._parts.watching(put_rates):
                        return self._function(*args, **kwargs)

                if torch.is_grad_enabled():
                    result = run()
                else:
                    result = self.session.engine.run_on_pool(run, lane=LANE, copied=copies_of)
            self._reads(batch)
            self._step = self._described()
            return result
        if len(self._parts) != self._num_parts:
            self._step = self._described()
        replayed: R = self._graphs.run(self._step, batch)
        return replayed

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> GraphedStep[..., R]: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        """Where a method was decorated: a step for each instance, kept with its attributes.

        Raises:
            ConfigError: the instance has no place for it.
        """
        if instance is None:
            return self
        if inspect.getattr_static(type(instance), self._attribute, None) is not self:
            return MethodType(self._function, instance)  # super() asks, from a step that is graphed itself or is not.
        own = getattr(instance, "__dict__", None)
        if not isinstance(own, dict):
            what = (
                f"{owner.__name__}.{self._name} is graphed, and instances of the class have no __dict__ to keep it in"
            )
            fix = f"leave out __slots__, or wrap the method of an instance: graph_step(instance.{self._name})"
            raise ConfigError(Problem("graphed-method", what, "graph_step", fix))
        # This is found by its own name from now on, before the one of the class.
        step = own[self._attribute] = GraphedStep(MethodType(self._function, instance), **self._options)
        return step

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    @property
    def function(self) -> Callable[P, R]:
        """What is captured."""
        return self._function

    @property
    def modules(self) -> tuple[tuple[str, nn.Module], ...]:
        """Name and module of the outermost modules that are known to run in the step."""
        return self._parts.modules()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those that are known to step in it."""
        return self._parts.optimizers

    def eager(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function as it is, on the stream of the graphs; nothing is counted or captured."""
        self.session.require_open()
        found: R = self._graphs.eager(self._described(), (args, kwargs))
        return found

    def report(self) -> CaptureReport:
        """What has been captured so far."""
        return self.session.report()

    def reset_cuda_graph(self) -> None:
        """Drop the graphs; they warm up and are captured again when the step is called."""
        self._graphs.reset([self._name])

    def close(self) -> None:
        """Free the graphs, and close the session if it was made here. May be called twice."""
        if self._is_own:
            self._graphs.close()
        elif not self.session.is_closed:
            self._graphs.reset([self._name])

    def _described(self) -> Step:
        self._num_parts = len(self._parts)
        return Step(
            stage=self._name,
            kind="iteration",
            function=self._run,
            modules=self._parts.modules(),
            optimizers=OptimizersInside(self._parts.optimizers, self.session.device),
            reads=self._reads,
        )

    def _reads(self, batch: Any) -> list[Place]:
        """What the function reads besides tensors of the batch; modules among it are watched from now on."""
        found = StepReads()
        found.add_function(self._function)
        found.add_values(values_of(flatten(batch)[1]))
        found.add_modules(module for _, module in self._parts.modules())
        found.add_optimizers(self._parts.optimizers)
        self._parts.add_modules(found.modules.values())
        return found.places

    def _run(self, batch: tuple[Any, Any]) -> R:
        args, kwargs = batch
        if self.session.engine.is_capturing:
            return self._function(*args, **kwargs)
        with self._parts.watching():
            return self._function(*args, **kwargs)


@overload
def graph_step(step_fn: Callable[P, R], **options: Any) -> GraphedStep[P, R]: ...
@overload
def graph_step(step_fn: None = None, **options: Any) -> Callable[[Callable[P, R]], GraphedStep[P, R]]: ...
def graph_step(step_fn: Callable[P, R] | None = None, **options: Any) -> Any:
    """Make one graph of a whole training step: forward, backward, clipping, optimizer.

    Wraps a function, or decorates it, with or without options::

        @graphstep.graph_step
        def step(batch):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            return loss

    The first calls run eagerly and are real steps. Then there is one graph for each signature of the arguments:
    shapes, layouts, non-tensor values, training flags, grad and autocast modes. Modules and optimizers are found while
    the step runs; what is under ``torch.compile`` runs as it was written meanwhile, unless ``modules`` are named, and
    its compiled kernels are in the graph. Learning rates, and weight decays of torch's optimizers, are read from
    ``param_groups`` before each replay, so schedulers work, outside the step; when another number changes, the step is
    captured anew. Optimizers in the step need ``fused=True`` or ``capturable=True``, as they must not read anything
    back.

    The graph makes its gradients where ``zero_grad()`` in the step would have them made anew. They are ``.grad`` after
    the call, until the next one; what is kept longer gets memory of its own.

    A replay runs no Python of the function. Variables that its code names, and attributes of objects that it reads or
    is given, are compared before each replay; when one has changed, the step is captured anew. What is to change often
    is given in a tensor on the device.

    Args:
        step_fn: takes tensors, and values that are compared, in any nesting; returns tensors in any nesting.
        modules: all that run in the step, if they are not to be looked for.
        optimizers: besides those that are seen to step.
        cuda_graph_warmup_steps: eager calls before the capture, at least 2: what a step does with gradients is seen in
            its second call.
        policy: ``required``, ``auto`` (what cannot be captured runs eagerly, with a warning and the reason in the
            report) or ``off``.
        on_mismatch: ``recapture``, ``eager`` or ``error`` when arguments differ from those that were captured.
        max_graphs: most signatures that are kept; a further one takes the place of the one used longest ago.
        gather_gradients: gradients that the step adds to, and does not make anew, are added many at a time, see
            :class:`FullCudaGraphWrapper`.
        parallel_gradients: gradients are computed, added and zeroed on a branch of the graph, and fused optimizers step
            side by side, see :class:`FullCudaGraphWrapper`.
        session: owner of the graphs; by default a new one, on the device of the modules, else the current GPU if there
            is one, else the CPU.

    Returns:
        A :class:`GraphedStep`, or a decorator that makes one.

    Raises:
        ConfigError: a number or policy that there is not.
    """
    if step_fn is None:
        return functools.partial(graph_step, **options)
    return GraphedStep(step_fn, **options)


def _device_of(modules: Iterable[nn.Module]) -> torch.device:
    for module in modules:
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
