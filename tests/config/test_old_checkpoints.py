"""The switches in the arguments of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from graphstep.config.old_checkpoints import (
    OldCudaGraphScope,
    PickledCudaGraphModule,
    PickledInferenceCudaGraphScope,
    switches_of,
)
from graphstep.config.switches import CudaGraphModule, InferenceCudaGraphScope
from graphstep.errors import ConfigError

Old = OldCudaGraphScope


def test_the_old_numbers() -> None:
    assert {member.name: member.value for member in Old} == {
        "full_iteration": 1,
        "attn": 2,
        "mlp": 3,
        "moe": 4,
        "moe_router": 5,
        "moe_preprocess": 6,
        "mamba": 7,
        "full_iteration_inference": 8,
    }
    assert [member.name for member in PickledCudaGraphModule] == list(CudaGraphModule)
    assert [member.name for member in PickledInferenceCudaGraphScope] == list(InferenceCudaGraphScope)


@pytest.mark.parametrize(
    ("arguments", "options", "num_notices"),
    [
        ({}, {}, 0),
        ({"enable_cuda_graph": False, "cuda_graph_scope": None, "lr": 1.0}, {}, 0),
        ({"enable_cuda_graph": True}, {"cuda_graph_impl": "local"}, 1),
        (
            {"external_cuda_graph": True, "cuda_graph_scope": [Old.attn, Old.moe_router]},
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("attn", "moe_router")},
            2,
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": Old.full_iteration},
            {"cuda_graph_impl": "full_iteration"},
            2,
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_modules": [Old.full_iteration_inference]},
            {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"},
            1,
        ),
        ({"cuda_graph_scope": "full"}, {}, 2),
        ({"cuda_graph_scope": "attn,mlp"}, {"cuda_graph_modules": ("attn", "mlp")}, 1),
        (
            {"cuda_graph_scope": [Old.attn], "cuda_graph_modules": [PickledCudaGraphModule.attn]},
            {"cuda_graph_modules": ("attn",)},
            0,
        ),
        (
            {"cuda_graph_impl": "local", "inference_cuda_graph_scope": PickledInferenceCudaGraphScope.block},
            {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"},
            0,
        ),
    ],
)
def test_switches(arguments: dict[str, Any], options: dict[str, Any], num_notices: int) -> None:
    found = switches_of(arguments, "model.pt")
    assert dict(found.options) == options
    assert len(found.notices) == num_notices
    assert dict(switches_of(found.options, "model.pt").options) == options


def test_contradictions_and_odd_values_are_said_all_at_once() -> None:
    arguments = {"enable_cuda_graph": True, "external_cuda_graph": True, "cuda_graph_scope": [object()]}
    with pytest.raises(ConfigError) as caught:
        switches_of(arguments, "model.pt")
    assert [problem.code for problem in caught.value.problems] == ["checkpoint-switch", "old-two-implementations"]
    assert all(problem.where.startswith("model.pt") for problem in caught.value.problems)
