"""Shadow of whole steps: now and then one of them runs eagerly as well, from the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from graphstep.strategies.iteration_refusals import with_children
from graphstep.strategies.step_state import StepState
from graphstep.verification.bisect import first_of_rows
from graphstep.verification.compare import Tolerances
from graphstep.verification.differences import Rows, fresh, result_tensors, run_step
from graphstep.verification.report import VerifyReport
from graphstep.verification.state import State, attributes_of, put_back_python
from graphstep.verification.targets import Target

P = ParamSpec("P")
R = TypeVar("R")


class StepShadow:
    """Runs steps by their graphs, and some of them eagerly as well; what counts is what the graphs have done.

    Args:
        target: the step, both ways.
        interval: compare every so many steps; 0: those that :meth:`arm` names.
        on_report: is given what each comparison has found.
        tolerances: how far replays may be from eager.

    Cost: of a compared step, an eager one, and copies of the whole state on the host; of any other, nothing to speak
    of. Before the first comparison one more eager step shows what is written, and is undone.
    """

    def __init__(
        self, target: Target, *, interval: int, on_report: Callable[[VerifyReport], None], tolerances: Tolerances
    ) -> None:
        self._target, self._interval = target, interval
        self._on_report, self._tolerances = on_report, tolerances
        self._state: State | None = None
        self._num_steps = 0
        self._is_armed = False

    def arm(self) -> None:
        """Compare the next step."""
        self._is_armed = True

    def run(self, batch: Any) -> Any:
        """Run a step by its graphs; returns its result."""
        target = self._target
        self._num_steps += 1
        self._is_armed |= self._interval > 0 and self._num_steps % self._interval == 0
        if not self._is_armed or not target.num_recordings():
            return target.graphed(batch)
        self._is_armed = False
        state = self._state = self._learnt(batch) if self._state is None else self._state
        before, replays, eager_calls = state.copy(), target.num_replays(), target.eager_calls()
        result = target.graphed(batch)
        num_replays, eager_calls = target.num_replays() - replays, target.eager_calls() - eager_calls
        replayed, after = result_tensors(result), state.copy()
        python = self._python(state)
        try:
            state.restore(before)
            eager, after_eager = run_step(target.eager, batch), state.copy()
        finally:
            put_back_python([python], [module for _, module in state.modules])
            state.restore(after)
        rows = Rows(self._tolerances)
        rows.add(1, eager, replayed, after_eager, after)
        self._on_report(
            VerifyReport(
                target=f"step {self._num_steps} of {target.name}",
                engine=target.report().engine,
                num_steps=1,
                num_replays=num_replays,
                eager_calls=dict(eager_calls),
                rows=rows.all(),
                first=first_of_rows(rows.different(), state),
                tolerance=str(self._tolerances),
            )
        )
        return result

    def _learnt(self, batch: Any) -> State:
        target = self._target
        state = State(target.modules(), target.device, target.optimizers(), weights=target.weights())
        python = self._python(state)
        try:
            state.learn(lambda: target.eager(fresh(batch)), target.modules)
        finally:
            put_back_python([python], [module for _, module in state.modules])
        return state

    def _python(self, state: State) -> StepState:
        named = with_children(self._target.modules())
        return StepState(attributes_of(named), [module for _, module in named], state.optimizers, [])


class ShadowedStep(Generic[P, R]):
    """A step some of whose calls run eagerly as well. Same arguments and results as the step."""

    def __init__(self, run: Callable[P, R], shadow: StepShadow) -> None:
        self._run, self._shadow = run, shadow

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step."""
        return self._run(*args, **kwargs)

    def arm(self) -> None:
        """Compare the next call."""
        self._shadow.arm()
