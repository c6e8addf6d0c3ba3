"""All options of the command line, as data: one table, read by the parser, ``--help`` and the printed form."""

from __future__ import annotations

from graphstep.config.options.architecture import ARCHITECTURE_OPTIONS
from graphstep.config.options.data import DATA_OPTIONS
from graphstep.config.options.elsewhere import ELSEWHERE_OPTIONS
from graphstep.config.options.graphs import GRAPH_OPTIONS
from graphstep.config.options.inference import INFERENCE_OPTIONS
from graphstep.config.options.mamba import MAMBA_OPTIONS
from graphstep.config.options.memory import MEMORY_OPTIONS
from graphstep.config.options.model import MODEL_OPTIONS
from graphstep.config.options.moe import MOE_OPTIONS
from graphstep.config.options.old import OLD_OPTIONS
from graphstep.config.options.option import Option
from graphstep.config.options.parallel import PARALLEL_OPTIONS
from graphstep.config.options.training import TRAINING_OPTIONS

OPTIONS: tuple[Option, ...] = (
    *MODEL_OPTIONS,
    *TRAINING_OPTIONS,
    *DATA_OPTIONS,
    *GRAPH_OPTIONS,
    *ARCHITECTURE_OPTIONS,
    *PARALLEL_OPTIONS,
    *MEMORY_OPTIONS,
    *MOE_OPTIONS,
    *MAMBA_OPTIONS,
    *INFERENCE_OPTIONS,
    *OLD_OPTIONS,
    *ELSEWHERE_OPTIONS,
)
"""Every option, in the order of ``--help``."""

__all__ = ["OPTIONS", "Option"]
