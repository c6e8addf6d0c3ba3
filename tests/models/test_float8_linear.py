"""The fp8 layer by itself: numbers, state, sizes, devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphstep.engine import torch_private
from graphstep.errors import ConfigError
from graphstep.models import DelayedScaling, Float8Linear, mark_first_microbatch, reduce_amax
from graphstep.models.float8_linear import GRADIENT, INPUT, WEIGHT

SHORT = DelayedScaling(amax_history_len=3)


def quantised(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What the fp8 copy stands for, as float32."""
    largest = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


def step(layer: Float8Linear, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Result and gradients of one forward and backward."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    result = layer(x)
    result.backward(gradient)
    found = [result.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [each.clone() for each in found if each is not None]


@pytest.mark.parametrize(
    "recipe", [SHORT, DelayedScaling(fp8_format="e4m3", margin=1, amax_compute_algo="most_recent")]
)
@pytest.mark.parametrize("num_rows", [16, 5])
def test_three_products_of_quantised_numbers(recipe: DelayedScaling, num_rows: int) -> None:
    layer = Float8Linear(32, 16, recipe=recipe)
    amax = dict.fromkeys((INPUT, WEIGHT, GRADIENT), 0.0)
    scales = dict.fromkeys(amax, 1.0)
    backward = recipe.backward_dtype
    for turn in range(4):
        x, gradient = torch.randn(num_rows, 32) * (turn + 1), torch.randn(num_rows, 16) * 10.0**-turn
        for place, dtype in ((INPUT, torch.float8_e4m3fn), (WEIGHT, torch.float8_e4m3fn), (GRADIENT, backward)):
            if amax[place]:
                scales[place] = (torch.tensor(recipe.target(dtype)) / amax[place]).item()
        result, grad_x, grad_weight, grad_bias = step(layer, x, gradient)
        assert layer.scale.tolist() == list(scales.values())
        x8 = quantised(x, scales[INPUT], torch.float8_e4m3fn)
        w8 = quantised(layer.weight.detach(), scales[WEIGHT], torch.float8_e4m3fn)
        g8 = quantised(gradient, scales[GRADIENT], backward)
        # Sums of a few dozen products in another order.
        for found, expected in (
            (result, x8 @ w8.t() + layer.bias.detach()),
            (grad_x, g8 @ w8),
            (grad_weight, g8.t() @ x8),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        torch.testing.assert_close(grad_bias, gradient.sum(0))
        for place, tensor in ((INPUT, x), (WEIGHT, layer.weight), (GRADIENT, gradient)):
            newest = tensor.abs().max().item()
            amax[place] = max(amax[place], newest) if recipe.amax_compute_algo == "max" else newest


def test_it_comes_close_to_a_linear_layer_once_scaled() -> None:
    layer = Float8Linear(64, 32, recipe=SHORT)
    exact = nn.Linear(64, 32)
    exact.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    x, gradient = torch.randn(64, 64), torch.randn(64, 32) * 1e-6
    step(layer, x, gradient)
    found = step(layer, x, gradient)
    given = x.clone().requires_grad_()
    exact(given).backward(gradient)
    for mine, theirs in zip(found[1:], (given.grad, exact.weight.grad, exact.bias.grad), strict=True):
        assert theirs is not None
        # Two and three bits of mantissa: an eighth, and a sixteenth.
        assert float((mine - theirs).norm() / theirs.norm()) < 0.1


def test_the_weight_is_quantised_once_a_step() -> None:
    layer = Float8Linear(16, 16, recipe=SHORT, caches_weight=True)
    x = torch.randn(16, 16)
    first = layer(x)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    assert torch.equal(layer(x), first)
    mark_first_microbatch(layer)
    assert not torch.equal(layer(x), first)


def test_a_step_opens_one_entry_whatever_the_number_of_microbatches() -> None:
    layer = Float8Linear(16, 16, recipe=SHORT, caches_weight=True)
    for turn in range(2):
        mark_first_microbatch(layer)
        for size in (1.0, 3.0, 2.0):
            step(layer, torch.full((16, 16), size + turn), torch.full((16, 16), 10 * (size + turn)))
    assert layer.amax_history[:, INPUT].tolist() == [4.0, 3.0, 0.0]
    assert layer.amax_history[:, GRADIENT].tolist() == [40.0, 30.0, 0.0]


def test_without_a_cache_each_forward_in_training_is_a_step() -> None:
    layer = Float8Linear(16, 16, recipe=SHORT)
    for size in (1.0, 3.0):
        layer(torch.full((16, 16), size))
    assert layer.amax_history[:, INPUT].tolist() == [3.0, 1.0, 0.0]


@pytest.mark.parametrize("caches", [False, True])
def test_evaluation_writes_nothing_and_sees_the_weight_of_now(caches: bool) -> None:
    layer = Float8Linear(16, 16, recipe=SHORT, caches_weight=caches)
    x = torch.randn(16, 16)
    layer(x)
    layer.eval()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    first = layer(x)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    assert not torch.equal(layer(x), first)
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


def test_recompute_uses_the_scales_of_the_step() -> None:
    plain = Float8Linear(16, 16, recipe=SHORT, caches_weight=True)
    recomputed = copy.deepcopy(plain)
    for _ in range(4):
        x, gradient = torch.randn(16, 16), torch.randn(16, 16)
        found = []
        for layer in (plain, recomputed):
            mark_first_microbatch(layer)
            layer.zero_grad()
            given = x.clone().requires_grad_()
            call = layer if layer is plain else lambda t: checkpoint(recomputed, t, use_reentrant=False)
            call(given).backward(gradient)
            found.append([given.grad, layer.weight.grad, *layer.buffers()])
        assert all(map(torch.equal, *found))


def test_a_run_goes_on_from_its_state_dict() -> None:
    """In the middle of a step, too: the fp8 weight follows from the weight and its scale."""
    layer = Float8Linear(16, 32, recipe=SHORT, caches_weight=True)
    data = [(torch.randn(16, 16), torch.randn(16, 32)) for _ in range(12)]

    def run(one: Float8Linear, turns: range) -> list[Tensor]:
        found = []
        for turn in turns:
            if turn % 3 == 0:
                with torch.no_grad():
                    one.weight.add_(0.01 * turn)
                mark_first_microbatch(one)
            found += step(one, *data[turn])
        return found

    run(layer, range(5))
    other = Float8Linear(16, 32, recipe=SHORT, caches_weight=True)
    addresses = [buffer.data_ptr() for buffer in other.buffers()]
    other.load_state_dict(layer.state_dict())
    assert [buffer.data_ptr() for buffer in other.buffers()] == addresses
    assert all(map(torch.equal, run(layer, range(5, 12)), run(other, range(5, 12))))
    assert all(map(torch.equal, layer.buffers(), other.buffers()))


def test_casts_leave_the_state_alone() -> None:
    layer = Float8Linear(16, 16, recipe=SHORT, caches_weight=True)
    layer(torch.randn(4, 16))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer.bfloat16()
    assert layer.weight.dtype is torch.bfloat16
    assert all(buffer.dtype is before[name].dtype for name, buffer in layer.named_buffers())
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
    result = layer(torch.randn(2, 3, 16, dtype=torch.bfloat16))
    assert (result.dtype, result.shape) == (torch.bfloat16, (2, 3, 16))


def test_autocast_gives_the_dtype() -> None:
    layer = Float8Linear(16, 16, recipe=SHORT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(torch.randn(4, 16))
    result.sum().backward()
    assert result.dtype is torch.bfloat16
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


def test_inputs_and_gradients_of_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on CUDA want contiguous matrices: whatever comes, they get them."""
    product, given = torch_private.fp8_matmul, []

    def noted(left: Tensor, right: Tensor, *scales: Tensor, **options: Any) -> Tensor:
        given.extend((left.is_contiguous(), right.is_contiguous()))
        return product(left, right, *scales, **options)

    monkeypatch.setattr(torch_private, "fp8_matmul", noted)
    x = torch.randn(16, 32)
    found = []
    for columns in (x, x.t().contiguous().t()):
        torch.manual_seed(0)
        layer = Float8Linear(16, 16, recipe=SHORT)
        result = layer(columns[:, ::2])
        result.t().sum().backward()
        found.append([result.detach(), layer.weight.grad])
    assert all(map(torch.equal, *found))
    assert all(given)
    assert len(given) == 2 * 2 * 2


def test_no_rows() -> None:
    layer = Float8Linear(16, 16)
    result = layer(torch.empty(0, 16))
    result.sum().backward()
    assert result.shape == (0, 16)
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_on_the_meta_device() -> None:
    layer = Float8Linear(16, 16, device="meta", caches_weight=True)
    assert all(each.is_meta for each in (*layer.parameters(), *layer.buffers()))
    layer.to_empty(device="cpu").reset_fp8_state()
    assert layer.scale.tolist() == [1.0] * 3


def test_sizes_that_kernels_do_not_take() -> None:
    with pytest.raises(ConfigError, match=r"in_features is 20[^\0]*use 32") as caught:
        Float8Linear(20, 7)
    assert len(caught.value.problems) == 2


def test_another_recipe_keeps_the_newest_entries() -> None:
    layer = Float8Linear(16, 16, recipe=SHORT)
    for size in (1.0, 2.0, 3.0):
        layer(torch.full((16, 16), size))
    layer.use_recipe(DelayedScaling(amax_history_len=2, margin=1), caches_weight=True)
    assert layer.amax_history[:, INPUT].tolist() == [3.0, 2.0]
    assert layer.target.tolist() == [224.0, 224.0, 57344.0 / 2]
    layer.use_recipe(DelayedScaling(amax_history_len=4), caches_weight=True)
    assert layer.amax_history[:, INPUT].tolist() == [3.0, 2.0, 0.0, 0.0]


def test_ranks_share_the_largest_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has seen 2 everywhere; earlier entries are as they are."""

    def all_reduce(tensor: Tensor, op: object, group: object) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MAX, "group")
        tensor.clamp_(min=2.0)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    model = nn.Sequential(Float8Linear(16, 16, recipe=SHORT), Float8Linear(16, 16, recipe=SHORT))
    for size in (1.0, 3.0):
        model[0](torch.full((16, 16), size))
    reduce_amax(model, "group")  # type: ignore[arg-type]
    assert model[0].amax_history[:, INPUT].tolist() == [3.0, 1.0, 0.0]
    assert model[0].amax_history[0, GRADIENT] == 2.0
    assert model[1].amax_history[0].tolist() == [2.0] * 3
    assert not model[1].amax_history[1:].any()


def test_without_kernels_the_numbers_are_multiplied_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        layer = Float8Linear(32, 16, recipe=SHORT)
        return [each for _ in range(3) for each in step(layer, torch.randn(16, 32), torch.randn(16, 16))]

    by_kernels = run()
    monkeypatch.setattr(torch_private, "has_fp8_matmul", lambda _device: False)
    # Sums in another order.
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(by_kernels, run(), strict=True))
