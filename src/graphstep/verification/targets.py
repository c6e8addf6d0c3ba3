"""What can be verified: one step, run by graphs or as it is, whatever has captured it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.capture.report import CaptureReport
from graphstep.capture.session import GraphSession
from graphstep.capture.static_inputs import to_device
from graphstep.capture.tree import flatten
from graphstep.errors import ConfigError, Problem
from graphstep.strategies.callable_graphs import CallableGraphs
from graphstep.strategies.full_iteration import FullCudaGraphWrapper
from graphstep.strategies.graphed_step import GraphedStep
from graphstep.strategies.local import LocalGraphs
from graphstep.strategies.local_forward import InstalledForward, has_graphs
from graphstep.strategies.manager import CudaGraphManager

Named = tuple[str, nn.Module]
StepFunction = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Two ways to run a step on a batch, and what belongs to them."""

    name: str
    graphed: StepFunction
    """Runs the step by graphs, or what leads to them: warmup and capture come with the first calls."""
    eager: StepFunction
    """Runs the step as it is."""
    device: torch.device
    report: Callable[[], CaptureReport]
    """What has been captured."""
    sessions: Callable[[], Sequence[GraphSession]]
    """Owners of the graphs."""
    modules: Callable[[], Sequence[Named]]
    """The outermost modules, as far as they are known."""
    optimizers: Callable[[], Sequence[Optimizer]] = tuple
    weights: Callable[[], Mapping[str, Tensor]] = dict
    """Further weights by the paths of the parameters that they belong to, such as copies in fp32."""
    function: Callable[..., Any] | None = None
    """Its code tells which modules, optimizers and schedulers it uses."""
    untapped: Callable[[], Collection[nn.Module]] = tuple
    """Modules that must not have hooks: those whose forward is run in parts."""
    recapture: Callable[[], None] | None = None
    """Drops the graphs, so that the next calls capture anew; ``None`` where they cannot."""

    def num_replays(self) -> int:
        """Replays so far."""
        return sum(row.num_replays for row in self.report().rows)

    def num_recordings(self) -> int:
        """Recordings that exist."""
        return self.report().num_recordings

    def eager_calls(self) -> Counter[str]:
        """Calls so far that ran eagerly on the side of the graphs, by reason."""
        found: Counter[str] = Counter()
        for row in self.report().rows:
            found.update({str(reason): count for reason, count in row.eager_calls.items()})
        return found


def target_of(given: Any, step: StepFunction | None) -> Target:
    """The target for what :func:`graphstep.verify` was given.

    Raises:
        ConfigError: it is nothing that has graphs, or a step function is missing or has no use.
    """
    if isinstance(given, GraphedStep | FullCudaGraphWrapper | LocalGraphs):
        if step is not None:
            what = f"{type(given).__name__} is a whole step by itself, and a step function was given as well"
            raise ConfigError(Problem("verify-step", what, "verify(step=...)", "leave step out"))
        if isinstance(given, LocalGraphs):
            return _of_local(given)
        return _of_step(given) if isinstance(given, GraphedStep) else _of_iteration(given)
    if isinstance(given, CudaGraphManager):
        return _of_manager(given, step or default_step(given.model))
    return _of_callables(given, step)


def default_step(model: Callable[..., Any]) -> StepFunction:
    """Call a model on a batch, and run backward from its loss.

    A batch that is a mapping gives keyword arguments, a tuple or list positional ones, anything else is the only
    argument. The loss is ``loss`` of the result or in it, else the first result with a gradient: itself if it is a
    number, else its mean square.
    """

    def step(batch: Any) -> Any:
        if isinstance(batch, Mapping):
            result = model(**batch)
        else:
            result = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        loss = _loss_of(result)
        if loss is not None:
            loss.backward()
        return result

    return step


def _loss_of(result: Any) -> Tensor | None:
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(named, Tensor):
        return named if named.requires_grad else None
    found = next((tensor for tensor in flatten(result)[0] if tensor.requires_grad), None)
    if found is None:
        return None
    return found if found.numel() == 1 else found.float().square().mean()


def _of_manager(manager: CudaGraphManager, step: Callable[..., Any]) -> Target:
    def graphed(batch: Any) -> Any:
        result = step(batch)
        manager.end_step()
        return result

    def eager(batch: Any) -> Any:
        with manager.eagerly():
            return step(batch)

    return Target(
        name=f"{type(manager.model).__name__}, captured by {type(manager).__name__}",
        graphed=graphed,
        eager=eager,
        device=manager.session.device,
        report=manager.report,
        sessions=lambda: [manager.session],
        modules=lambda: [("", manager.model)],
        function=step,
        untapped=manager.modules_in_parts,
        recapture=manager.reset_cuda_graph,
    )


