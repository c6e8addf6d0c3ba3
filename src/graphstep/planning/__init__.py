"""What capture would gain and cost, from one eager step, before anything is captured."""

from __future__ import annotations

from graphstep.planning.calibration import Costs, calibrate
from graphstep.planning.candidates import Candidate, Part, candidates_of, parts_of
from graphstep.planning.measure import MeasuredStep, measure_step
from graphstep.planning.own_step import plan_step
from graphstep.planning.plan import Measured, Plan, Prediction

__all__ = [
    "Candidate",
    "Costs",
    "Measured",
    "MeasuredStep",
    "Part",
    "Plan",
    "Prediction",
    "calibrate",
    "candidates_of",
    "measure_step",
    "parts_of",
    "plan_step",
]
