"""The whole configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphstep.config.data import DataConfig
from graphstep.config.derived import (
    DERIVED,
    default_global_batch_size,
    derived_options,
    implied_options,
    model_facts,
    rank_facts,
)
from graphstep.config.environment import Environment
from graphstep.config.inference import InferenceConfig
from graphstep.config.layer_freq import LAYER_FREQ, print_layer_freq
from graphstep.config.layers import LayersConfig
from graphstep.config.loop import LoopConfig
from graphstep.config.mamba import MambaConfig
from graphstep.config.memory import MemoryConfig
from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.config.options import OPTIONS, Option
from graphstep.config.parallel import ParallelConfig
from graphstep.config.precision import PrecisionConfig
from graphstep.config.rl import RLConfig
from graphstep.config.switches import CudaGraphConfig, InferenceCudaGraphScope, default_inference_scope
from graphstep.config.training import TrainingConfig
from graphstep.config.validation import Notice, find_problems
from graphstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that a run is told. Two runs with equal configurations do the same.

    Raises:
        ConfigError: sections that contradict each other; all problems at once.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the model."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Batches, schedule, optimizer, outputs."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data set and tokenizer."""
    graphs: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    """What is captured, and how."""
    layers: LayersConfig = field(default_factory=LayersConfig)
    """Layers other than those of a plain decoder, and kernels."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """Optimizer, checks and measurements of the training loop."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How ranks share the work."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Recomputation and offloading."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Experts."""
    mamba: MambaConfig = field(default_factory=MambaConfig)
    """Sizes of Mamba layers."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    """Inference with graphs."""
    rl: RLConfig = field(default_factory=RLConfig)
    """Reinforcement learning with graphs."""
    environment: Environment | None = field(default=None, compare=False)
    """Variables of the environment, if they were read: rules about them are left out otherwise. Ranks of one run differ
    in it."""
    notices: tuple[Notice, ...] = field(default=(), compare=False)
    """What the user should know and that is no error: migrations, options without effect, discouraged values."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where a value came from, by option name: ``option``, ``file``, ``migrated``, ``environment``, ``derived``; all
    others are defaults."""

    def __post_init__(self) -> None:
        options = self.options()
        facts = model_facts(options)
        if self.environment is not None:
            facts |= self.environment.options() | rank_facts(options, self.environment.world_size)
        problems, _ = find_problems(options | facts)
        if problems:
            raise ConfigError(problems)

    @property
    def num_inference_graphs(self) -> int | None:
        """Largest number of token counts that inference graphs are captured for; None: no inference graphs."""
        if self.graphs.inference_scope is InferenceCudaGraphScope.none:
            return None
        return self.inference.inference_dynamic_batching_num_cuda_graphs

    @property
    def has_static_kv_memory(self) -> bool:
        """Does the key-value cache come back at the same addresses?"""
        return self.rl.rl_persist_cuda_graphs

    def options(self) -> dict[str, Any]:
        """Return all values under the names of their options."""
        return {name: value for section in SECTIONS for name, value in getattr(self, section).options().items()}

    def to_json(self) -> dict[str, Any]:
        """Return the sections as plain dictionaries of what JSON can hold."""
        sections: dict[str, dict[str, Any]] = {}
        for option, value, _ in self.entries():
            sections.setdefault(str(option.section), {})[option.target] = value
        plain: dict[str, Any] = json.loads(json.dumps(sections))
        return plain

    def to_argv(self) -> list[str]:
        """Return the command line of this configuration: the options that are not at their default.

        ``from_argv(config.to_argv(), env) == config`` in the environment it was made in.
        """
        argv: list[str] = []
        if self.model.num_query_groups != self.model.num_attention_heads:
            argv.append("--group-query-attention")
        values = self.options()
        defaults = self._defaults(values)
        for option, value, _ in self.entries():
            if value != defaults[option.dest]:
                argv += _words(option, value)
        return argv

    def entries(self) -> Iterator[tuple[Option, Any, str]]:
        """Yield every option that has a value of its own, the value, and where it came from."""
        values = self.options()
        for option in OPTIONS:
            if option.section is not None:
                yield option, values[option.dest], self.origins.get(option.dest, "default")

    def _defaults(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that options have when they are left out, given the others."""
        defaults = {option.dest: option.default for option in OPTIONS}
        defaults |= {name: derived_options({**values, name: 0}).get(name) for name in DERIVED}
        defaults |= implied_options(values)
        defaults["inference_cuda_graph_scope"] = default_inference_scope(values["cuda_graph_impl"])
        if self.environment is not None:
            defaults["global_batch_size"] = default_global_batch_size(values, self.environment.world_size)
        return defaults


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "data": DataConfig,
    "graphs": CudaGraphConfig,
    "layers": LayersConfig,
    "precision": PrecisionConfig,
    "loop": LoopConfig,
    "parallel": ParallelConfig,
    "memory": MemoryConfig,
    "moe": MoEConfig,
    "mamba": MambaConfig,
    "inference": InferenceConfig,
    "rl": RLConfig,
}
"""Field of ``RunConfig`` -> its dataclass, for those that hold options."""


def _words(option: Option, value: Any) -> list[str]:
    if option.nargs == 0:
        return [(option.flags if value else option.off_flags)[0]]
    words = [str(word) for word in (value if option.nargs == "+" else (value,))]
    if option.annotation == LAYER_FREQ:
        words = [print_layer_freq(value)]
    if len(words) == 1 and words[0].startswith("-"):
        return [f"{option.flags[0]}={words[0]}"]
    return [option.flags[0], *words]
