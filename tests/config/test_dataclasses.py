"""Sections built and replaced in Python."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from graphstep.config import (
    CapturePolicy,
    CudaGraphConfig,
    CudaGraphImpl,
    CudaGraphModule,
    DataConfig,
    InferenceCudaGraphScope,
    MismatchPolicy,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from graphstep.errors import ConfigError


def test_what_is_left_out_is_worked_out() -> None:
    model = ModelConfig(hidden_size=96, num_attention_heads=6, seq_length=32)
    assert (model.kv_channels, model.num_query_groups) == (16, 6)
    assert (model.ffn_hidden_size, model.max_position_embeddings) == (384, 32)
    training = TrainingConfig(micro_batch_size=3, train_iters=7)
    assert (training.global_batch_size, training.lr_decay_iters) == (3, 7)


@pytest.mark.parametrize(("hidden", "ffn"), [(768, 2048), (4096, 10880), (16, 64)])
def test_swiglu_keeps_the_number_of_weights(hidden: int, ffn: int) -> None:
    assert ModelConfig(hidden_size=hidden, num_attention_heads=2, swiglu=True).ffn_hidden_size == ffn


def test_num_microbatches() -> None:
    assert TrainingConfig(micro_batch_size=2, global_batch_size=8).num_microbatches == 4


def test_replace_keeps_and_works_out_again() -> None:
    model = ModelConfig(hidden_size=128)
    assert dataclasses.replace(model, vocab_size=384).vocab_size == 384
    assert dataclasses.replace(model, hidden_size=64).kv_channels == 32
    assert dataclasses.replace(model, hidden_size=64, kv_channels=0).kv_channels == 16


def test_replace_checks() -> None:
    with pytest.raises(ConfigError, match="divisible"):
        dataclasses.replace(ModelConfig(), hidden_size=10, kv_channels=0)


def test_sections_are_checked_against_each_other() -> None:
    graphs = CudaGraphConfig(impl=CudaGraphImpl.full_iteration)
    with pytest.raises(ConfigError, match="NaN"):
        RunConfig(graphs=graphs)
    training = TrainingConfig(check_for_nan_in_loss_and_grad=False)
    config = RunConfig(graphs=graphs, training=training)
    eager = dataclasses.replace(config, graphs=dataclasses.replace(graphs, impl=CudaGraphImpl.none))
    assert eager.graphs.impl is CudaGraphImpl.none


def test_numbers_are_converted() -> None:
    training = TrainingConfig(lr=1, train_iters=np.int64(5), weight_decay=np.float32(0.5))
    assert type(training.lr) is float
    assert type(training.train_iters) is int
    assert type(training.weight_decay) is float


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": "4"},
        {"num_layers": 4.0},
        {"num_layers": True},
        {"num_layers": 2**63},
        {"norm_epsilon": "1"},
        {"norm_epsilon": math.nan},
        {"norm_epsilon": math.inf},
        {"norm_epsilon": 10**400},
        {"swiglu": 1},
    ],
)
def test_wrong_types_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**change)  # type: ignore[arg-type]
    assert [problem.code for problem in caught.value.problems] == [f"{next(iter(change)).replace('_', '-')}-type"]


def test_wrong_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected text"):
        TrainingConfig(save=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="list of words"):
        DataConfig(data_path=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="list of words"):
        DataConfig(data_path=(1, 2))  # type: ignore[arg-type]


def test_all_problems_of_a_section_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(num_layers="x", hidden_dropout=2, hidden_size=10)  # type: ignore[arg-type]
    assert {problem.code for problem in caught.value.problems} == {
        "num-layers-type",
        "hidden-dropout-range",
        "heads-divide-hidden",
    }


def test_switches_take_words() -> None:
    graphs = CudaGraphConfig(impl="local", modules=["attn", "mlp", "attn"], inference_scope="block")  # type: ignore[arg-type]
    assert graphs.impl is CudaGraphImpl.local
    assert graphs.modules == (CudaGraphModule.attn, CudaGraphModule.mlp)
    assert graphs.inference_scope is InferenceCudaGraphScope.block
    assert CudaGraphConfig(modules="mlp").modules == (CudaGraphModule.mlp,)  # type: ignore[arg-type]


def test_policies_take_words() -> None:
    graphs = CudaGraphConfig(impl="local", policy="auto", on_mismatch="eager")  # type: ignore[arg-type]
    assert graphs.policy is CapturePolicy.auto
    assert graphs.on_mismatch is MismatchPolicy.eager
    assert [str(policy) for policy in CapturePolicy] == ["off", "auto", "required"]
    assert [str(policy) for policy in MismatchPolicy] == ["error", "eager", "recapture"]


def test_what_is_captured_is_required_and_other_signatures_are_captured_by_default() -> None:
    graphs = CudaGraphConfig(impl=CudaGraphImpl.local)
    assert (graphs.policy, graphs.on_mismatch) == (CapturePolicy.required, MismatchPolicy.recapture)
    assert (graphs.capture_after, graphs.max_signatures, graphs.merge_layers, graphs.debug) == (2, 8, 1, False)


@pytest.mark.parametrize("impl", CudaGraphImpl)
@pytest.mark.parametrize("policy", CapturePolicy)
def test_every_implementation_may_have_every_policy(impl: CudaGraphImpl, policy: CapturePolicy) -> None:
    assert CudaGraphConfig(impl=impl, policy=policy).policy is policy


def test_all_problems_of_the_switches_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        CudaGraphConfig(capture_after=0, max_signatures=True, merge_layers=-1, debug=1)  # type: ignore[arg-type]
    assert {problem.code for problem in caught.value.problems} == {
        "cuda-graph-capture-after-range",
        "cuda-graph-max-signatures-type",
        "cuda-graph-merge-layers-range",
        "cuda-graph-debug-type",
    }


def test_an_unknown_word_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean required"):
        CudaGraphConfig(policy="require")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean recapture"):
        CudaGraphConfig(on_mismatch="recaptured")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean full_iteration"):
        CudaGraphConfig(impl="full_iterations")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean attn"):
        CudaGraphConfig(modules=("atn",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("impl", "scope", "effective"),
    [
        ("none", None, "none"),
        ("local", None, "layer"),
        ("local", "block", "block"),
        ("transformer_engine", None, "none"),
        ("full_iteration", None, "none"),
    ],
)
def test_effective_inference_scope(impl: str, scope: str | None, effective: str) -> None:
    graphs = CudaGraphConfig(impl=impl, inference_scope=scope)  # type: ignore[arg-type]
    assert graphs.inference_scope == effective


@pytest.mark.parametrize(
    ("impl", "scope", "code"),
    [
        ("none", "layer", "inference-scope-needs-local"),
        ("full_iteration", "block", "inference-scope-needs-local"),
        ("local", "none", "inference-scope-none"),
    ],
)
def test_a_scope_that_does_not_fit_is_refused(impl: str, scope: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CudaGraphConfig(impl=impl, inference_scope=scope)  # type: ignore[arg-type]
    assert [problem.code for problem in caught.value.problems] == [code]


def test_router_and_preprocessing_are_captured_together_by_local() -> None:
    assert CudaGraphConfig(impl="local", modules="moe_preprocess").modules == ("moe_preprocess", "moe_router")  # type: ignore[arg-type]


def test_enums_are_text() -> None:
    assert str(CudaGraphImpl.local) == f"{CudaGraphImpl.local}" == CudaGraphImpl.local == "local"
    assert [module.value for module in CudaGraphModule] == [
        "attn",
        "mlp",
        "moe",
        "moe_router",
        "moe_preprocess",
        "mamba",
    ]


def test_split_weights() -> None:
    assert DataConfig(split="3,1").split_weights == (0.75, 0.25, 0.0)
    assert sum(DataConfig().split_weights) == pytest.approx(1.0)


def test_padded_vocab_size() -> None:
    data = DataConfig(make_vocab_size_divisible_by=128)
    assert [data.padded_vocab_size(size) for size in (1, 128, 257)] == [128, 128, 384]


def test_data_path_becomes_a_tuple() -> None:
    assert DataConfig(data_path="a.txt").data_path == ("a.txt",)  # type: ignore[arg-type]
    assert DataConfig(data_path=["a", "b"]).data_path == ("a", "b")  # type: ignore[arg-type]


def test_a_configuration_is_frozen_hashable_and_can_be_copied() -> None:
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_layers = 3  # type: ignore[misc]
    assert hash(config) == hash(RunConfig())
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_notices_and_origins_do_not_make_configurations_differ() -> None:
    config = RunConfig()
    assert dataclasses.replace(config, notices=(), origins={"num_layers": "option"}) == config
