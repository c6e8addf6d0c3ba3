"""Which layers a model has, and models that have them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.tiny import LLAMA, TINY, gradients, tiny_batch, tiny_model
from torch import Tensor

from graphstep.config import LayersConfig, MambaConfig, ModelConfig, MoEConfig
from graphstep.engine import Engine, engine_for
from graphstep.errors import ConfigError
from graphstep.models import AttentionLayer, GPTModel, MLPLayer, TransformerLayer, build_layers
from graphstep.models.mamba import MambaLayer
from graphstep.models.moe import MoELayer, MoETransformerLayer, read_and_reset_losses, routers

MOE = MoEConfig(num_experts=4, moe_ffn_hidden_size=16, moe_grouped_gemm=True)
MAMBA = MambaConfig(mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2)
HYBRID = replace(LLAMA, num_layers=4)
PATTERN = LayersConfig(hybrid_layer_pattern="M*-E")
EXPERTS = replace(LLAMA, num_layers=2)


def kinds(config: ModelConfig, **parts: Any) -> list[type]:
    return [type(layer) for layer in build_layers(config, device="meta", **parts)]


def hybrid_model(moe: MoEConfig = MOE, **options: Any) -> GPTModel:
    return tiny_model(HYBRID, moe=moe, layers=PATTERN, mamba=MAMBA, **options)


def test_each_layer_is_attention_and_mlp_without_anything_else() -> None:
    assert kinds(TINY) == [TransformerLayer] * 2
    assert kinds(TINY, moe=MoEConfig(), layers=LayersConfig()) == [TransformerLayer] * 2


@pytest.mark.parametrize(("freq", "expected"), [(1, "EEEE"), (2, "EDED"), ((0, 1, 1, 0), "DEED"), ((0,) * 4, "DDDD")])
def test_the_frequency_says_which_layers_have_experts(freq: int | tuple[int, ...], expected: str) -> None:
    config = replace(LLAMA, num_layers=4)
    classes = {"D": TransformerLayer, "E": MoETransformerLayer}
    assert kinds(config, moe=replace(MOE, moe_layer_freq=freq)) == [classes[letter] for letter in expected]


def test_a_pattern_says_which_layers_there_are() -> None:
    config = replace(LLAMA, num_layers=5)
    layers = LayersConfig(hybrid_layer_pattern="M*-EM")
    expected = [MambaLayer, AttentionLayer, MLPLayer, MoELayer, MambaLayer]
    assert kinds(config, moe=MOE, layers=layers, mamba=MAMBA) == expected
    model = GPTModel(config, moe=MOE, layers=layers, mamba=MAMBA, device="meta")
    kinds_of = [[segment.kind for segment in layer.segments()] for layer in model.layers]
    assert kinds_of[:3] == [["mamba"], ["attn"], ["mlp"]]


@pytest.mark.parametrize(
    ("num_layers", "pattern", "moe", "codes"),
    [
        (2, "MG", MOE, ["model-layer-letter"]),
        (2, "M|M", MOE, ["model-layer-letter"]),
        (3, "M*", MOE, ["model-num-layers"]),
        (2, "ME", MoEConfig(), ["model-no-experts"]),
        (3, "GE", MoEConfig(), ["model-num-layers", "model-layer-letter", "model-no-experts"]),
        (2, "ME", MoEConfig(num_experts=1, moe_router_pre_softmax=True), ["topk-exceeds-experts"]),
        (2, None, MoEConfig(num_experts=1), ["topk-exceeds-experts"]),
        (2, None, replace(MOE, moe_layer_freq=(1, 0, 1)), ["model-num-layers"]),
    ],
)
def test_what_does_not_fit_is_said_all_at_once(
    num_layers: int, pattern: str | None, moe: MoEConfig, codes: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        kinds(replace(LLAMA, num_layers=num_layers), moe=moe, layers=LayersConfig(hybrid_layer_pattern=pattern))
    assert [problem.code for problem in caught.value.problems] == codes


def test_attention_and_mlp_alone_are_the_halves_of_a_transformer_layer() -> None:
    """Equal weights, one after the other: bitwise, because the operations are the same."""
    whole = tiny_model(LLAMA).layers[0]
    first, second = (kind(LLAMA) for kind in (AttentionLayer, MLPLayer))
    first.load_state_dict({k: v for k, v in whole.state_dict().items() if k.startswith("attention")})
    second.load_state_dict({k: v for k, v in whole.state_dict().items() if k.startswith("mlp")})
    hidden = torch.randn(2, 12, 32)
    context = tiny_model(LLAMA).rotary(12, torch.float32)
    assert torch.equal(second(first(hidden, *context), *context), whole(hidden, *context))


def test_dropout_of_the_halves_is_off_in_evaluation() -> None:
    config = replace(TINY, hidden_dropout=0.5)
    hidden = torch.randn(2, 12, 32)
    for layer in (AttentionLayer(config), MLPLayer(config)):
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        assert not torch.equal(layer(hidden), layer(hidden))
        layer.eval()
        assert torch.equal(layer(hidden), layer(hidden))


def test_every_weight_of_a_hybrid_model_gets_a_gradient() -> None:
    model = hybrid_model(replace(MOE, moe_aux_loss_coeff=0.1))
    model(**tiny_batch(HYBRID)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_a_hybrid_model_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPTModel(HYBRID, moe=MOE, layers=PATTERN, mamba=MAMBA)
        tokens = torch.empty(2, 12, dtype=torch.int64)
        model(tokens, tokens).backward()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_later_token_does_not_change_earlier_logits() -> None:
    model = tiny_model(replace(HYBRID, init_method_std=0.2), moe=MOE, layers=PATTERN, mamba=MAMBA)
    tokens = tiny_batch(HYBRID)["tokens_BS"]
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 40
    # Another number of rows of an expert is another product: rounding may differ.
    torch.testing.assert_close(model(changed)[:, :6], model(tokens)[:, :6])
    assert not torch.allclose(model(changed)[:, 6:], model(tokens)[:, 6:])


AUXILIARY = replace(MOE, moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.25)


def router_gradients(moe: MoEConfig, factor: float = 1.0) -> list[Tensor]:
    model = tiny_model(EXPERTS, moe=moe)
    (model(**tiny_batch(EXPERTS)) * factor).backward()
    return [router.weight.grad for router in routers(model)]


def test_the_value_of_the_loss_is_the_cross_entropy_alone() -> None:
    batch = tiny_batch(EXPERTS)
    assert torch.equal(tiny_model(EXPERTS, moe=AUXILIARY)(**batch), tiny_model(EXPERTS, moe=MOE)(**batch))


@pytest.mark.parametrize("factor", [1.0, 0.25, 1024.0])
def test_gradients_of_router_losses_follow_the_scale_of_the_loss(factor: float) -> None:
    """Powers of two scale without rounding: bitwise."""
    plain, scaled = router_gradients(AUXILIARY), router_gradients(AUXILIARY, factor)
    assert all(torch.equal(one * factor, other) for one, other in zip(plain, scaled, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(plain, router_gradients(MOE), strict=True))


def test_gradients_of_router_losses_are_those_of_a_sum_of_losses() -> None:
    """Against the gradient of cross entropy and both losses added up by hand, computed from the routers' inputs."""
    model, batch = tiny_model(EXPERTS, moe=AUXILIARY), tiny_batch(EXPERTS)
    reference = tiny_model(EXPERTS, moe=MOE)
    losses: list[Tensor] = []

    def add_losses(router: torch.nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        logits_TE = inputs[0].flatten(0, -2) @ router.weight.t()
        shares_E = torch.nn.functional.one_hot(output[1], 4).sum((0, 1)) / output[1].numel()
        losses.append(0.5 * 4 * (logits_TE.softmax(-1).mean(0) * shares_E).sum())
        losses.append(0.25 * logits_TE.logsumexp(-1).square().mean())

    for router in routers(reference):
        router.register_forward_hook(add_losses)
    loss = reference(**batch)
    (loss + sum(losses)).backward()
    model(**batch).backward()
    expected = gradients(reference)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_models_do_not_share_the_scale_of_router_losses() -> None:
    one = tiny_model(EXPERTS, moe=AUXILIARY)
    other = copy.deepcopy(one)
    (one(**tiny_batch(EXPERTS)) * 8.0).backward()
    assert (one.auxiliary_scale.value, other.auxiliary_scale.value) == (8.0, 1.0)
    (other(**tiny_batch(EXPERTS)) * 2.0).backward()
    assert (one.auxiliary_scale.value, other.auxiliary_scale.value) == (8.0, 2.0)


def test_a_model_without_routers_has_nothing_for_their_losses() -> None:
    model = tiny_model(TINY)
    assert model.auxiliary_scale is None
    assert model(**tiny_batch()).grad_fn.name() != "_MarkBackward"


def test_counters_are_no_state_that_is_saved_except_biases() -> None:
    moe = replace(AUXILIARY, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    names = tiny_model(EXPERTS, moe=moe).state_dict().keys()
    assert {name.rsplit(".", 1)[1] for name in names if ".router." in name} == {"weight", "expert_bias"}
    assert not any("scale" in name for name in names)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    built = engine_for(torch.device(request.param))
    yield built
    built.close()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_replays_of_a_hybrid_model_equal_eager(engine: Engine, dropout: float) -> None:
    """bf16, because the grouped product of a GPU reads nothing on the host in that type only."""
    config = replace(HYBRID, hidden_dropout=dropout, attention_dropout=dropout)
    parts = {"moe": AUXILIARY, "layers": PATTERN, "mamba": MAMBA, "device": engine.device, "dtype": torch.bfloat16}
    captured, eager = (tiny_model(config, **parts) for _ in range(2))
    batches = [{k: v.to(engine.device) for k, v in tiny_batch(config, seed=s).items()} for s in range(3)]
    static = {name: value.clone() for name, value in batches[0].items()}

    def step(model: GPTModel, batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch)
        loss.backward()
        return loss.detach()

    with engine.capture_stream():
        step(captured, static)
        captured.zero_grad(set_to_none=False)
        read_and_reset_losses(captured)
        recording = engine.capture(lambda: step(captured, static))
    torch.manual_seed(5)
    eager_losses = [step(eager, batch).item() for batch in batches]
    replayed = []
    torch.manual_seed(5)
    for batch in batches:
        for name, value in batch.items():
            static[name].copy_(value)
        recording.replay()
        engine.synchronize()
        replayed.append(recording.result.item())
    assert replayed == eager_losses
    expected = gradients(eager)
    assert [n for n, gradient in gradients(captured).items() if not torch.equal(gradient, expected[n])] == []
    mine, theirs = read_and_reset_losses(captured), read_and_reset_losses(eager)
    assert mine.keys() == theirs.keys() == {"load_balancing_loss", "z_loss"}
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
