"""Modules that know nothing of this package: written by hand, with the argument lists that people write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tests.strategies.runs import differences
from torch import Tensor, nn
from torch.nn import functional

import graphstep
from graphstep.config import CudaGraphConfig

HIDDEN, LENGTH = 16, 6
LAYERS = {"layers.*": "layer"}


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.down(functional.gelu(self.up(x))))
        return result


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attn = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = Mlp(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        result: Tensor = x + self.mlp(x)
        return result


class Stack(nn.Module):
    """Blocks one after another; what ``call`` does with a block is what a test is about."""

    def __init__(
        self,
        num_blocks: int = 2,
        block: Callable[[], nn.Module] = Block,
        call: Callable[[nn.Module, Tensor, int], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.inp = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(block() for _ in range(num_blocks))
        self.out = nn.Linear(HIDDEN, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, layer in enumerate(self.layers):
            x = layer(x) if self.call is None else self.call(layer, x, index)
        result: Tensor = self.out(x).float().square().mean()
        return result


@dataclass
class Packed:
    """As packed sequences are described: a tensor that changes and a number that seldom does."""

    offsets: Tensor
    longest: int
    extra: Tensor | None = None


class Output(NamedTuple):
    hidden: Tensor
    score: Tensor
    note: str | None = None


@dataclass
class ModelOutput:
    hidden: Tensor
    logits: Tensor
    past: tuple[Tensor, ...] | None = None


class DecoderLayer(nn.Module):
    """The call of the decoder layers of a well-known library."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.mlp = Mlp(dropout)
        self.attention_dropout = dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool | None = False,
        use_cache: bool | None = False,
        cache_position: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        residual = hidden_states
        x = self.input_layernorm(hidden_states)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if position_embeddings is not None:
            cos, sin = position_embeddings
            q, k = q * cos + q.roll(1, -1) * sin, k * cos + k.roll(1, -1) * sin
        scores = q @ k.transpose(-1, -2) * kwargs.get("scaling", 1.0)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = torch.softmax(scores.float(), -1).to(q.dtype)
        weights = functional.dropout(weights, self.attention_dropout, self.training)
        hidden = residual + self.o(weights @ v)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return (hidden, weights) if output_attentions else (hidden,)


Trace = list[dict[str, Any]]


@contextmanager
def attached(model: nn.Module, regions: Mapping[str, str] | None, **config: Any) -> Iterator[Any]:
    manager = graphstep.attach(model, CudaGraphConfig(impl="local", **{"warmup_steps": 1, **config}), regions=regions)
    with manager:
        yield manager


def inputs(device: torch.device, number: int, *, size: int = 2, length: int = LENGTH) -> Tensor:
    drawn = torch.Generator().manual_seed(100 + number)
    return torch.randn(size, length, HIDDEN, generator=drawn).to(device)


def train(
    model: nn.Module,
    device: torch.device,
    num_steps: int = 5,
    num_microbatches: int = 1,
    *,
    feed: Callable[[int], Tensor] | None = None,
    before: Callable[[int], Any] | None = None,
) -> Trace:
    """The loop of a tutorial: what it leaves in each step."""
    torch.manual_seed(5)
    feed = feed or (lambda number: inputs(device, number))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    trace: Trace = []
    for step in range(num_steps):
        if before is not None:
            before(step)
        optimizer.zero_grad()
        losses = []
        for microbatch in range(num_microbatches):
            loss = model(feed(step * num_microbatches + microbatch))
            (loss / num_microbatches).backward()
            losses.append(loss.detach())
        trace.append(snapshot(model, device, torch.stack(losses)))
        optimizer.step()
    return trace


def snapshot(model: nn.Module, device: torch.device, losses: Tensor) -> dict[str, Any]:
    taken: dict[str, Any] = {"losses": losses.clone(), "rng": torch.get_rng_state()}
    if device.type == "cuda":
        taken["cuda rng"] = torch.cuda.get_rng_state(device)
    taken.update((name, value.detach().clone()) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        taken[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
    return taken


def built(build: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return build().to(device, dtype)


def reasons(manager: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in manager.report().rows:
        for reason, count in row.eager_calls.items():
            found[str(reason)] = found.get(str(reason), 0) + count
    return found


def num_replays(manager: Any) -> int:
    return sum(row.num_replays for row in manager.report().rows)


def same(
    device: torch.device,
    build: Callable[[], nn.Module],
    *,
    regions: Any = LAYERS,
    num_microbatches: int = 2,
    replays: int | None = None,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **options: Any,
) -> dict[str, int]:
    """Train twins, one attached; returns the reasons of its eager calls."""
    eager, graphed = built(build, device, dtype), built(build, device, dtype)
    expected = train(eager, device, num_microbatches=num_microbatches, **options)
    with attached(graphed, regions, **(config or {})) as manager:
        trace = train(graphed, device, num_microbatches=num_microbatches, **options)
        assert differences(expected, trace) == []
        if replays is None:
            assert num_replays(manager) > 0
        else:
            assert num_replays(manager) == replays
        found = reasons(manager)
    assert manager.report().pool_bytes == 0
    return found
