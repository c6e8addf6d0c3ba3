"""Keyword arguments: names, types, migration."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from graphstep.config import CapturePolicy, CudaGraphModule, RunConfig, from_options
from graphstep.errors import ConfigError


class OldScope(enum.Enum):
    """Like Megatron-LM's old enum: members are no text."""

    full_iteration = 1
    attn = 2


def problems(**options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_options(options)
    return [problem.code for problem in caught.value.problems]


def test_values_arrive_under_both_names() -> None:
    config = from_options(num_moe_experts=4, moe_layer_freq=[0, 1], num_layers=2, cuda_graph_impl="local", fp8="hybrid")
    assert (config.moe.num_experts, config.moe.moe_layer_freq) == (4, (0, 1))
    assert (config.graphs.impl, config.precision.fp8_format) == ("local", "hybrid")
    assert config.origins["num_experts"] == "option"


def test_policies_are_words_or_members() -> None:
    for value in (CapturePolicy.auto, "auto"):
        graphs = from_options(cuda_graph_impl="local", cuda_graph_policy=value, cuda_graph_merge_layers=0).graphs
        assert (graphs.policy, graphs.merge_layers) == (CapturePolicy.auto, 0)
    assert problems(cuda_graph_policy="never", cuda_graph_on_mismatch=1, cuda_graph_capture_after="2") == [
        "cuda-graph-policy-choice",
        "cuda-graph-on-mismatch-choice",
        "cuda-graph-capture-after-type",
    ]


def test_the_loop_is_the_caller_s() -> None:
    assert from_options(cuda_graph_impl="full_iteration").graphs.impl == "full_iteration"
    assert problems(cuda_graph_impl="full_iteration", check_for_nan_in_loss_and_grad=True) == [
        "full-iteration-nan-check"
    ]


def test_the_environment_counts_where_it_is_given() -> None:
    assert from_options(tensor_model_parallel_size=2).environment is None
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        from_options(tensor_model_parallel_size=2, env={})


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (None, ()),
        ("", ()),
        ("full", ()),
        ("attn", ("attn",)),
        ("attn, mlp", ("attn", "mlp")),
        (["attn", "attn"], ("attn",)),
        (("attn,mlp",), ("attn", "mlp")),
        (CudaGraphModule.mlp, ("mlp",)),
        ([CudaGraphModule.mlp, "attn"], ("mlp", "attn")),
    ],
)
def test_modules(modules: object, expected: tuple[str, ...]) -> None:
    assert from_options(cuda_graph_impl="local", cuda_graph_modules=modules).graphs.modules == expected


@pytest.mark.parametrize("scope", ["full_iteration", OldScope.full_iteration, [OldScope.full_iteration]])
def test_the_old_name_takes_members_of_the_old_enum(scope: object) -> None:
    config = from_options(cuda_graph_scope=scope)
    assert config.graphs.impl == "full_iteration"
    assert [notice.code for notice in config.notices] == ["old-cuda-graph-scope", "old-module-full-iteration"]


def test_the_default_of_megatron_does_not_count_beside_the_old_name() -> None:
    config = from_options(cuda_graph_impl="local", cuda_graph_scope=["attn"], cuda_graph_modules="full")
    assert config.graphs.modules == ("attn",)


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({"cuda_graph_modules": OldScope.attn}, ["words-type"]),
        ({"cuda_graph_modules": [1]}, ["words-type"]),
        ({"cuda_graph_modules": "atn"}, ["cuda-graph-modules-choice"]),
        ({"cuda_graph_modules": ["full", "full"]}, ["old-full-mixed"]),
        ({"cuda_graph_scope": [], "cuda_graph_modules": "attn"}, ["old-and-new-modules"]),
        ({"cuda_graph_impl": "bogus"}, ["cuda-graph-impl-choice"]),
        ({"cuda_graph_impl": ""}, ["cuda-graph-impl-choice"]),
        ({"num_layers": "4"}, ["num-layers-type"]),
        ({"num_layer": 4}, ["unknown-option"]),
        ({"num_experts": 4, "num_moe_experts": 8}, ["given-twice"]),
        ({"moe_layer_freq": "[0,"}, ["moe-layer-freq-type"]),
        ({"moe_layer_freq": 1.5}, ["moe-layer-freq-type"]),
        ({"cpu_offloading": True}, ["cpu-offloading-contradiction"]),
        ({"cpu_offloading": False, "cpu_offloading_num_layers": 1}, ["cpu-offloading-contradiction"]),
        ({"fp16": 1, "lr": "fast"}, ["fp16-type", "lr-type"]),
    ],
)
def test_what_cannot_be_read(options: dict[str, Any], codes: list[str]) -> None:
    assert problems(**options) == codes


def test_a_name_nearly_right_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean cuda_graph_impl"):
        from_options(cuda_graph_imp="local")


def test_query_groups_need_no_switch() -> None:
    assert from_options(num_attention_heads=4, num_query_groups=2).model.num_query_groups == 2


def test_offloading_may_be_said_twice() -> None:
    config = from_options(cpu_offloading=True, cpu_offloading_num_layers=1, num_layers=2)
    assert config.memory.cpu_offloading_num_layers == 1


def test_nothing_given() -> None:
    assert isinstance(from_options(), RunConfig)
    assert from_options({"num_layers": None}) == from_options()
