"""``graphstep.verify``: steps run both ways, from the same state, and compared in everything that they leave behind."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from graphstep.capture.attributes import Attributes
from graphstep.capture.tree import flatten
from graphstep.config import CudaGraphConfig
from graphstep.engine.poison import leave_dirty_memory, poison, poison_free_memory
from graphstep.errors import ConfigError, Problem
from graphstep.strategies.iteration_refusals import with_children
from graphstep.strategies.manager import attach
from graphstep.strategies.step_parts import StepParts
from graphstep.strategies.step_reads import StepReads
from graphstep.strategies.step_state import StepState
from graphstep.verification.bisect import Bisection, Failure, first_of_rows
from graphstep.verification.compare import Tolerance, Tolerances, same_bits
from graphstep.verification.differences import Rows, fresh, run_step
from graphstep.verification.ranks import num_ranks, on_any_rank
from graphstep.verification.report import Culprit, Part, VerifyReport
from graphstep.verification.state import State, StateCopy, attributes_of, put_back_python
from graphstep.verification.targets import Named, StepFunction, Target, has_own_graphs, target_of

_NUDGE: Final = 1 + 2**-6
"""Weights that no step changes are multiplied by this between steps."""
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def verify(
    target: Any,
    batches: Iterable[Any],
    step: StepFunction | None = None,
    *,
    num_steps: int = 3,
    warmup_calls: int = 8,
    rtol: float = 0.0,
    atol: float = 0.0,
    tolerances: Mapping[str, Tolerance] | None = None,
    poisoned: bool = True,
    bisected: bool = True,
    modules: Sequence[Named] = (),
    optimizers: Sequence[Optimizer] = (),
    config: CudaGraphConfig | None = None,
    regions: Mapping[str, str] | None = None,
) -> VerifyReport:
    """Prove that replays give what eager execution gives, or name the first module where they do not.

    First the target is called until it replays. Then each of ``num_steps`` steps runs by its graphs and eagerly, both
    from the same state and on the same batch, and each step on other inputs and weights than the one before. Compared
    are results, gradients, weights, buffers, state of optimizers, other tensors that the step writes, and generators
    of random numbers. Before each replay static inputs, memory that the graphs use in passing, free memory and the
    workspaces of libraries are overwritten by NaN.

    All state is put back, also when something fails: weights, gradients, buffers, states of optimizers and generators,
    attributes of modules. A target that had no graphs has none afterwards. What had some keeps them, unless a
    difference was looked for inside of modules: then it captures anew when it is used next. No call may be in flight.

    Args:
        target: what ``attach``, ``graph_step``, ``FullCudaGraphWrapper``, ``LocalGraphs`` or ``make_graphed_callables``
            has returned (several callables as a tuple); or a module that nothing has captured, which is attached
            meanwhile.
        batches: at least two different ones; what is given to ``step``. For ``graph_step`` a tuple is its arguments,
            for ``FullCudaGraphWrapper`` and ``LocalGraphs`` a list the microbatches.
        step: runs forward and backward, and more if that is wanted, on a batch, and returns what is to be compared. By
            default the model is called and runs backward from its loss, see :func:`default_step`. Steps of
            ``graph_step``, ``FullCudaGraphWrapper`` and ``LocalGraphs`` are whole by themselves.
        num_steps: steps that are compared.
        warmup_calls: most rounds of calls on all batches in which the target may come to replays.
        rtol: relative part of the tolerance; by default every bit counts.
        atol: absolute part.
        tolerances: path pattern of modules to their own tolerance, such as ``{"layers.*.experts": Tolerance(1e-2)}``:
            for kernels that differ from run to run.
        poisoned: overwrite memory before replays.
        bisected: after a difference, look for the first module; needs further captures.
        modules: path and module of those that run in the step besides those of the target.
        optimizers: those that step besides those that are seen to step.
        config: for a module that nothing has captured: what to capture.
        regions: the same, see ``attach``.

    Returns:
        A report. ``raise_if_different()`` makes an error of it.

    Raises:
        ConfigError: there is nothing to verify, or arguments do not fit.
        CaptureError: the target cannot be captured. Everything else that the target raises passes through.

    Cost: about ``2 * num_steps`` steps and the warmup; copies of the state lie on the host.
    """
    if isinstance(target, nn.Module) and not has_own_graphs(target):
        with attach(target, config, regions=regions) as manager:
            return verify(
                manager,
                batches,
                step,
                num_steps=num_steps,
                warmup_calls=warmup_calls,
                rtol=rtol,
                atol=atol,
                tolerances=tolerances,
                poisoned=poisoned,
                bisected=bisected,
                modules=modules,
                optimizers=optimizers,
            )
    if config is not None or regions is not None:
        what = "config and regions are for a module that nothing has captured"
        raise ConfigError(Problem("verify-config", what, "verify", "leave them out: the target has its own"))
    found = target_of(target, step)
    return Verification(
        found,
        list(islice(batches, max(2, num_steps))),
        num_steps=num_steps,
        warmup_calls=warmup_calls,
        tolerances=Tolerances(Tolerance(rtol, atol), tolerances or {}),
        is_poisoned=poisoned,
        is_bisected=bisected,
        modules=modules,
        optimizers=optimizers,
    ).run()


class Verification:
    """One verification of one target. See :func:`verify` for the arguments."""

    def __init__(
        self,
        target: Target,
        batches: Sequence[Any],
        *,
        num_steps: int,
        warmup_calls: int,
        tolerances: Tolerances,
        is_poisoned: bool = True,
        is_bisected: bool = True,
        modules: Sequence[Named] = (),
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        _check(batches, num_steps, warmup_calls)
        self._target, self._batches = target, batches
        self._num_steps, self._warmup_calls = num_steps, warmup_calls
        self._tolerances = tolerances
        self._is_poisoned, self._is_bisected = is_poisoned, is_bisected
        self._further_modules = list(modules)
        self._optimizers = {id(optimizer): optimizer for optimizer in (*target.optimizers(), *optimizers)}
        self._rows = Rows(tolerances)
        self._notes: list[str] = []
        self._num_replays = self._num_done = 0
        self._eager_calls: Counter[str] = Counter()

    def run(self) -> VerifyReport:
        """Verify, and put everything back."""
        target = self._target
        state = State(self._modules(), target.device, self._optimizers.values(), weights=target.weights())
        had_graphs = target.num_recordings() > 0
        first: Culprit | None = None
        start: StateCopy | None = None
        try:
            with self._python_kept(state):
                start = state.copy()
                try:
                    self._warm_up()
                    failure = self._run_steps(state)
                    if failure is not None and self._is_bisected:
                        first = self._first(failure, state, start)
                finally:
                    if not had_graphs and target.recapture is not None:
                        target.recapture()
        finally:
            if start is not None:
                state.restore(start)
        return VerifyReport(
            target=target.name,
            engine=target.report().engine,
            num_steps=self._num_done,
            num_replays=self._num_replays,
            eager_calls=dict(self._eager_calls),
            rows=self._rows.all(),
            first=first,
            tolerance=str(self._tolerances),
            notes=tuple(self._notes),
        )

    # ----- what there is

    def _modules(self) -> list[Named]:
        """The outermost modules of the step, each once."""
        found: dict[int, Named] = {}
        for path, module in (*self._target.modules(), *self._further_modules):
            found.setdefault(id(module), (path, module))
        return list(found.values())

    def _add_modules(self, modules: Iterable[nn.Module]) -> None:
        """Those that are not known yet, by the names of their classes."""
        known = {id(m) for _, root in self._modules() for m in root.modules()}
        for module in modules:
            if id(module) not in known:
                known.update(map(id, module.modules()))
                self._further_modules.append((type(module).__name__, module))

    @contextlib.contextmanager
    def _python_kept(self, state: State) -> Iterator[None]:
        """Find what the step uses, in a run that is undone, and put back after the body what is no tensor."""
        kept: list[StepState] = []

        def keep(optimizer: Optimizer) -> None:
            if id(optimizer) not in self._optimizers:
                self._optimizers[id(optimizer)] = optimizer
                kept.append(StepState(Attributes([]), [], [optimizer], []))

        found = StepReads()
        if self._target.function is not None:
            found.add_function(self._target.function)
        self._add_modules(found.modules.values())
        named = with_children(self._modules())
        flags, steppers = [module for _, module in named], list(self._optimizers.values())
        kept.append(StepState(attributes_of(named), flags, steppers, found.places))
        try:
            parts = StepParts([module for _, module in named] or [nn.Identity()])
            with parts.watching(keep):
                state.set_modules(self._modules())
                state.learn(lambda: self._target.eager(fresh(self._batches[0])), self._modules)
            put_back_python(kept, flags)
            state.optimizers = list(self._optimizers.values())
            yield
        finally:
            put_back_python(kept, flags)

    # ----- steps

    def _warm_up(self) -> None:
        """Call the target on all batches in turn, until a whole round is nothing but replays."""
        target = self._target
        for _ in range(self._warmup_calls):
            is_ready = True
            for batch in self._batches:
                before = target.num_recordings(), target.num_replays()
                target.graphed(fresh(batch))
                is_ready &= target.num_recordings() == before[0] > 0 and target.num_replays() > before[1]
            if not on_any_rank(not is_ready, target.device):
                return
        self._notes.append(f"after {self._warmup_calls} rounds of calls the target still captures, or does not replay")

    def _run_steps(self, state: State) -> Failure | None:
        """Run the steps both ways; returns the first one that differs."""
        target = self._target
        for number in range(1, self._num_steps + 1):
            batch = self._batches[(number - 1) % len(self._batches)]
            before = state.copy()
            replays, eager_calls = target.num_replays(), target.eager_calls()
            self._poison()
            replayed = run_step(target.graphed, batch)
            self._num_replays += target.num_replays() - replays
            self._eager_calls += target.eager_calls() - eager_calls
            after_replay = state.copy()
            state.restore(before)
            eager = run_step(target.eager, batch)
            after_eager = state.copy()
            self._num_done = number
            self._rows.add(number, eager, replayed, after_eager, after_replay)
            if on_any_rank(bool(self._rows.different()), target.device):
                if not self._rows.different():
                    self._rows.note_other_rank(number)
                return Failure(batch, before, self._rows.different())
            self._move_weights(state, before, after_eager)
        return None

    def _poison(self) -> None:
        if not self._is_poisoned:
            return
        for session in self._target.sessions():
            poison(session.static_tensors())
            poison_free_memory(session.engine)
            leave_dirty_memory(session.engine)
            # Inputs from the host are copied beside other work: not before this is done.
            session.engine.synchronize()

    def _move_weights(self, state: State, before: StateCopy, after: StateCopy) -> None:
        """Where the step leaves all weights as they are, change them: what was derived from them must follow."""
        weights = [(key, t) for key, t in before.tensors.items() if key.part is Part.WEIGHT]
        if any(not same_bits(tensor, after.tensors[key]) for key, tensor in weights):
            return
        with torch.no_grad():
            for _, _, parameter in state.parameters():
                if parameter.dtype in _FLOATS:
                    parameter.mul_(_NUDGE)

    def _first(self, failure: Failure, state: State, start: StateCopy) -> Culprit | None:
        """The first module that differs; of a job of several ranks, what the rows tell."""
        if num_ranks() > 1:
            self._notes.append("modules are not looked into: other ranks may look for another one")
            return first_of_rows(failure.rows, state)
        return Bisection(
            target=self._target,
            state=state,
            modules=self._modules,
            start=start,
            warm_up=self._warm_up,
            prepare=self._poison,
            tolerances=self._tolerances,
        ).find(failure)


def _check(batches: Sequence[Any], num_steps: int, warmup_calls: int) -> None:
    problems = []
    for name, number in (("num_steps", num_steps), ("warmup_calls", warmup_calls)):
        if number < 1:
            problems.append(Problem("verify-number", f"{name} is {number}", "verify", "use 1 or more"))
    if len(batches) < 2 or not any(map(_differ, batches, batches[1:])):
        what = f"{len(batches)} batches were given, and no two neighbours of them differ"
        fix = "give two batches or more with other values: on the inputs of the capture a replay proves little"
        problems.append(Problem("verify-batches", what, "verify(batches=...)", fix))
    if problems:
        raise ConfigError(problems)


def _differ(left: Any, right: Any) -> bool:
    tensors, structures = zip(*(flatten(value) for value in (left, right)), strict=True)
    if structures[0] != structures[1]:
        return True
    return any(not same_bits(*(t.detach().cpu() for t in pair)) for pair in zip(*tensors, strict=True))
