"""Layers captured for the order of a schedule: the same bits as eager training, and no replay out of turn."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import Frozen, RecomputedMlp, TiedWeights
from tests.strategies.models import Decoder, Wrapped, in_order
from tests.strategies.runs import Run, compared, insist_on_the_same_bits, steps
from torch import Tensor, nn

from graphstep.config import CudaGraphConfig
from graphstep.errors import CaptureError, ConfigError, InputMismatchError, LifecycleError, PlanError, StaleAddressError
from graphstep.strategies import TECudaGraphHelper
from graphstep.strategies.pipeline_order import pipeline_order

TE = "transformer_engine"
THREE = partial(Decoder, 3, 0.1)
KINDS: dict[str, Callable[[], nn.Module]] = {
    "dense": Decoder,
    "dropout": THREE,
    "recompute inside": partial(Decoder, layer=RecomputedMlp),
    "frozen": Frozen,
    "tied": TiedWeights,
}


# ----- the strategy of the training loop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_as_without_graphs(
    device: torch.device, kind: str, num_microbatches: int, dtype: torch.dtype
) -> None:
    def script(run: Run) -> None:
        for _ in range(6):
            run.step(num_microbatches)
            run.evaluate(2)

    run = compared(device, TE, script, build=lambda: KINDS[kind]().to(dtype), warmup_steps=2)
    assert run.num_replays == len(run.model.layers) * 4 * num_microbatches


@pytest.mark.parametrize("zero", ["none", "zeros", "buffers"])
@pytest.mark.parametrize("modules", [("attn",), ("mlp",), ("attn", "mlp")], ids=" ".join)
def test_parts_of_layers(device: torch.device, modules: Any, zero: str) -> None:
    config = CudaGraphConfig(impl=TE, modules=modules)
    twins(device, "fb", (1, -1), config=config, num_microbatches=1, zero=zero)


def test_the_number_of_microbatches_may_change(device: torch.device) -> None:
    def script(run: Run) -> None:
        for number in (2, 2, 1, 4, 3):
            run.step(number)

    run = compared(device, TE, script, build=THREE, warmup_steps=1)
    assert run.num_replays == 3 * (2 + 1 + 4 + 3)


def test_without_warmup_the_first_step_is_recorded_with_a_warning(device: torch.device) -> None:
    with pytest.warns(UserWarning, match="cuda-graph-warmup-steps 0"):
        run = compared(device, TE, steps(4), build=THREE, warmup_steps=0)
    assert run.num_replays == 3 * 3


def test_several_microbatches_in_flight_are_refused_by_the_order_of_a_single_stage(device: torch.device) -> None:
    run = Run(device, TE, build=THREE, warmup_steps=1, forward_backward=in_order("ffbb"))
    run.step(2)
    with pytest.raises(PlanError, match="expected the backward of the layers for microbatch 0") as caught:
        run.step(2)
    assert "the forward of layers.0" in caught.value.what
    run.strategy.close()


# ----- a loop of one's own


def twins(
    device: torch.device,
    word: str,
    order: Any,
    *,
    config: CudaGraphConfig | None = None,
    num_microbatches: int = 0,
    build: Callable[[], nn.Module] = THREE,
    zero: str = "none",
) -> TECudaGraphHelper:
    """A loop that runs forwards and backwards as the word says, eagerly and with a helper; gives the helper, closed."""
    number = num_microbatches or word.lower().count("f")
    runs = []
    helper: TECudaGraphHelper | None = None
    for is_graphed in (False, True):
        run = Run(device, "none", build=build, forward_backward=in_order(word), zero=zero)
        if is_graphed:
            helper = TECudaGraphHelper(run.model, config or CudaGraphConfig(impl=TE), 6, 2, order=order)
        for number_of_step in range(7):
            if helper is not None and is_graphed and number_of_step == 2:
                helper.create_cudagraphs()
            run.step(number)
            if number_of_step == 4:
                run.evaluate(2)
        runs.append(run)
    insist_on_the_same_bits(*runs)
    assert helper is not None
    assert sum(row.num_replays for row in helper.report().rows) == len(helper.report().rows) * 5 * number
    return helper


@pytest.mark.parametrize(
    ("word", "order", "in_flight"),
    [
        ("fb", (1, -1), 1),
        ("ffbb", (1, 1, -1, -1), 2),
        ("ffbfbb", (1, 1, -1, 1, -1, -1), 2),
        ("fffbfbfbbb", (1, 1, 1, -1, 1, -1, 1, -1, -1, -1), 3),
    ],
)
def test_the_order_of_a_stage(device: torch.device, word: str, order: Any, in_flight: int) -> None:
    helper = twins(device, word, order)
    assert helper.num_buffer_sets == (in_flight,)
    assert [row.num_recordings for row in helper.report().rows] == [2 * in_flight] * 3
    helper.delete_cuda_graphs()


@pytest.mark.parametrize("num_microbatches", [16, 64, 256])
@pytest.mark.parametrize("rank", range(4))
def test_buffers_do_not_grow_with_the_number_of_microbatches(rank: int, num_microbatches: int) -> None:
    run = Run(torch.device("cpu"), "none", build=Decoder)
    order = pipeline_order(num_microbatches, pipeline_size=4, pipeline_rank=rank)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE, warmup_steps=1), 6, 2, order=order)
    run.step(1)
    helper.create_cudagraphs()
    assert helper.num_buffer_sets == (4 - rank,)
    assert [row.num_recordings for row in helper.report().rows] == [2 * (4 - rank)] * 2
    helper.delete_cuda_graphs()


@pytest.mark.parametrize("wrong", ["fffbbb", "fbfbfb", "ffBfbb"])
def test_what_is_out_of_turn_is_refused(device: torch.device, wrong: str) -> None:
    run = Run(device, "none", build=THREE, forward_backward=in_order("ffbfbb"))
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2, order=(1, 1, -1, 1, -1, -1))
    run.step(3)
    helper.create_cudagraphs()
    run.step(3)
    wrong_run = Run(device, "none", forward_backward=in_order(wrong))
    with pytest.raises(PlanError, match=r"expected the .* came"):
        wrong_run.strategy._function(  # type: ignore[attr-defined]
            data_iterator=iter([{k: v.to(device) for k, v in run.batch().items()} for _ in range(3)]),
            model=run.model,
            num_microbatches=3,
        )
    gc.collect()  # The error holds the results of the step.
    run.step(3)  # The step that was given up does not matter any more.
    helper.delete_cuda_graphs()


def test_several_chunks(device: torch.device) -> None:
    """Two chunks of one rank, whose activations go through the caller's hands."""

    class Chunk(Decoder):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            for layer in self.layers:
                x = layer(x)
            return x

    order = (1, 1, 2, 2, -2, -2, -1, -1)
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        chunks = [Chunk(2, 0.1).to(device), Chunk(2, 0.1).to(device)]
        config = CudaGraphConfig(impl=TE)
        helper = TECudaGraphHelper(chunks, config, 6, 2, order=order) if is_graphed else None
        found: list[Tensor] = []
        for step in range(5):
            if helper is not None and step == 1:
                helper.create_cudagraphs()
            inputs = [torch.randn(2, 6, 16, device=device, requires_grad=True) for _ in range(2)]
            middle = [chunks[0](x) for x in inputs]
            handed = [x.detach().requires_grad_() for x in middle]
            out = [chunks[1](x) for x in handed]
            for each in out:
                each.square().mean().backward()
            for x, y in zip(middle, handed, strict=True):
                x.backward(y.grad)
            found += [x.grad for x in inputs if x.grad is not None]
            found += [p.grad.clone() for c in chunks for p in c.parameters() if p.grad is not None]
            found += [torch.rand(2), torch.rand(2, device=device)]
            del middle, handed, out
        results.append(found)
        if helper is not None:
            assert helper.num_buffer_sets == (2, 2)
            # `x` and `each` still hold results when the next step begins: one call runs eagerly, then they are copies.
            assert all(row.num_replays >= 7 for row in helper.report().rows)
            helper.delete_cuda_graphs()
    assert len(results[0]) == len(results[1])
    assert [n for n, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)] == []


