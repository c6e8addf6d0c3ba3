"""Looking up, adding, normalising and gating against PyTorch's operations, in the step where they are rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphstep.inference.fusions import Fusions, TorchFusions, fusions_for, has_hooks
from graphstep.inference.metadata import StepMetadata
from graphstep.inference.shapes import BatchLimits, BatchShape
from graphstep.models import LayerNorm, RMSNorm, swiglu

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_of(kind: type[RMSNorm] | type[LayerNorm], size: int, device: str, dtype: torch.dtype) -> nn.Module:
    norm = kind(size, device=device, dtype=dtype)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


def rows(number: int, size: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(number, size, device=device).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    """Sums of squares are taken in another order: the last bit of the result may differ."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("size", "channels"), [(32, 8), (1500, 80), (2048, 0)])
@pytest.mark.parametrize("number", [1, 6])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@torch.no_grad()
def test_looking_up(device: str, number: int, size: int, channels: int, dtype: torch.dtype) -> None:
    limits = BatchLimits(max_requests=6, max_tokens=6, max_sequence_length=40)
    tensors = StepMetadata(limits, 4, device).tensors(BatchShape(number, 0, number))
    weight, table = rows(50, size, device, dtype), torch.randn(2, 40, channels, device=device) if channels else None
    tensors.drawn.copy_(torch.arange(40, 40 + number))
    tensors.token_ids.copy_(torch.arange(10, 10 + number))
    tensors.positions.copy_(torch.arange(number).flip(0) * 7 % 40)
    own = (tensors.token_ids.data_ptr() - tensors.words.data_ptr()) // 4
    wanted = torch.arange(own, own + number)
    wanted[::2] = torch.arange(1, 1 + number)[::2]
    tensors.token_sources.copy_(wanted)
    tokens = [(40 if row % 2 == 0 else 10) + row for row in range(number)]
    found, angles = fusions_for(torch.device(device)).look_up(tensors, weight, table)
    assert found.equal(weight[tokens])
    assert len(angles) == (2 if channels else 0)
    for which, of_table in enumerate(angles):
        assert table is not None
        assert of_table.equal(table[which, tensors.positions.long()].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 100, 2048, 5120])
@pytest.mark.parametrize("number", [1, 33])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@torch.no_grad()
def test_normalising(device: str, number: int, size: int, dtype: torch.dtype) -> None:
    fusions, norm = fusions_for(torch.device(device)), norm_of(RMSNorm, size, device, dtype)
    hidden, update = rows(number, size, device, dtype), rows(number, size, device, dtype)
    before = hidden.clone()
    total, normalised = fusions.add_and_normalise(hidden, update, norm)
    assert total.equal(hidden + update)
    close(normalised, norm(hidden + update))
    assert hidden.equal(before)
    total, normalised = fusions.add_and_normalise(hidden, None, norm)
    assert total.equal(hidden)
    close(normalised, norm(hidden))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1024, 8200])
@pytest.mark.parametrize("number", [1, 33])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@torch.no_grad()
def test_gating(device: str, number: int, size: int, dtype: torch.dtype) -> None:
    x = 4 * rows(number, 2 * size, device, dtype)
    x[0, :2] = torch.tensor([-200.0, 200.0])
    close(fusions_for(torch.device(device)).gate(x), swiglu(x))


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@torch.no_grad()
def test_rows_do_not_depend_on_each_other(device: str) -> None:
    fusions, norm = fusions_for(torch.device(device)), norm_of(RMSNorm, 96, device, torch.float32)
    hidden, update = (rows(5, 96, device, torch.float32) for _ in range(2))
    together = *fusions.add_and_normalise(hidden, update, norm), fusions.gate(hidden)
    hidden[0] = torch.nan
    for row in range(1, 5):
        one = slice(row, row + 1)
        alone = *fusions.add_and_normalise(hidden[one], update[one], norm), fusions.gate(hidden[one])
        assert all(a.equal(b[one]) for a, b in zip(alone, together, strict=True))
    again = *fusions.add_and_normalise(hidden, update, norm), fusions.gate(hidden)
    assert all(a[1:].equal(b[1:]) for a, b in zip(again, together, strict=True))
    assert all(a[0].isnan().all() for a in again)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda norm: norm.register_forward_hook(lambda *_: None),
        lambda norm: norm.register_forward_pre_hook(lambda *_: None),
        lambda norm: norm.double(),
    ],
)
def test_what_the_kernels_do_not_know_is_left_to_the_module(change: Callable[[nn.Module], object]) -> None:
    fusions, norm = fusions_for(torch.device("cuda")), norm_of(RMSNorm, 64, "cuda", torch.float32)
    change(norm)
    hidden = rows(3, 64, "cuda", next(norm.parameters()).dtype)
    assert fusions.add_and_normalise(hidden, hidden, norm)[1].equal(norm(hidden + hidden))


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@torch.no_grad()
def test_other_norms(device: str) -> None:
    norm = norm_of(LayerNorm, 64, device, torch.float32)
    hidden = rows(3, 64, device, torch.float32)
    assert fusions_for(torch.device(device)).add_and_normalise(hidden, hidden, norm)[1].equal(norm(hidden + hidden))


def test_the_cpu_uses_torch() -> None:
    fusions: Fusions = fusions_for(torch.device("cpu"))
    assert type(fusions) is TorchFusions
    norm = norm_of(RMSNorm, 8, "cpu", torch.float32)
    assert not has_hooks(norm)
    norm.register_forward_hook(lambda *_: None)
    assert has_hooks(norm)
