"""What a captured step is made of, and the state of one key of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from graphstep.capture.attributes import Attributes
from graphstep.capture.manifest import Watched
from graphstep.capture.observe import Observation
from graphstep.capture.places import Place
from graphstep.capture.static_inputs import StaticInputs
from graphstep.capture.tree import Node, Value
from graphstep.engine import Recording
from graphstep.errors import CaptureError
from graphstep.strategies.iteration_gradients import StepGradients
from graphstep.strategies.iteration_refusals import Named
from graphstep.strategies.optimizers_inside import OptimizersInside


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is captured, and what it consists of."""

    stage: str
    """Its row in the report. Graphs of one stage are those of one function."""
    kind: str
    function: Callable[[Any], Any]
    """Takes the batch, on the session's device; returns any nesting of tensors."""
    modules: Sequence[Named]
    """The modules that run in it, outermost ones only."""
    optimizers: OptimizersInside
    """Those that step in it."""
    fills_gradients: bool = True
    reads: Callable[[Any], Sequence[Place]] = field(default=lambda _: ())
    """Where its Python finds what is no attribute of the modules, for a batch."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A recording, and what must still be as it was for it to be replayed."""

    recording: Recording
    structure: Node | Value
    tensors: list[Tensor]
    watched: Watched
    attributes: Attributes
    optimizers: OptimizersInside


@dataclass(slots=True)
class Iteration:
    """State of one key: eager until warm, then one recording."""

    static: StaticInputs
    gradients: StepGradients
    observation: Observation | None = None
    num_eager: int = 0
    why_eager: str = "warmup"
    structure: Node | Value | None = None
    """Of the last eager result."""
    refusal: CaptureError | None = None
    """What the last eager run has done and a replay would not."""
    attributes: Attributes | None = None
    """As they were before that run."""
    last_run: LastRun | None = None
    """How things were after it."""
    num_looked_again: int = 0
    graph: Captured | None = None
    num_recaptures: int = 0


class LastRun:
    """What an eager run has found, to tell whether it shows what a capture would do.

    Args:
        attributes: of the modules and of what else the step reads, as they are after the run.
        optimizers: of the step.
        leaves: parameters of which it matters whether they want a gradient.
    """

    def __init__(self, attributes: Attributes, optimizers: OptimizersInside, leaves: Iterable[Tensor]) -> None:
        self._attributes = attributes
        self._optimizers = optimizers.noted()
        self._wants_gradient = [(each, each.requires_grad) for each in (*leaves, *optimizers.parameters())]

    def changed(self) -> list[str]:
        """Names what is not as it was. Rates and decays do not count."""
        found = self.taking_part() or self._attributes.changed()
        return found or [f"{name} of an optimizer" for name in self._optimizers.refresh() if name != "weight_decay"]

    def taking_part(self) -> list[str]:
        """The same for what says which parameters get gradients and are updated: a capture must not differ in that."""
        if any(parameter.requires_grad != before for parameter, before in self._wants_gradient):
            return ["frozen parameters"]
        return self._optimizers.moved()