def test_manual_hooks_run_before_each_replay(device: torch.device) -> None:
    seen: list[nn.Module] = []
    run = Run(device, "none", build=Decoder)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2)
    with pytest.raises(LifecycleError, match="no graphs"):
        helper.cuda_graph_set_manual_hooks(seen.append)
    run.step(1)
    helper.create_cudagraphs()
    helper.cuda_graph_set_manual_hooks(seen.append)
    assert seen == []
    run.step(2)
    own = [m for layer in run.model.layers for m in layer.modules() if [*m.parameters(recurse=False)]]
    assert seen == own * 2
    helper.cuda_graph_set_manual_hooks()
    run.step(1)
    assert seen == own * 2
    helper.delete_cuda_graphs()


def train_with(
    device: torch.device, word: str, order: Any, change: Callable[[Run], Any], build: Callable[[], nn.Module] = THREE
) -> TECudaGraphHelper:
    """Steps in order, with a change to the model after the capture; gives the helper, closed."""
    runs = []
    for is_graphed in (False, True):
        run = Run(device, "none", build=build, forward_backward=in_order(word))
        helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2, order=order) if is_graphed else None
        for step in range(6):
            if helper is not None and step == 1:
                helper.create_cudagraphs()
            if step == 3:
                change(run)
            run.step(word.count("f"))
        runs.append(run)
    insist_on_the_same_bits(*runs)
    assert helper is not None
    return helper


