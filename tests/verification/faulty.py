"""A model of modules one of which does what a replay does not do, and no check before a replay sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8


class Hidden:
    """A number so deep in an object that nobody compares it before a replay."""

    def __init__(self) -> None:
        self.places: dict[str, Any] = {"a": {"b": {"c": {"d": {"number": 0}}}}}

    def count(self) -> int:
        """One more than before."""
        place = self.places["a"]["b"]["c"]["d"]
        place["number"] += 1
        return int(place["number"])


class Plain(nn.Module):
    """Does nothing wrong: state, dropout, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + functional.dropout(self.outer(torch.tanh(self.inner(x))), 0.1, self.training)


class Counting(Plain):
    """What it gives depends on a counter of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1 / self.hidden.count())


class Scaled(nn.Module):
    """Multiplies by a number that the host looks up anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (1.0 + 0.125 * (self.hidden.count() % 3))


class BakedConstant(Plain):
    """A module inside of it has a number of the host baked in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x))


class Derived(nn.Linear):
    """Keeps a transposed copy of its weight, and makes it anew when the weight was written."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.cache: dict[str, Any] = {"a": {"b": {"c": {"d": {"version": -1, "copy": None}}}}}

    def forward(self, x: Tensor) -> Tensor:
        place = self.cache["a"]["b"]["c"]["d"]
        if place["version"] != self.weight._version:
            place["version"], place["copy"] = self.weight._version, self.weight.detach().t().contiguous()
        # Straight through, so that the weight has a gradient too.
        return x @ place["copy"] + (functional.linear(x, self.weight) - functional.linear(x, self.weight).detach())


class StaleDerived(Plain):
    """A module inside of it reads what was derived from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = Derived()

    def forward(self, x: Tensor) -> Tensor:
        return self.derived(super().forward(x))


class DerivedAttribute(nn.Linear):
    """The same in plain attributes, which are compared before a replay: an eager call renews them."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.version, self.copy = -1, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.version != self.weight._version:
            self.version, self.copy = self.weight._version, self.weight.detach().t().contiguous()
        return x @ self.copy + (functional.linear(x, self.weight) - functional.linear(x, self.weight).detach())


class StaleAttribute(Plain):
    """A module inside of it reads what was derived from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = DerivedAttribute()

    def forward(self, x: Tensor) -> Tensor:
        return self.derived(super().forward(x))


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class WrongInputGradient(Plain):
    """Its backward uses a number of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Wrong.apply(x, 1.0 + self.hidden.count() % 3))


class WrongWeightGradient(Plain):
    """The gradient of one weight depends on a number of the host, and nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _Wrong.apply(self.bias, 1.0 + self.hidden.count() % 3)


class DriftingBuffer(Plain):
    """Writes a counter of Python into a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        self.seen[1].fill_(self.hidden.count())
        return super().forward(x)


class DriftingRandom(Plain):
    """Draws less in every third call than in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden.count() % 3:
            torch.rand(5, device=x.device)
        return super().forward(x)


class Model(nn.Module):
    """``fault`` stands between correct modules."""

    def __init__(self, fault: nn.Module) -> None:
        super().__init__()
        self.first = Plain()
        self.blocks = nn.ModuleList([Plain(), fault, Plain()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


REGIONS = {"first": "layer", "blocks.*": "layer", "head": "head"}


def batches(device: torch.device, number: int = 3) -> list[Tensor]:
    """Different inputs, the same in each call."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator).to(device) for _ in range(number)]


class WritesIntoItsArgument(WrongInputGradient):
    """Its first operation writes into what it was given, as some do to save memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Untappable(Counting):
    """Cannot be captured while something watches it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.inner._forward_hooks:
            float(x.detach().sum())
        return super().forward(x)