def _of_step(step: GraphedStep[..., Any]) -> Target:
    def arguments(batch: Any) -> tuple[Any, ...]:
        return batch if isinstance(batch, tuple) else (batch,)

    return Target(
        name=f"{getattr(step, '__name__', 'step')}, captured by graph_step",
        graphed=lambda batch: step(*arguments(batch)),
        eager=lambda batch: step.eager(*arguments(batch)),
        device=step.session.device,
        report=step.report,
        sessions=lambda: [step.session],
        modules=lambda: _single_without_name(step.modules),
        optimizers=lambda: step.optimizers,
        function=step.function,
        recapture=step.reset_cuda_graph,
    )


def _of_local(strategy: LocalGraphs) -> Target:
    manager = strategy.manager

    def graphed(batch: Any) -> Any:
        given = _microbatches(batch)
        losses = strategy.forward_backward(data_iterator=iter(given), num_microbatches=len(given))
        strategy.end_step()
        return losses

    def eager(batch: Any) -> Any:
        given = _microbatches(to_device(batch, strategy.session.device))
        with manager.eagerly():
            return strategy.function(data_iterator=iter(given), model=manager.model, num_microbatches=len(given))

    found = _of_manager(manager, strategy.function)
    name = f"{type(manager.model).__name__}, captured by LocalGraphs"
    return replace(found, name=name, graphed=graphed, eager=eager)


def _of_iteration(wrapper: FullCudaGraphWrapper) -> Target:
    def graphed(batch: Any) -> Any:
        given = _microbatches(batch)
        return wrapper(data_iterator=iter(given), num_microbatches=len(given))

    return Target(
        name=f"{type(wrapper.model).__name__}, captured by FullCudaGraphWrapper",
        graphed=graphed,
        eager=lambda batch: wrapper.eager(_microbatches(batch)),
        device=wrapper.session.device,
        report=wrapper.report,
        sessions=lambda: [wrapper.session],
        modules=lambda: [("", wrapper.model)],
        optimizers=lambda: wrapper.optimizers,
        function=wrapper.function,
        recapture=wrapper.reset_cuda_graph,
    )


def _of_callables(given: Any, step: StepFunction | None) -> Target:
    """For what ``make_graphed_callables`` returns: one callable or module, or a tuple or list of them."""
    members = list(given) if isinstance(given, tuple | list) else [given]
    owners: dict[int, CallableGraphs] = {}
    modules: dict[int, Named] = {}
    for member in members:
        graphs = graphs_of(member)
        owners[id(graphs)] = graphs
        for path, module in graphs.roots():
            modules.setdefault(id(module), (path, module))
    if len(owners) != 1:
        what = f"the callables come from {len(owners)} calls of make_graphed_callables"
        raise ConfigError(Problem("verify-target", what, "verify", "verify those of one call at a time"))
    if step is None and len(members) > 1:
        what = f"{len(members)} callables were given, and nothing says how a step calls them"
        raise ConfigError(
            Problem("verify-step", what, "verify(step=...)", "give a function that runs a step on a batch")
        )
    (graphs,) = owners.values()
    run = step if step is not None else default_step(members[0])

    def eager(batch: Any) -> Any:
        with graphs.eagerly():
            return run(batch)

    return Target(
        name=f"{_count(len(members), 'callable')} of make_graphed_callables",
        graphed=run,
        eager=eager,
        device=graphs.session.device,
        report=graphs.report,
        sessions=lambda: [graphs.session],
        modules=lambda: list(modules.values()),
        function=step,
    )


def _microbatches(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, list | tuple) else [batch]


def graphs_of(member: Any) -> CallableGraphs:
    """The graphs of a callable or module that ``make_graphed_callables`` has captured.

    Raises:
        ConfigError: it has none.
    """
    graphed = member.__dict__.get("forward") if isinstance(member, nn.Module) and has_graphs(member) else member
    graphs = getattr(graphed, "graphs", None)
    if not isinstance(graphs, CallableGraphs):
        raise ConfigError(_unknown(member))
    return graphs


def has_own_graphs(module: nn.Module) -> bool:
    """True for a module or parent of one that something has captured already."""
    return any(map(has_graphs, module.modules()))


def _single_without_name(modules: Sequence[Named]) -> Sequence[Named]:
    """Paths begin in the model where there is but one."""
    return modules if len(modules) != 1 else [("", modules[0][1])]


def _unknown(given: Any) -> Problem:
    what = f"{type(given).__name__} has no graphs that can be verified"
    fix = (
        "give what attach, graph_step, FullCudaGraphWrapper or make_graphed_callables has returned, or a module that "
        "nothing has captured"
    )
    installed = given.__dict__.get("forward") if isinstance(given, nn.Module) else None
    if isinstance(installed, InstalledForward):
        what, fix = "the module was captured by a manager", "give the manager, which attach has returned"
    return Problem("verify-target", what, "verify", fix)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
