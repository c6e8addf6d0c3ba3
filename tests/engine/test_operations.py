"""Operations of transformers, each replayed with changed inputs on both engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.engine.programs import Program, assert_replays_equal_eager
from torch import Tensor
from torch.nn import functional

from graphstep.engine import Engine

Function = Callable[..., Any]

ON_FLOATS: Mapping[str, Function] = {  # x: [4, 6]
    "casts": lambda x: [x.to(torch.bfloat16).float(), x.double() / 3, x.half(), x.int(), x.bool(), x.long().float()],
    "where": lambda x: [
        torch.where(x > 0, x, -x),
        torch.where(x > 0, 1.0, x),
        x.masked_fill(x < 0, -1e9),
        x.clamp(-1, 1),
    ],
    "cat": lambda x: [
        torch.cat([x, x * 2], 1),
        torch.stack([x, x + 1]),
        torch.hstack([x, x]),
        functional.pad(x, (1, 2), value=3.0),
    ],
    "split": lambda x: [
        *x.split(4, 1),
        *(x * 2).chunk(3, 1),
        *(x + 1).unbind(0),
        *x.tensor_split(3, 1),
        x.split([1, 5], 1),
    ],
    "order": lambda x: [
        *x.topk(3),
        *x.sort(1),
        x.argsort(dim=0, stable=True),
        *x.kthvalue(2),
        *x.max(1),
        x.argmin(0),
        *x.mode(1),
    ],
    "scans": lambda x: [x.cumsum(0), x.cumsum(1, dtype=torch.float64), *x.cummax(0), x.logcumsumexp(1)],
    # No backward below: that of cumprod reads values on a GPU, and goes by another formula under a dispatch mode.
    "products": lambda x: [x.cumprod(1), x.prod(0)],
    "sums": lambda x: [x.sum(), x.mean(1), x.var(0), x.std(), x.norm(), x.amax((0, 1)), x.logsumexp(1), (x > 0).any(1)],
    "activations": lambda x: [
        functional.silu(x),
        functional.gelu(x),
        functional.gelu(x, approximate="tanh"),
        functional.relu(x),
        functional.softplus(x),
        x.sigmoid(),
    ],
    "softmax": lambda x: [
        x.softmax(-1),
        x.log_softmax(0),
        functional.softmax(x, -1, dtype=torch.float64),
        functional.glu(x),
    ],
    "norms": lambda x: [
        functional.layer_norm(x, (6,), x[0], x[1]),
        functional.rms_norm(x, (6,), x[0]),
        functional.group_norm(x, 2),
        functional.normalize(x),
    ],
    "matmul": lambda x: [
        x @ x.t(),
        torch.addmm(x[:, :4], x, x.t()),
        x.mv(x[0]),
        x[0].dot(x[1]),
        torch.outer(x[0], x[1]),
    ],
    "batched": lambda x: [
        torch.bmm(x.view(2, 2, 6), x.view(2, 6, 2)),
        torch.baddbmm(x.view(2, 2, 6), x.view(2, 2, 6), x.view(2, 2, 6).mT @ x.view(2, 2, 6)),
    ],
    "einsum": lambda x: [
        torch.einsum("ij,kj->ik", x, x),
        torch.einsum("ij,ij->i", x, x),
        torch.einsum("bij->bji", x[None]),
    ],
    "conv1d": lambda x: [
        functional.conv1d(x.view(1, 4, 6), x.view(2, 4, 3), padding=1),
        functional.conv1d(x.view(1, 4, 6), x.view(4, 1, 6)[..., :3], groups=4),
    ],
    "repeat": lambda x: [
        x.repeat(2, 1),
        x.repeat_interleave(2, 1),
        x.tile(2),
        x.roll(1, 1),
        x.flip(0),
        x.tril(),
        x.triu(1),
    ],
    "arithmetic": lambda x: [
        x / 3,
        x // 0.25,
        x % 0.75,
        x**2,
        x.rsqrt(),
        x.exp(),
        torch.lerp(x, x + 1, 0.3),
        torch.addcmul(x, x, x),
    ],
    "constants": lambda x: [
        torch.arange(6, device=x.device) + x,
        torch.zeros_like(x) + 1,
        torch.full_like(x, 2),
        x.new_zeros(3),
        torch.eye(3, device=x.device),
    ],
    "foreach": lambda x: [
        *torch._foreach_mul([x, x[0]], 2.0),
        *torch._foreach_add([x, x], [x, x]),
        *torch._foreach_norm([x, x[1]]),
    ],
    "losses": lambda x: [
        functional.mse_loss(x, x * 2),
        functional.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
        functional.smooth_l1_loss(x, -x),
    ],
}

WITH_INDEX: Mapping[str, Function] = {  # x: [4, 6], i: [4] in 0..3
    "gather": lambda x, i: [
        x.gather(1, i[:, None]),
        x.index_select(0, i),
        x[i],
        x[:, i],
        x[i, i],
        torch.take_along_dim(x, i[:, None], 1),
        x.take(i),
    ],
    "scatter": lambda x, i: [
        x.scatter(1, i[:, None], 2.0),
        x.scatter_add(0, i[:, None].expand(4, 6), x),
        x.scatter_reduce(0, i[:, None].expand(4, 6), x, "amax"),
    ],
    "index_put": lambda x, i: [
        x.index_put((i,), x[:1]),
        x.index_put((i,), x, accumulate=True),
        x.clone().index_fill_(0, i, 1.0),
    ],
    "index_add": lambda x, i: [
        x.index_add(0, i, x),
        x.index_copy(0, i.argsort(), x),
        torch.zeros_like(x).index_add_(0, i, x, alpha=2),
    ],
    "written_by_index": lambda x, i: [written_by_index(x, i)],
    "embedding": lambda x, i: [functional.embedding(i, x), functional.embedding(i.view(2, 2), x, padding_idx=1)],
    "one_hot": lambda x, i: [functional.one_hot(i, 5), functional.one_hot(i, num_classes=4).float() @ x],
    "cross_entropy": lambda x, i: [
        functional.cross_entropy(x, i),
        functional.cross_entropy(x, i, reduction="none", ignore_index=2),
        functional.nll_loss(x.log_softmax(1), i),
    ],
    "repeats": lambda x, i: [
        torch.repeat_interleave(x, i.sort().values, dim=0, output_size=6),
        torch.bucketize(x, torch.arange(-1.0, 2.0, device=x.device)),
    ],
    "integers": lambda x, i: [
        i * 3 // 2,
        i % 2,
        i << 1,
        i == 2,
        i.float().mean(),
        torch.searchsorted(i.sort().values, i),
        i.cumsum(0),
    ],
}

COMPLEX: Mapping[str, Function] = {  # z: [4, 4]
    "lazy": lambda z: [z.conj(), z.conj() @ z, z.mH, z.imag, -z.conj().imag, z.real * 2, z.conj().add(1)],
    "parts": lambda z: [
        torch.view_as_real(z),
        torch.view_as_complex(torch.view_as_real(z) * 2),
        z.abs(),
        z.angle(),
        torch.polar(z.abs(), z.angle()),
    ],
    "fft": lambda z: [torch.fft.fft(z), torch.fft.irfft(z), torch.fft.rfft(z.real)],
}


def written_by_index(x: Tensor, i: Tensor) -> Tensor:
    y = x.clone()
    y[i] = x
    y[i[0:1], 2] = x[0, 0]
    y[:, i] += 1
    y.scatter_(1, i[:, None], 0.5)
    return y


def program_of(function: Function, *shapes: str) -> Callable[[torch.device], Program]:
    def build(device: torch.device) -> Program:
        tensors = {
            "x": torch.randn(4, 6, device=device),
            "i": torch.tensor([3, 0, 2, 1], device=device),
            "z": torch.randn(4, 4, dtype=torch.complex64, device=device),
        }
        inputs = [tensors[name] for name in shapes]
        return Program(lambda: function(*inputs), inputs)

    return build


@pytest.mark.parametrize("name", ON_FLOATS)
def test_on_floats(engine: Engine, name: str) -> None:
    assert_replays_equal_eager(engine, program_of(ON_FLOATS[name], "x"))


@pytest.mark.parametrize("name", WITH_INDEX)
def test_with_index(engine: Engine, name: str) -> None:
    assert_replays_equal_eager(engine, program_of(WITH_INDEX[name], "x", "i"))


@pytest.mark.parametrize("name", COMPLEX)
def test_complex(engine: Engine, name: str) -> None:
    assert_replays_equal_eager(engine, program_of(COMPLEX[name], "z"))


@pytest.mark.parametrize("name", ["norms", "softmax", "activations", "conv1d", "batched", "cat", "scans"])
def test_backward_on_floats(engine: Engine, name: str) -> None:
    def with_backward(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        sum(result.float().square().sum() for result in ON_FLOATS[name](leaf) if result.requires_grad).backward()
        assert leaf.grad is not None
        return leaf.grad

    assert_replays_equal_eager(engine, program_of(with_backward, "x"))


@pytest.mark.parametrize("name", ["gather", "index_put", "index_add", "embedding", "cross_entropy"])
def test_backward_with_index(engine: Engine, name: str) -> None:
    def with_backward(x: Tensor, i: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        sum(result.float().sum() for result in WITH_INDEX[name](leaf, i) if result.requires_grad).backward()
        assert leaf.grad is not None
        return leaf.grad

    assert_replays_equal_eager(engine, program_of(with_backward, "x", "i"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_groups(engine: Engine, dtype: torch.dtype, is_causal: bool) -> None:
    def build(device: torch.device) -> Program:
        query = torch.randn(2, 4, 5, 8, device=device).to(dtype).requires_grad_()
        key, value = (torch.randn(2, 2, 5, 8, device=device).to(dtype).requires_grad_() for _ in range(2))
        for leaf in (query, key, value):
            leaf.grad = torch.zeros_like(leaf)

        def run() -> Tensor:
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
            out.float().square().sum().backward()
            return out.detach()

        return Program(run, [query, key, value], [leaf.grad for leaf in (query, key, value) if leaf.grad is not None])

    assert_replays_equal_eager(engine, build)
