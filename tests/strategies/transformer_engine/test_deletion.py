"""The graphs of a helper go while something is in flight, or a helper is refused: nothing is wrong after it."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder, in_order
from tests.strategies.runs import Run, insist_on_the_same_bits
from torch import Tensor, nn

from graphstep.config import CudaGraphConfig
from graphstep.errors import ConfigError
from graphstep.strategies import TECudaGraphHelper

TE = "transformer_engine"
THREE = partial(Decoder, 3, 0.1)
IN_FLIGHT = (1, 1, -1, 1, -1, -1)


class Deleting(Decoder):
    """Deletes the graphs of a helper before the layer with this index runs, at the call with this number."""

    helper: TECudaGraphHelper | None = None
    place = (-1, -1)
    count = 0

    def __init__(self) -> None:
        super().__init__(3, 0.1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.count += 1
        if self.helper is not None and self.count == self.place[0]:
            self.layers[self.place[1]].register_forward_pre_hook(self._delete)
        return super().forward(tokens, labels)

    def _delete(self, *_: Any) -> None:
        if self.helper is not None:
            self.helper.delete_cuda_graphs()


@pytest.mark.parametrize("merge_layers", [1, 0])
@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("microbatch", range(3))
def test_what_is_in_flight_keeps_its_backward(
    device: torch.device, microbatch: int, layer: int, merge_layers: int
) -> None:
    runs = []
    for is_graphed in (False, True):
        run = Run(device, "none", build=Deleting, forward_backward=in_order("ffbfbb"))
        run.model.place = (3 * 3 + 1 + microbatch, layer)
        config = CudaGraphConfig(impl=TE, merge_layers=merge_layers)
        helper = TECudaGraphHelper(run.model, config, 6, 2, order=IN_FLIGHT) if is_graphed else None
        run.model.helper = helper
        for step in range(5):
            if helper is not None and step == 1:
                helper.create_cudagraphs()
            run.step(3)
        if helper is not None:
            assert not helper.graphs_created()
            assert helper.num_buffer_sets == ()
            assert helper.report().pool_bytes == 0
            assert sum(row.num_replays for row in helper.report().rows) == 2 * 9 + 3 * microbatch + layer
            assert all("forward" not in each.__dict__ for each in run.model.layers)
        runs.append(run)
    insist_on_the_same_bits(*runs)


def test_memory_is_free_when_results_in_flight_are_dropped(device: torch.device) -> None:
    run = Run(device, "none", build=THREE)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2)
    run.step(1)
    helper.create_cudagraphs()
    run.step(1)
    batch = {name: tensor.to(device) for name, tensor in run.batch().items()}
    loss = run.model(batch["tokens"], batch["labels"])
    helper.delete_cuda_graphs()
    helper.delete_cuda_graphs()
    assert helper.report().pool_bytes > 0
    del loss
    gc.collect()
    assert helper.report().pool_bytes == 0
    run.step(1)


def test_a_helper_that_is_refused_leaves_the_model_as_it_was() -> None:
    chunks = [Decoder(), Decoder()]
    chunks[1].layers[1] = chunks[0].layers[0]
    with pytest.raises(ConfigError, match="chunk 2 has a layer of an earlier one"):
        TECudaGraphHelper(chunks, CudaGraphConfig(impl=TE), 6, 2)
    assert all("forward" not in layer.__dict__ for chunk in chunks for layer in chunk.layers)


def test_a_policy_that_captures_nothing(device: torch.device) -> None:
    run = Run(device, "none", build=THREE)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE, policy="off"), 6, 2)
    helper.create_cudagraphs()
    run.step(1)
    assert helper.capture_finished()
    assert not helper.graphs_created()
    assert helper.report().rows == ()
    helper.delete_cuda_graphs()


def test_arguments_that_make_no_helper() -> None:
    with pytest.raises(ConfigError) as caught:
        TECudaGraphHelper([Decoder(), 3], None, "6", 0)  # type: ignore[list-item, arg-type]
    assert [problem.where for problem in caught.value.problems] == [
        "argument seq_length",
        "argument micro_batch_size",
        "model",
        "config",
    ]
    with pytest.raises(ConfigError) as caught:
        TECudaGraphHelper(nn.Sequential(nn.Linear(2, 2)), CudaGraphConfig(impl=TE), 6, 2)
    assert "make_graphed_callables" in caught.value.problems[0].fix


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_results_from_before_the_capture_may_be_dropped_after_it(device: torch.device) -> None:
    run = Run(device, "none", build=THREE)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2)
    batch = {name: tensor.to(device) for name, tensor in run.batch().items()}
    run.step(1)
    kept = run.model(**batch)
    helper.create_cudagraphs()
    del kept
    gc.collect()
    run.step(1)
    assert [row.num_replays for row in helper.report().rows] == [1, 1, 1]
    helper.delete_cuda_graphs()
