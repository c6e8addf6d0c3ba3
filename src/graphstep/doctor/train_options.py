"""A step for the options of ``graphstep train``: the model that they describe, on random tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from graphstep.config import from_argv
from graphstep.doctor.findings import SourceLine
from graphstep.doctor.target import Target
from graphstep.training.setup import build_model, with_vocabulary
from graphstep.training.step import forward_backward_no_pipelining

_VOCABULARY, _NUM_BATCHES = 512, 4
_MOST_MICROBATCHES, _MOST_SEQUENCES, _MOST_TOKENS = 2, 1, 64
"""More would take longer and show the same."""


def options_target(argv: Sequence[str], environment: Mapping[str, str]) -> Target:
    """Forward and backward of a training step with these options.

    Args:
        argv: options of ``graphstep train``. Data and checkpoints that they name are not read.
        environment: variables of the process.

    Raises:
        ConfigError: wrong options; all problems at once.
    """
    config = with_vocabulary(from_argv(argv, environment, for_training=True), _VOCABULARY)
    model = build_model(config, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(config.training.seed)
    number = min(config.training.num_microbatches, _MOST_MICROBATCHES)
    num_sequences = min(config.training.micro_batch_size, _MOST_SEQUENCES)
    shape = (number, num_sequences, min(config.model.seq_length, _MOST_TOKENS))

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        def batches() -> Iterator[dict[str, Tensor]]:
            for index in range(number):
                yield {"tokens": tokens[index], "labels": labels[index]}

        model.zero_grad()
        return forward_backward_no_pipelining(data_iterator=batches(), model=model, num_microbatches=number)

    def random_tokens() -> Tensor:
        return torch.randint(0, _VOCABULARY, shape, generator=generator)

    return Target(
        name="graphstep train " + " ".join(argv),
        step=step,
        batches=[(random_tokens(), random_tokens()) for _ in range(_NUM_BATCHES)],
        where=SourceLine("options of graphstep train"),
        has_libraries=True,
        functions=[step, model.forward],
    )
