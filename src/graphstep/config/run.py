"""The whole configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphstep.config.data import DataConfig
from graphstep.config.derived import DERIVED, derived_options, layer_modules
from graphstep.config.model import ModelConfig
from graphstep.config.options import OPTIONS, Option
from graphstep.config.switches import CudaGraphConfig, effective_inference_scope
from graphstep.config.training import TrainingConfig
from graphstep.config.validation import Notice, find_problems
from graphstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that a training run is told. Two runs with equal configurations do the same.

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
    notices: tuple[Notice, ...] = field(default=(), compare=False)
    """What the user should know and that is no error: options without effect, discouraged values."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where a value came from, by option name: ``option`` or ``derived``; all others are defaults."""

    def __post_init__(self) -> None:
        options = self.options()
        problems, _ = find_problems(options | {"layer_modules": layer_modules(options)})
        if problems:
            raise ConfigError(problems)

    def options(self) -> dict[str, Any]:
        """Return all values under the names of their options."""
        return {
            **self.model.options(),
            **self.training.options(),
            **self.data.options(),
            **self.graphs.options(),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the four sections as plain dictionaries of what JSON can hold."""
        sections: dict[str, dict[str, Any]] = {}
        for option, value, _ in self.entries():
            sections.setdefault(str(option.section), {})[option.target] = value
        plain: dict[str, Any] = json.loads(json.dumps(sections))
        return plain

    def to_argv(self) -> list[str]:
        """Return the command line of this configuration: the options that are not at their default.

        ``from_argv(config.to_argv()) == config``.
        """
        argv: list[str] = []
        if self.model.num_query_groups != self.model.num_attention_heads:
            argv.append("--group-query-attention")
        values = self.options()
        for option, value, _ in self.entries():
            if value != _default(option, values):
                argv += _words(option, value)
        return argv

    def entries(self) -> Iterator[tuple[Option, Any, str]]:
        """Yield every option that has a value of its own, the value, and where it came from."""
        values = self.options()
        for option in OPTIONS:
            if option.section is not None:
                yield option, values[option.dest], self.origins.get(option.dest, "default")


def _default(option: Option, values: Mapping[str, Any]) -> Any:
    """Return the value the option has when it is left out, given the others."""
    if option.dest in DERIVED:
        return derived_options({**values, option.dest: 0}).get(option.dest)
    if option.dest == "inference_cuda_graph_scope":
        return effective_inference_scope(values["cuda_graph_impl"], None)
    return option.default


def _words(option: Option, value: Any) -> list[str]:
    if option.nargs == 0:
        return [(option.flags if value else option.off_flags)[0]]
    words = [str(word) for word in (value if option.nargs == "+" else (value,))]
    if len(words) == 1 and words[0].startswith("-"):
        return [f"{option.flags[0]}={words[0]}"]
    return [option.flags[0], *words]
