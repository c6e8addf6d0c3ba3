"""The first module in which a replay departs from eager execution, found level by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor, nn

from graphstep.errors import CaptureError
from graphstep.verification.compare import Difference, Tolerances, difference
from graphstep.verification.differences import fresh
from graphstep.verification.draws import draws_of, first_other_draw
from graphstep.verification.report import Culprit, Part, Row
from graphstep.verification.state import State, StateCopy
from graphstep.verification.taps import Event, Place, Side, Taps, children_of, distinct
from graphstep.verification.targets import Named, Target

_NUM_TRIES: Final = 4
"""Runs both ways before a level counts as equal: what Python counts may be as at the capture by chance."""
_HOW: Final[Mapping[Side, str]] = {
    Side.ARGUMENT: "what it gives to a module inside of it differs, while all before is equal",
    Side.RESULT: "its result differs, while its arguments and all modules before are equal",
    Side.RESULT_GRADIENT: "the gradient that it gives to a module inside of it differs, while all before is equal",
    Side.ARGUMENT_GRADIENT: "the gradient of its argument differs, while that of its result is equal",
}
_VANISHES: Final = (
    "watched inside, the difference is gone: it depends on how memory is laid out, "
    "or on what Python keeps between calls"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A step whose replay differed."""

    batch: Any
    before: StateCopy
    """State at its start."""
    rows: Sequence[Row]
    """Those that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Finds the first module that differs in a step.

    Where the target can capture anew, its graphs are dropped, before and after.
    """

    target: Target
    state: State
    modules: Callable[[], Sequence[Named]]
    """The outermost modules of the step."""
    start: StateCopy
    """State before the capture that led to the failure: captures start there again."""
    warm_up: Callable[[], None]
    """Runs steps until the target replays."""
    prepare: Callable[[], None]
    """Runs before each replay."""
    tolerances: Tolerances

    def find(self, failure: Failure) -> Culprit | None:
        """The first module that differs, or what the rows tell if that is all there is; ``None`` without rows."""
        parts = {row.part for row in failure.rows}
        if Part.RANDOM in parts and (found := self._other_draws(failure)) is not None:
            return found
        if parts & {Part.FORWARD, Part.GRADIENT, Part.WEIGHT, Part.OPTIMIZER}:
            try:
                found = self._descend(failure)
            except CaptureError as error:
                row = first_of_rows(failure.rows, self.state)
                how = f"modules were not looked into, as they cannot be captured with taps: {error.what}"
                return None if row is None else replace(row, how=how)
            finally:
                if self.target.recapture is not None:
                    self.target.recapture()
            if found is not None and found.part is Part.FORWARD:
                # A module with other random numbers than at the capture, though the graph draws as many in all.
                cause = self._other_draws(failure)
                return cause if cause is not None and cause.module == found.module else found
            if found is not None:
                return found
        return first_of_rows(failure.rows, self.state)

    # ----- taps

    def _descend(self, failure: Failure) -> Culprit | None:
        """Go down from the outermost modules to the one whose own code it is."""
        culprit: Culprit | None = None
        current: Named | None = None
        untapped = self.target.untapped()
        while inside := children_of(*current, untapped) if current is not None else list(self.modules()):
            level = distinct([current, *inside] if current is not None else inside)
            found = self._first_difference(failure, level)
            if found is None and culprit is not None:
                return replace(culprit, how=_VANISHES)
            if found is None:
                # No gradient on the way to this level differs: one inside of a module may.
                current = self._with_other_gradient(failure, inside)
                if current is None or self.target.recapture is None:
                    return None
                continue
            place, what = found
            is_inside = current is None or place.module != current[0]
            if not is_inside or place.side in (Side.ARGUMENT, Side.RESULT_GRADIENT):
                here = "" if current is None else _own_name(*current)
                return Culprit(here, place.side.part, what, _HOW[place.side])
            current = next((path, module) for path, module in level if path == place.module)
            culprit = Culprit(_own_name(*current), place.side.part, what, _HOW[place.side])
            if self.target.recapture is None:
                break  # Nothing can be laid inside of its graphs.
        return culprit

    def _with_other_gradient(self, failure: Failure, modules: Sequence[Named]) -> Named | None:
        """The one that has the parameter whose gradient is the first to differ."""
        parts = (Part.GRADIENT, Part.OPTIMIZER, Part.WEIGHT)
        row = next((row for part in parts if (row := _first_row(failure.rows, part, self.state)) is not None), None)
        if row is None:
            return None
        owner = dict(self.state.modules).get(row.module)
        return next((each for each in modules if any(m is owner for m in each[1].modules())), None)

    def _first_difference(self, failure: Failure, level: Sequence[Named]) -> tuple[Place, Difference] | None:
        taps, target, state = self._taps(failure, level), self.target, self.state
        with taps.installed():
            taps.allocate(target.device)
            if target.recapture is not None:
                state.restore(self.start)
                target.recapture()
                self.warm_up()
            for _ in range(_NUM_TRIES):
                # The replay first, as in the step that failed: an eager run renews what Python derives from weights.
                taps.restart()
                state.restore(failure.before)
                self.prepare()
                target.graphed(fresh(failure.batch))
                replayed = taps.seen()
                taps.restart()
                state.restore(failure.before)
                target.eager(fresh(failure.batch))
                found = self._compare(list(taps.events), taps.seen(), replayed)
                if found is not None:
                    return found
        return None

    def _taps(self, failure: Failure, level: Sequence[Named]) -> Taps:
        """Taps that have seen an eager run, and so know how much comes by."""
        taps = Taps(level)
        self.state.restore(failure.before)
        try:
            with taps.installed():
                self.target.eager(fresh(failure.batch))
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            # A module writes into its argument, which autograd does not allow for an alias of this kind.
            taps = Taps(level, keeps_tensors=True)
            self.state.restore(failure.before)
            with taps.installed():
                self.target.eager(fresh(failure.batch))
        return taps

    def _compare(
        self, events: Sequence[Event], eager: Mapping[Place, Tensor], replayed: Mapping[Place, Tensor]
    ) -> tuple[Place, Difference] | None:
        # Python may have called modules otherwise when the taps were laid, and computes some again that a graph does
        # not: that much is left out.
        known = [
            (place, number)
            for place, number in events
            if all(place in seen and number < len(seen[place]) for seen in (eager, replayed))
        ]
        for place, number in known:
            tolerance = self.tolerances.of(place.module)
            name = place.tensor if place.side.part is Part.FORWARD else f"gradient of {place.tensor}"
            name = name if len(eager[place]) == 1 else f"{name} (call {number + 1})"
            found = difference(name, eager[place][number], replayed[place][number], tolerance)
            if found is None or found.is_within:
                continue
            return place, found
        return None

    # ----- without taps

    def _other_draws(self, failure: Failure) -> Culprit | None:
        """The module that draws another number of random numbers from one eager call to the next."""
        traces = []
        for _ in range(_NUM_TRIES):
            self.state.restore(failure.before)
            traces.append(draws_of(lambda: self.target.eager(fresh(failure.batch)), self.state.modules))
        module = first_other_draw(traces)
        row = next((row for row in failure.rows if row.part is Part.RANDOM), failure.rows[0])
        if module is None or row.difference is None:
            return None
        return Culprit(module, Part.RANDOM, row.difference, "it does not draw the same in each eager call")


def first_of_rows(rows: Sequence[Row], state: State) -> Culprit | None:
    """What rows that differ tell by themselves, where no result and no gradient on the way tells more."""
    for part in (Part.FORWARD, Part.BUFFER, Part.OTHER, Part.GRADIENT, Part.OPTIMIZER, Part.WEIGHT, Part.RANDOM):
        row = _first_row(rows, part, state)
        if row is not None and row.difference is not None:
            how = "after the step" if part is not Part.GRADIENT else "nothing else differs on the way to it"
            return Culprit(row.module, part, row.difference, how)
    return None


def _first_row(rows: Sequence[Row], part: Part, state: State) -> Row | None:
    """Of one part, that of the module which comes first: in a backward, the last one of the model."""
    places = {path: place for place, (path, _) in enumerate(state.modules)}
    found = [row for row in rows if row.part is part]
    is_backward = part in (Part.GRADIENT, Part.OPTIMIZER, Part.WEIGHT)
    return (max if is_backward else min)(found, key=lambda row: places.get(row.module, -1), default=None)


def _own_name(path: str, module: nn.Module) -> str:
    """How a module is called: a model by itself has no path."""
    return path or type(module).__name__