def evaluate_layer(run: Run, index: int) -> None:
    run.model.layers[index].eval()


def change_dropout(run: Run) -> None:
    for layer in run.model.layers:
        layer.dropout = 0.3


def keep_results(run: Run, index: int) -> None:
    kept: list[Any] = []

    def keep(_module: nn.Module, _inputs: object, result: Tensor) -> None:
        kept.append(result)
        del kept[:-2]

    run.model.layers[index].register_forward_hook(keep)


@pytest.mark.parametrize(("word", "order"), [("fb", (1, -1)), ("ffbfbb", (1, 1, -1, 1, -1, -1))])
@pytest.mark.parametrize(
    "change",
    [
        *(partial(evaluate_layer, index=index) for index in (0, 1)),
        change_dropout,
        *(partial(keep_results, index=index) for index in range(3)),
    ],
    ids=["evaluate 0", "evaluate 1", "dropout", "keep 0", "keep 1", "keep 2"],
)
def test_layers_that_run_eagerly_keep_their_turn(device: torch.device, change: Any, word: str, order: Any) -> None:
    helper = train_with(device, word, order, change)
    assert sum(row.num_replays for row in helper.report().rows) > 0
    helper.delete_cuda_graphs()


def test_a_layer_that_has_two_turns_is_refused(device: torch.device) -> None:
    run = Run(device, "none", build=partial(Decoder, order=(0, 1, 0)))
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2)
    run.step(1)
    with pytest.raises(CaptureError, match=r"several times in a microbatch: layers\.0;"):
        helper.create_cudagraphs()
    helper.delete_cuda_graphs()
    chunks = [Decoder(), Decoder()]
    chunks[1].layers[1] = chunks[0].layers[0]
    with pytest.raises(ConfigError, match="chunk 2 has a layer of an earlier one"):
        TECudaGraphHelper(chunks, CudaGraphConfig(impl=TE), 6, 2)


# ----- lifetimes


def test_the_calls_of_the_helper_in_order(device: torch.device) -> None:
    run = Run(device, "none", build=THREE)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2)
    assert not helper.capture_finished()
    assert not helper.graphs_created()
    assert not helper.is_recorded
    with pytest.raises(LifecycleError, match=r"no forward and backward was seen of layers\.0, layers\.1, layers\.2"):
        helper.create_cudagraphs()
    run.step(1)
    assert helper.is_recorded
    helper.create_cudagraphs()
    helper.create_cudagraphs()
    assert helper.capture_finished()
    assert helper.graphs_created()
    helper.delete_cuda_graphs()
    helper.delete_cuda_graphs()
    assert helper.capture_finished()
    assert not helper.graphs_created()
    assert [row.num_replays for row in helper.report().rows] == [0, 0, 0]
    for call in (helper.create_cudagraphs, helper.cuda_graph_set_manual_hooks):
        with pytest.raises(LifecycleError, match="delete_cuda_graphs") as caught:
            call()
        assert "make a new TECudaGraphHelper" in caught.value.fix
    run.step(1)
    assert all("forward" not in layer.__dict__ for layer in run.model.layers)


