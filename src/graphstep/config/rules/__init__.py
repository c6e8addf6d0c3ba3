"""The rules that options have to obey, as data: one table, read by the command line, the dataclasses and the docs."""

from __future__ import annotations

from graphstep.config.rules.availability import AVAILABILITY_RULES
from graphstep.config.rules.data import DATA_RULES
from graphstep.config.rules.elsewhere import ELSEWHERE_RULES
from graphstep.config.rules.graphs import GRAPH_RULES
from graphstep.config.rules.inference import INFERENCE_RULES
from graphstep.config.rules.layer_training import LAYER_TRAINING_RULES
from graphstep.config.rules.layers import LAYER_RULES
from graphstep.config.rules.mamba import MAMBA_SIZE_RULES
from graphstep.config.rules.memory import MEMORY_RULES
from graphstep.config.rules.model import MODEL_RULES
from graphstep.config.rules.moe import MOE_RULES
from graphstep.config.rules.parallel import PARALLEL_RULES
from graphstep.config.rules.rule import Rule
from graphstep.config.rules.training import TRAINING_RULES

SUBJECTS: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("Graphs", GRAPH_RULES),
    ("Model", MODEL_RULES),
    ("Layers, kernels and number formats", LAYER_RULES),
    ("Experts", MOE_RULES),
    ("Mamba layers", MAMBA_SIZE_RULES),
    ("Recomputation and offloading", MEMORY_RULES),
    ("Ranks and their environment", PARALLEL_RULES),
    ("Inference and reinforcement learning", INFERENCE_RULES),
    ("Training", TRAINING_RULES),
    ("Data", DATA_RULES),
    ("graphstep train", (*AVAILABILITY_RULES, *LAYER_TRAINING_RULES)),
    ("Known options without effect", ELSEWHERE_RULES),
)
"""The rules by subject, as the page of rules shows them."""

RULES: tuple[Rule, ...] = tuple(
    sorted((rule for _, rules in SUBJECTS for rule in rules), key=lambda rule: not rule.is_range)
)
"""All rules; those about one value alone first, because a value that breaks one takes no part in the others."""

__all__ = ["RULES", "SUBJECTS", "Rule"]
