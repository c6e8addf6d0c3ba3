"""The strategy that a configuration asks for."""

from __future__ import annotations

import pytest
import torch
from tests.strategies.models import Decoder, run_microbatches
from tests.strategies.runs import Run

from graphstep.config import CudaGraphConfig
from graphstep.errors import ConfigError
from graphstep.strategies import FullCudaGraphWrapper, LocalGraphs, TransformerEngineGraphs, build_strategy

IMPLS = ("none", "local", "transformer_engine", "full_iteration")


def test_every_name_gives_its_strategy(device: torch.device) -> None:
    kinds = {impl: type(Run(device, impl).strategy) for impl in IMPLS}
    assert kinds["local"] is LocalGraphs
    assert kinds["full_iteration"] is FullCudaGraphWrapper
    assert kinds["transformer_engine"] is TransformerEngineGraphs
    assert len(set(kinds.values())) == len(IMPLS)


def test_a_device_without_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="no engine for device meta"):
        build_strategy(
            CudaGraphConfig(impl="full_iteration"),
            model=Decoder(),
            forward_backward_func=run_microbatches,
            device=torch.device("meta"),
        )


def test_eager_reads_no_further_than_the_step(device: torch.device) -> None:
    """All strategies take as many batches as they were told."""
    for impl in IMPLS:
        run = Run(device, impl)
        batches = iter([run.batch() for _ in range(10)])
        for _ in range(3):
            run.strategy.forward_backward(data_iterator=batches, num_microbatches=2)
            run.strategy.end_step()
        assert len(list(batches)) == 4
        run.strategy.close()


def test_eager_reports_nothing(device: torch.device) -> None:
    run = Run(device, "none")
    run.step(1)
    assert run.report.to_json()["num_recordings"] == 0
    run.strategy.close()
    run.strategy.close()