def test_a_forward_that_ran_eagerly_before_the_capture_keeps_its_backward(device: torch.device) -> None:
    run = Run(device, "none", build=THREE)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2)
    run.step(1)
    batch = {name: tensor.to(device) for name, tensor in run.batch().items()}
    loss = run.model(batch["tokens"], batch["labels"])
    assert helper.is_recorded
    helper.create_cudagraphs()
    run.optimizer.zero_grad()
    loss.backward()
    expected = [p.grad.clone() for p in run.model.parameters() if p.grad is not None]
    assert expected
    assert any(gradient.any() for gradient in expected)
    assert sum(row.num_replays for row in helper.report().rows) == 0
    helper.delete_cuda_graphs()


def test_layers_inside_wrappers_are_found(device: torch.device) -> None:
    def build() -> nn.Module:
        model = Decoder()
        model.layers = nn.ModuleList(Wrapped(layer) for layer in model.layers)
        return model

    helper = twins(device, "fb", (1, -1), build=build)
    assert [row.name for row in helper.report().rows] == ["layers.0.inner", "layers.1.inner"]
    helper.delete_cuda_graphs()


def test_no_layers_is_an_error() -> None:
    with pytest.raises(ConfigError):
        TECudaGraphHelper(nn.Linear(2, 2), CudaGraphConfig(impl=TE), 6, 2)
    with pytest.raises(ConfigError, match="there is no model chunk"):
        TECudaGraphHelper([], CudaGraphConfig(impl=TE), 6, 2)
    with pytest.raises(ConfigError):
        TECudaGraphHelper(Decoder(), CudaGraphConfig(impl="local"), 6, 2)


def test_a_chunk_without_layers_is_told(device: torch.device) -> None:
    chunks = [Decoder().to(device), nn.Linear(2, 2, device=device)]
    with pytest.warns(UserWarning, match="no layer of model chunk 2 is captured") as caught:
        helper = TECudaGraphHelper(chunks, CudaGraphConfig(impl=TE), 6, 2, num_microbatches=2)
    assert [warning.filename for warning in caught] == [__file__]
    helper.delete_cuda_graphs()


@pytest.mark.parametrize(
    "sizes", [{"num_microbatches": 2}, {"pipeline_size": 2}, {"pipeline_rank": 1}, {"microbatch_group_size": 1}]
)
def test_an_order_and_numbers_are_not_given_together(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="order says what the numbers"):
        TECudaGraphHelper(Decoder(), CudaGraphConfig(impl=TE), 6, 2, order=(1, -1), **sizes)


def test_other_sizes_than_told_are_named(device: torch.device) -> None:
    run = Run(device, "none", build=Decoder)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 12, 2)
    run.step(1)
    with pytest.raises(InputMismatchError, match="the sequence length 12") as caught:
        helper.create_cudagraphs()
    assert caught.value.where == "layers.0, layers.1"
    run.step(1, length=12)
    helper.create_cudagraphs()
    helper.delete_cuda_graphs()


def test_replaced_weights_are_named(device: torch.device) -> None:
    run = Run(device, "none", build=Decoder)
    helper = TECudaGraphHelper(run.model, CudaGraphConfig(impl=TE), 6, 2)
    run.step(1)
    helper.create_cudagraphs()
    linear = run.model.layers[1].mlp[1]
    linear.weight = nn.Parameter(linear.weight.detach().clone())
    with pytest.raises(StaleAddressError, match=r"layers\.1\.mlp\.1\.weight"):
        run.step(1)
    helper.delete_cuda_graphs()
