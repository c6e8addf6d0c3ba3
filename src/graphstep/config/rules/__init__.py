"""The rules that options have to obey, as data: one table, read by the command line, the dataclasses and the docs."""

from __future__ import annotations

from graphstep.config.rules.data import DATA_RULES
from graphstep.config.rules.graphs import GRAPH_RULES
from graphstep.config.rules.model import MODEL_RULES
from graphstep.config.rules.rule import Rule
from graphstep.config.rules.training import TRAINING_RULES

RULES: tuple[Rule, ...] = tuple(
    sorted((*MODEL_RULES, *TRAINING_RULES, *DATA_RULES, *GRAPH_RULES), key=lambda rule: not rule.is_range)
)
"""All rules; those about one value alone first, because a value that breaks one takes no part in the others."""

__all__ = ["RULES", "Rule"]
