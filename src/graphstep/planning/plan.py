"""What can be captured, what each choice is predicted to gain and need, and which one to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from graphstep.capture.report import CaptureReport
from graphstep.config.suggest import suggestion
from graphstep.coverage import StepMeasurement
from graphstep.errors import Problem, UserInputError
from graphstep.planning.calibration import Costs
from graphstep.planning.candidates import Candidate, settled
from graphstep.planning.measure import MeasuredStep
from graphstep.planning.predict import copied_bytes, launched, memory_need, predicted_us

KERNELS = "two-clocks"
"""Model of a step on a GPU: measured launches and kernels, each on its own clock."""
COUNTED = "counted-operations"
"""Model without a GPU: an estimate from the number of operations."""
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a candidate turned out to do, once captured."""

    step_ms: float | None
    num_launches: float | None
    """Of a step, copies and memsets included; None where there is no device to launch on."""
    num_graphs: float | None
    """Of them graphs."""
    pool_bytes: int
    static_bytes: int
    capture_seconds: float

    @classmethod
    def of(
        cls, report: CaptureReport, measured: StepMeasurement | None = None, *, num_graphs: float | None = None
    ) -> Measured:
        """What a report says after a capture, with the times of captured steps."""
        timeline = measured.timeline if measured is not None else None
        has_device = timeline is not None and timeline.has_device
        return cls(
            step_ms=measured.step_ms if measured is not None else None,
            num_launches=timeline.num_launches + timeline.num_transfers if timeline and has_device else None,
            num_graphs=timeline.num_graph_launches if timeline and has_device else num_graphs,
            pool_bytes=report.pool_bytes,
            static_bytes=sum(row.static_bytes for row in report.rows),
            capture_seconds=report.capture_seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What one candidate is predicted to do."""

    candidate: Candidate
    step_ms: float
    num_launches: int
    num_graphs: int
    num_captured: int
    """Launches of the eager step that are in graphs."""
    pool_bytes: int
    static_bytes: int
    extra_bytes: int
    fits: bool
    """Within the memory budget."""
    measured: Measured | None = None

    @property
    def is_possible(self) -> bool:
        """True if it can be had, and fits."""
        return self.fits and not self.candidate.problem

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        names = ("step_ms", "num_launches", "num_graphs", "num_captured", "pool_bytes", "static_bytes", "extra_bytes")
        return {
            "name": self.candidate.name,
            "switches": list(self.candidate.switches),
            "regions": dict(self.candidate.regions),
            "how": self.candidate.how,
            "problem": self.candidate.problem,
            **{name: getattr(self, name) for name in names},
            "fits": self.fits,
            "measured": asdict(self.measured) if self.measured is not None else None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that was measured and predicted."""

    measured: MeasuredStep
    costs: Costs
    predictions: tuple[Prediction, ...]
    budget_bytes: int | None
    """Memory that graphs may add to the peak of an eager step; None: not limited."""

    @classmethod
    def of(
        cls,
        measured: MeasuredStep,
        candidates: tuple[Candidate, ...],
        costs: Costs,
        *,
        budget_bytes: int | None = None,
    ) -> Plan:
        """Predict each candidate.

        Args:
            measured: the eager step.
            candidates: what could be captured.
            costs: of this machine.
            budget_bytes: as the field; None: what is free on a GPU, and no limit on the CPU.
        """
        budget = budget_bytes if budget_bytes is not None else measured.free_bytes
        found = []
        random = {each.scope for each in measured.log.operations if each.is_random}
        for candidate in (settled(each, random) for each in candidates):
            after = launched(measured.work, candidate, costs, copied_bytes(measured.log, candidate))
            need = memory_need(measured.log, candidate, shares_memory=measured.has_device)
            step_us = predicted_us(after, candidate, costs, step_us=measured.step_us, has_device=measured.has_device)
            found.append(
                Prediction(
                    candidate=candidate,
                    step_ms=step_us / 1e3,
                    num_launches=after.num_launches,
                    num_graphs=after.num_graphs,
                    num_captured=after.num_captured,
                    pool_bytes=need.pool_bytes,
                    static_bytes=need.static_bytes,
                    extra_bytes=need.extra_bytes,
                    fits=budget is None or need.extra_bytes <= budget,
                )
            )
        return cls(measured=measured, costs=costs, predictions=tuple(found), budget_bytes=budget)

    @property
    def model(self) -> str:
        """Name of the model that the times come from."""
        return KERNELS if self.measured.has_device else COUNTED

    @property
    def launch_boundness(self) -> float:
        """Share of a step in which the device waits for the host; without one, the share that launching would be."""
        step = self.measured.step_us
        if step <= 0:
            return 0.0
        busy = self.measured.busy_us
        return min(1.0, self.measured.host_us / step) if busy is None else max(0.0, 1 - busy / step)

    def gain_of(self, prediction: Prediction) -> float | None:
        """How many times as fast as eager; None without a GPU, where a tape is no measure of that."""
        step_ms = self.measured.times.step_ms
        if not self.measured.has_device or step_ms is None or prediction.step_ms <= 0:
            return None
        return step_ms / prediction.step_ms

    @property
    def recommended(self) -> Prediction | None:
        """The candidate to take; None if none gains anything within the budget.

        On a GPU the fastest; of those that differ by less than eager steps do among themselves, the one that needs the
        least memory. Without a GPU the one that leaves the fewest launches.
        """
        possible = [each for each in self.predictions if each.is_possible and each.num_captured]
        if not possible:
            return None
        if not self.measured.has_device:
            return min(possible, key=lambda each: (each.num_launches, each.extra_bytes))
        best = min(each.step_ms for each in possible)
        noise = self.measured.times.step_spread_ms
        step_ms = self.measured.times.step_ms or 0.0
        if best >= step_ms - noise:
            return None
        alike = [each for each in possible if each.step_ms <= best + min(noise, step_ms - best)]
        return min(alike, key=lambda each: (each.extra_bytes, each.step_ms))

    def with_measured(self, name: str, measured: Measured) -> Plan:
        """The plan with what a candidate turned out to do.

        Raises:
            UserInputError: no candidate has this name.
        """
        names = [each.candidate.name for each in self.predictions]
        if name not in names:
            fix = suggestion(name, names, f"name one of: {', '.join(names)}")
            raise UserInputError(
                Problem("plan-candidate", f"no candidate is called {name!r}", "Plan.with_measured, argument name", fix)
            )
        found = [replace(each, measured=measured) if each.candidate.name == name else each for each in self.predictions]
        return replace(self, predictions=tuple(found))

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        measured, recommended = self.measured, self.recommended
        return {
            "model": self.model,
            "device": str(measured.device),
            "eager": {
                "step_ms": measured.times.step_ms,
                "step_spread_ms": measured.times.step_spread_ms,
                "host_ms": measured.host_us / 1e3,
                "kernel_ms": None if measured.busy_us is None else measured.busy_us / 1e3,
                "num_launches": measured.num_launches,
                "modelled_ms": measured.modelled_us / 1e3,
                "host_factor": measured.host_factor,
                "peak_bytes": measured.peak_bytes,
                "num_microbatches": measured.log.num_microbatches,
            },
            "launch_boundness": self.launch_boundness,
            "costs": self.costs.to_json(),
            "budget_bytes": self.budget_bytes,
            "candidates": [each.to_json() | {"gain": self.gain_of(each)} for each in self.predictions],
            "recommended": recommended.candidate.name if recommended is not None else None,
        }

    def render(self) -> Group:
        """Tables for a terminal; what follows from them is :meth:`advice`."""
        parts: list[Any] = [self._eager_table(), self._candidate_table()]
        problems: Mapping[str, str] = {
            each.candidate.name: each.candidate.problem for each in self.predictions if each.candidate.problem
        }
        parts += [Text(f"not possible, {name}: {problem}", "dim") for name, problem in problems.items()]
        if any(each.measured is not None for each in self.predictions):
            parts.append(self._measured_table())
        return Group(*parts)

    def advice(self) -> str:
        """The recommendation in words."""
        found = self.recommended
        if found is None:
            inside = "" if self.budget_bytes is None else f" within {self.budget_bytes / _MIB:.0f} MiB"
            return f"recommended: none, nothing is predicted to gain{inside}"
        how = " ".join(found.candidate.switches) or found.candidate.how
        times = self.gain_of(found)
        gain = "" if times is None else f", {times:.2f} times as fast"
        launches = f"{self.measured.num_launches} launches become {found.num_launches}"
        return f"recommended: {found.candidate.name}: {launches}{gain}\n  {how}"

    def _eager_table(self) -> Table:
        measured = self.measured
        table = Table(title="one eager step", title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        busy = measured.busy_us
        rows = [
            ("step", f"{measured.step_us / 1e3:.2f} ms, quartiles {measured.times.step_spread_ms:.2f} ms apart"),
            ("device", str(measured.device)),
            ("model", self.model if busy is not None else f"{self.model}: an estimate, there is no GPU here"),
            ("launches" if busy is not None else "operations", str(measured.num_launches)),
            ("host", f"{measured.host_us / 1e3:.2f} ms for all launches"),
        ]
        if busy is not None:
            rows.append(("kernels", f"{busy / 1e3:.2f} ms"))
            rows.append(("launch-boundness", f"{self.launch_boundness:.0%} of the step the device is idle"))
        else:
            rows.append(("launch-boundness", f"{self.launch_boundness:.0%} of the step would be launches"))
        rows.append(("memory", f"peak {measured.peak_bytes / _MIB:.1f} MiB beyond weights and gradients"))
        for name, text in rows:
            table.add_row(name, Text(text))
        return table

    def _candidate_table(self) -> Table:
        budget = "" if self.budget_bytes is None else f", budget {self.budget_bytes / _MIB:.0f} MiB"
        table = Table(title=f"predicted, memory in MiB{budget}", title_justify="left")
        table.add_column("captured", overflow="fold")
        has_gain = self.measured.has_device
        for heading in ("step ms", *(["gain"] if has_gain else []), "launches", "graphs", "pool", "static", "extra"):
            table.add_column(heading, justify="right", no_wrap=True)
        recommended = self.recommended
        for each in self.predictions:
            note = " (recommended)" if each is recommended else ""
            if not each.is_possible:
                note = " (not possible)" if each.candidate.problem else " (too large)"
            numbers = (each.pool_bytes, each.static_bytes, each.extra_bytes)
            table.add_row(
                Text(f"{each.candidate.name}{note}", "bold" if each is recommended else ""),
                f"{each.step_ms:.2f}",
                *([f"{self.gain_of(each) or 0.0:.2f}x"] if has_gain else []),
                str(each.num_launches),
                str(each.num_graphs),
                *(f"{number / _MIB:.2f}" for number in numbers),
            )
        return table

    def _measured_table(self) -> Table:
        table = Table(title="predicted / measured, memory in MiB", title_justify="left")
        table.add_column("captured", overflow="fold")
        for heading in ("step ms", "launches", "graphs", "pool", "static"):
            table.add_column(heading, justify="right", no_wrap=True)
        for each in self.predictions:
            found = each.measured
            if found is None:
                continue
            step = "?" if found.step_ms is None else f"{found.step_ms:.2f}"
            launches = "?" if found.num_launches is None else f"{found.num_launches:.0f}"
            graphs = "?" if found.num_graphs is None else f"{found.num_graphs:.0f}"
            table.add_row(
                Text(each.candidate.name),
                f"{each.step_ms:.2f} / {step}",
                f"{each.num_launches} / {launches}",
                f"{each.num_graphs} / {graphs}",
                f"{each.pool_bytes / _MIB:.2f} / {found.pool_bytes / _MIB:.2f}",
                f"{each.static_bytes / _MIB:.2f} / {found.static_bytes / _MIB:.2f}",
            )
        return table
