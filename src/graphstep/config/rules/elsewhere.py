"""Options of parts that graphstep does not have, and that change nothing."""

from __future__ import annotations

from graphstep.config.elsewhere import SWITCHES, VALUES
from graphstep.config.rules.rule import Rule, idle

ELSEWHERE_RULES: tuple[Rule, ...] = idle(
    [flag.removeprefix("--").replace("-", "_") for flag in (*SWITCHES, *VALUES)],
    (),
    lambda options: True,
    "graphstep has no such part, or always works that way",
    "leave it out",
)
