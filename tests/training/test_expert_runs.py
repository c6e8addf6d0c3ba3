"""Training runs of models with experts and of hybrid models: each implementation equals eager training, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.doubles import EagerStrategy, MemoryLog, tiny_config
from torch import Tensor

from graphstep.capture.reasons import EagerReason
from graphstep.config import CudaGraphConfig, LayersConfig, MambaConfig, MoEConfig, RunConfig
from graphstep.errors import CheckpointError
from graphstep.models.moe import routers
from graphstep.training.compare import StepTrace, compare_with_eager
from graphstep.training.loop import Trainer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GROUPED = MoEConfig(num_experts=4, moe_ffn_hidden_size=16, moe_grouped_gemm=True, moe_aux_loss_coeff=0.02)
BIASED = dataclasses.replace(
    GROUPED,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="none",
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)
PADDED = dataclasses.replace(
    GROUPED, moe_grouped_gemm=False, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True
)
SEQUENTIAL = dataclasses.replace(GROUPED, moe_grouped_gemm=False, moe_z_loss_coeff=0.01)
MAMBA = MambaConfig(mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2)
PARTS = ("attn", "moe_router", "moe_preprocess")

FULL, LOCAL, TE = "full_iteration", "local", "transformer_engine"


@pytest.fixture(autouse=True)
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def config_of(
    moe: MoEConfig,
    *,
    pattern: str | None = None,
    impl: str = "none",
    modules: tuple[str, ...] = (),
    optimizer: bool = False,
    model: dict[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
    shape = {"num_layers": 2 if pattern is None else len(pattern), "add_bias_linear": False, "swiglu": True}
    # bf16, because the grouped product of a GPU reads nothing on the host in that type only.
    options = {"train_iters": 6, "lr": 1e-2, "bf16": True, "check_for_nan_in_loss_and_grad": False, "eval_iters": 1}
    options |= {"eval_interval": 2, "lr_warmup_iters": 0, **training}
    if options.get("device") == "cuda":
        options["deterministic_mode"] = True
    run = tiny_config(model={**shape, **(model or {})}, **options)
    return dataclasses.replace(
        run,
        moe=moe,
        mamba=MAMBA,
        layers=LayersConfig(hybrid_layer_pattern=pattern),
        graphs=CudaGraphConfig(impl=impl, modules=modules, warmup_steps=1, optimizer=optimizer),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("moe", "pattern", "impl", "modules"),
    [
        (GROUPED, None, FULL, ()),
        (GROUPED, None, LOCAL, ()),
        (GROUPED, None, TE, ()),
        (GROUPED, None, LOCAL, ("moe",)),
        (BIASED, None, FULL, ()),
        (BIASED, None, LOCAL, PARTS),
        (BIASED, None, TE, PARTS),
        (PADDED, None, FULL, ()),
        (PADDED, None, LOCAL, ("attn", "moe")),
        (SEQUENTIAL, None, LOCAL, PARTS),
        (SEQUENTIAL, None, TE, ("moe_router",)),
        (GROUPED, "M*-E", FULL, ()),
        (GROUPED, "M*-E", LOCAL, ()),
        (GROUPED, "M*-E", LOCAL, ("mamba", "attn", "moe_router")),
        (BIASED, "ME*E", TE, ("mamba", "moe")),
        (MoEConfig(), "M*-M", FULL, ()),
        (MoEConfig(), "M*-M", TE, ("mamba",)),
    ],
)
def test_graphed_training_equals_eager(
    moe: MoEConfig, pattern: str | None, impl: str, modules: tuple[str, ...], device: str
) -> None:
    """Losses, weights and biases of experts; with validation in between, which must leave counters alone."""
    config = config_of(moe, pattern=pattern, impl=impl, modules=modules, device=device)
    trace = StepTrace(6)
    with Trainer(config, on_step=trace.observe) as trainer:
        result = trainer.train()
        losses = [router.losses.clone() for router in routers(trainer.model)]
    assert sum(row.num_replays for row in result.report.rows) > 0
    comparison = compare_with_eager(config, trace)
    assert comparison.is_equal, str(comparison.difference)
    assert all(loss.count_nonzero() == 0 for loss in losses), "the last log interval has read them"


@pytest.mark.parametrize("impl", ["none", LOCAL, FULL])
def test_the_optimizer_graph_moves_the_biases_as_well(impl: str) -> None:
    config = config_of(BIASED, impl=impl, optimizer=True, eval_iters=0)
    trace = StepTrace(6)
    with Trainer(config, on_step=trace.observe) as trainer:
        trainer.train()
        biases = [router.expert_bias.clone() for router in routers(trainer.model)]
    assert compare_with_eager(config, trace).is_equal
    assert all(bias.any() for bias in biases)


def test_a_bias_moves_by_the_rate_each_step_towards_a_balanced_load() -> None:
    counts: list[list[Tensor]] = []

    def look(trainer: Trainer, _losses: Tensor) -> None:
        counts.append([router.tokens_per_expert.clone() for router in routers(trainer.model)])

    config = config_of(dataclasses.replace(BIASED, moe_router_bias_update_rate=0.25), eval_iters=0, train_iters=1)
    with Trainer(config, strategy_factory=EagerStrategy, on_step=look) as trainer:
        seen: list[Tensor] = []
        for router in routers(trainer.model):
            router.register_forward_hook(lambda _m, _i, output: seen.append(output[1].flatten()))
        trainer.train()
        found = [router.expert_bias for router in routers(trainer.model)]
    assert [int(count.sum()) for layer in counts for count in layer] == [0, 0], "the step has ended"
    for layer, bias in enumerate(found):
        chosen = torch.cat(seen[layer::2]).bincount(minlength=4).float()
        assert torch.equal(bias, 0.25 * torch.sign(chosen.mean() - chosen))


@pytest.mark.parametrize("impl", ["none", FULL])
def test_a_step_that_is_not_finite_leaves_the_biases_as_they_are(impl: str) -> None:
    def spoil(trainer: Trainer, _losses: Tensor) -> None:
        if trainer.iteration == 3:
            kept.extend(router.expert_bias.clone() for router in routers(trainer.model))
            with torch.no_grad():
                trainer.model.head.norm.weight[0] = float("nan")
        elif trainer.iteration == 4:
            found.extend(router.expert_bias.clone() for router in routers(trainer.model))
            raise InterruptedError

    kept: list[Tensor] = []
    found: list[Tensor] = []
    config = config_of(BIASED, impl=impl, optimizer=True, deferred_nan_check=True, eval_iters=0)
    with Trainer(config, on_step=spoil) as trainer, pytest.raises(InterruptedError):
        trainer.train()
    assert all(bias.any() for bias in kept)
    assert all(torch.equal(*pair) for pair in zip(kept, found, strict=True))


def test_validation_leaves_counters_alone() -> None:
    moe = dataclasses.replace(BIASED, moe_router_load_balancing_type="global_aux_loss", moe_z_loss_coeff=0.1)
    with Trainer(config_of(moe), strategy_factory=EagerStrategy) as trainer:
        router = routers(trainer.model)[0]
        for counter in (router.tokens_per_expert, router.losses):
            counter.fill_(7.0)
        trainer.validate()
        assert (router.tokens_per_expert == 7.0).all()
        assert (router.losses == 7.0).all()


def test_losses_of_routers_are_in_the_log_as_means_over_the_interval() -> None:
    sums: list[Tensor] = []

    def look(trainer: Trainer, _losses: Tensor) -> None:
        sums.append(torch.stack([router.losses.clone() for router in routers(trainer.model)]))

    log = MemoryLog()
    with Trainer(config_of(SEQUENTIAL, train_iters=4), strategy_factory=EagerStrategy, on_step=look) as trainer:
        trainer._log = log
        trainer.train()
    lines = [values for event, values in log.events if event == "train"]
    assert [line["iteration"] for line in lines] == [2, 4]
    for line, sum_ in zip(lines, sums[1::2], strict=True):
        assert sum_[:, 2].tolist() == [4.0, 4.0], "two steps of two microbatches"
        means = (sum_ / 4.0).mean(0)
        assert line["load_balancing_loss"] == pytest.approx(float(means[0]), rel=1e-6)
        assert line["z_loss"] == pytest.approx(float(means[1]), rel=1e-6)
    assert list(lines[0])[2:5] == ["loss", "load_balancing_loss", "z_loss"]


def test_a_model_without_router_losses_logs_none() -> None:
    for moe in (MoEConfig(), BIASED):
        log = MemoryLog()
        with Trainer(config_of(moe, train_iters=2), strategy_factory=EagerStrategy) as trainer:
            trainer._log = log
            trainer.train()
        [line] = [values for event, values in log.events if event == "train"]
        assert not {"load_balancing_loss", "z_loss"} & line.keys()


@pytest.mark.parametrize("impl", ["none", LOCAL, FULL])
@pytest.mark.parametrize("pattern", [None, "ME*-"])
def test_resumed_equals_uninterrupted(tmp_path: Path, impl: str, pattern: str | None) -> None:
    moe = dataclasses.replace(BIASED, moe_router_load_balancing_type="global_aux_loss")

    def trained(num_steps: int | None = None, **options: Any) -> dict[str, Tensor]:
        with Trainer(config_of(moe, pattern=pattern, impl=impl, **options)) as trainer:
            trainer.train(num_steps)
            return {name: tensor.clone() for name, tensor in trainer.weights().items()}

    whole = trained()
    trained(3, save=str(tmp_path))
    resumed = trained(load=str(tmp_path))
    assert any("expert_bias" in name for name in whole)
    assert [name for name, tensor in whole.items() if not torch.equal(tensor, resumed[name])] == []


def test_another_kind_of_layers_is_refused_by_the_option(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_iters": 0}
    with Trainer(config_of(GROUPED, save=str(tmp_path), **options)) as trainer:
        trainer.train(1)
    other = dataclasses.replace(GROUPED, num_experts=8)
    for moe, pattern, flags in (
        (MoEConfig(), None, ["--num-experts"]),
        (other, None, ["--num-experts"]),
        (GROUPED, "E*", ["--hybrid-layer-pattern"]),
    ):
        with pytest.raises(CheckpointError) as caught:
            Trainer(config_of(moe, pattern=pattern, load=str(tmp_path), **options))
        assert [problem.what.split()[0] for problem in caught.value.problems] == flags


def test_another_precision_is_refused_by_its_option_though_biases_are_always_fp32(tmp_path: Path) -> None:
    with Trainer(config_of(BIASED, save=str(tmp_path), eval_iters=0)) as trainer:
        trainer.train(1)
    with pytest.raises(CheckpointError) as caught:
        Trainer(config_of(BIASED, load=str(tmp_path), eval_iters=0, bf16=False))
    assert [problem.what for problem in caught.value.problems] == ["--bf16 is off here and on in the checkpoint"]


def test_a_checkpoint_of_before_there_were_experts_still_loads(tmp_path: Path) -> None:
    """Its architecture names nothing of experts, patterns or Mamba layers."""
    with Trainer(config_of(MoEConfig(), save=str(tmp_path), eval_iters=0)) as trainer:
        trainer.train(1)
    [path] = tmp_path.glob("iter_*/state.json")
    assert not any(word in json.loads(path.read_text())["architecture"] for word in ("num_experts", "moe_router_topk"))
    with Trainer(config_of(MoEConfig(), load=str(tmp_path), eval_iters=0)) as trainer:
        assert trainer.iteration == 1


def test_dynamic_experts_stay_eager_where_that_is_allowed() -> None:
    config = config_of(SEQUENTIAL, pattern="*E")
    config = dataclasses.replace(config, graphs=CudaGraphConfig(impl="local", policy="auto", warmup_steps=1))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="layers.1"), Trainer(config) as trainer:
        result = trainer.train()
    by_name = {row.name: row for row in result.report.rows}
    assert by_name["layers.0"].num_replays > 0
    assert by_name["layers.1"].num_replays == 0
    assert EagerReason.CAPTURE_FAILED in by_name["layers.1"].eager_calls
