"""Known faults, groups C and D: values read on the host or frozen at capture, and streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Loop, twins
from tests.strategies.attach.plain import (
    HIDDEN,
    LAYERS,
    LENGTH,
    Block,
    Packed,
    Stack,
    attached,
    built,
    inputs,
    num_replays,
    reasons,
    train,
)
from tests.strategies.runs import differences
from torch import Tensor, nn

from graphstep.errors import CaptureError


@contextmanager
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Special(Block):
    """A block that does something to its result first."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.act(x))


def refused_and_eager(device: torch.device, act: Callable[[Tensor], Tensor]) -> None:
    """Required, the error names the line; auto, that region runs eagerly and its neighbour is captured."""

    def build() -> Stack:
        model = Stack(1)
        model.layers.insert(0, Special(act))
        return model

    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    with attached(model, LAYERS, policy="auto") as manager:
        with pytest.warns(Warning, match=r"layers\.0"):
            trace = train(model, device, 5, 2)
        assert differences(expected, trace) == []
        assert [row.num_replays for row in manager.report().rows] == [0, 4 * 2]
        assert sum(reasons(manager).values()) == 5 * 2 + 2
    model = built(build, device)
    with attached(model, LAYERS), pytest.raises(CaptureError) as caught:
        train(model, device, 3)
    assert "layers.0" in caught.value.where
    assert "test_faults_values.py" in caught.value.where


def read_item(x: Tensor) -> Tensor:
    return x * (1 if x.sum().item() > 0 else 2)


def read_bool(x: Tensor) -> Tensor:
    return x * 2 if x.detach().mean() > 0 else x


def read_list(x: Tensor) -> Tensor:
    return torch.cat(x.split([int(n) for n in (x[0, :1].detach() * 0 + LENGTH).sum(-1).div(HIDDEN).tolist()], 1), 1)


def read_mask(x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def read_nonzero(x: Tensor) -> Tensor:
    return x + x.detach().nonzero().float().mean()


@pytest.mark.parametrize("act", [read_item, read_bool, read_list, read_nonzero])
def test_b33_values_read_on_the_host(device: torch.device, act: Callable[[Tensor], Tensor]) -> None:
    refused_and_eager(device, act)


def test_b33_clipping_and_a_skipped_step_between_replays(device: torch.device) -> None:
    """Outside of the regions the loop may read what it likes."""

    def script(loop: Loop) -> None:
        for step in range(6):
            loop.optimizer.zero_grad()
            loop.note(loop.forward_backward([loop.batch(), loop.batch()]))
            norm = torch.nn.utils.clip_grad_norm_(loop.trained, 0.01)
            if float(norm) < 1e9 and step != 3:
                loop.optimizer.step()

    assert twins(device, script, build=WITH_DROPOUT).num_replays >= 2 * 4 * 2


def from_number(x: Tensor) -> Tensor:
    return x * torch.tensor(2.0, device=x.device)


def from_list(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0] * (HIDDEN // 2)).to(x.device)


@pytest.mark.parametrize("act", [from_number, from_list])
def test_b37_a_tensor_made_from_numbers(device: torch.device, act: Callable[[Tensor], Tensor]) -> None:
    """Captured where the device allows it; where not, the line is named."""

    def build() -> Stack:
        return Stack(2, lambda: Special(act))

    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    with attached(model, LAYERS, policy="auto") as manager, without_warnings():
        assert differences(expected, train(model, device, 5, 2)) == []
        captured = num_replays(manager) > 0
    if not captured:
        model = built(build, device)
        with attached(model, LAYERS), pytest.raises(CaptureError) as caught:
            train(model, device, 3)
        assert "test_faults_values.py" in caught.value.where


class Experts(nn.Module):
    """Top-1 routing with as many rows an expert as it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 2)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        best = self.router(rows).softmax(-1).max(-1)
        order = best.indices.argsort(stable=True)
        counts = torch.bincount(best.indices, minlength=2).tolist()  # the line to name
        parts = rows[order].split(counts)
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return x + (torch.zeros_like(results).index_copy(0, order, results) * best.values[:, None]).view_as(x)


class WithExperts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()  # type: ignore[assignment]


def test_b38_experts_with_counts_on_the_host(device: torch.device) -> None:
    """The whole layer cannot be captured, its attention and its router can."""
    build = partial(Stack, block=WithExperts)
    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    with attached(model, LAYERS) as manager, pytest.raises(CaptureError) as caught:
        train(model, device, 3)
    assert "the line to name" in caught.value.where
    model = built(build, device)
    with attached(model, {"layers.*.attn": "attn", "layers.*.mlp.router": "moe_router"}) as manager:
        assert differences(expected, train(model, device, 5, 2)) == []
        assert num_replays(manager) == 4 * 4 * 2


def count_rows(x: Tensor) -> Tensor:
    return x + torch.bincount((x.detach() > 0).flatten().int(), minlength=2).float().mean()


def repeat_rows(x: Tensor) -> Tensor:
    repeats = (x.detach()[0, :, 0] > -9).int()
    return x.repeat_interleave(repeats, 1)


@pytest.mark.parametrize("act", [count_rows, repeat_rows])
def test_b40_operations_that_read_without_saying_so(device: torch.device, act: Callable[[Tensor], Tensor]) -> None:
    refused_and_eager(device, act)


def select_masked(x: Tensor) -> Tensor:
    return x + x.masked_select(x > 0).sum()


def multiply_all(x: Tensor) -> Tensor:
    """Reads where zeros are, in the backward only."""
    return x * (1 + x.flatten(1).tanh().prod())


def test_b41_an_operation_that_cannot_be_captured(device: torch.device) -> None:
    refused_and_eager(device, select_masked)
    refused_and_eager(device, read_mask)


def test_b41_an_operation_whose_backward_cannot(device: torch.device) -> None:
    """Named where the engine runs what reads; right in any case."""
    build = partial(Stack, block=lambda: Special(multiply_all))
    expected = train(built(build, device), device, 5, 2)
    model = built(build, device)
    with attached(model, LAYERS, policy="auto") as manager, without_warnings():
        assert differences(expected, train(model, device, 5, 2)) == []
        for row in manager.report().rows:
            assert row.num_replays == 4 * 2 or row.why_not_captured


@dataclass
class Mask:
    """An argument of a class of the caller's, with a number that is used in Python."""

    window: int
    bias: Tensor | None = None


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        y = self.linear(x)
        y = y + y.roll(mask.window, 1)
        return y if mask.bias is None else y + mask.bias


def test_b44_a_number_inside_of_an_argument(device: torch.device) -> None:
    turn = {"step": 0}

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        result: Tensor = layer(x, Mask(1 + turn["step"] // 3))
        return result

    build, before = partial(Stack, block=Windowed, call=call), lambda step: turn.update(step=step)
    expected = train(built(build, device), device, 8, 2, before=before)
    model = built(build, device)
    with attached(model, LAYERS, on_mismatch="eager") as manager:
        assert differences(expected, train(model, device, 8, 2, before=before)) == []
        assert num_replays(manager) == 2 * 2 * 2
        assert any("window" in text for row in manager.report().rows for text in row.last_mismatch)
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, train(model, device, 8, 2, before=before)) == []
        assert num_replays(manager) == 2 * 2 * (2 + 1)


class Opaque:
    """No dataclass: nothing says what is in it."""

    def __init__(self, window: int) -> None:
        self.window, self.bias = window, None


def test_b44_a_number_inside_of_an_object(device: torch.device) -> None:
    """Never the graph of another number."""
    turn, shared = {"step": 0}, Opaque(1)

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        shared.window = 1 + turn["step"] // 3
        result: Tensor = layer(x, shared)
        return result

    build, before = partial(Stack, block=Windowed, call=call), lambda step: turn.update(step=step)
    expected = train(built(build, device), device, 8, 2, before=before)
    model = built(build, device)
    with attached(model, LAYERS, policy="auto"), without_warnings():
        assert differences(expected, train(model, device, 8, 2, before=before)) == []


class PackedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        y = self.linear(x)
        sequence = (torch.arange(y.shape[1], device=y.device) >= packed.offsets[1:, None]).sum(0)
        scores = y @ y.transpose(1, 2) / packed.longest
        scores = scores.masked_fill(sequence[:, None] != sequence, -1e4)
        return torch.softmax(scores, -1) @ y


def test_b45_packed_sequences(device: torch.device) -> None:
    """The offsets are copied, the longest length is part of the signature, None stays None."""
    turn = {"call": 0}

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        turn["call"] += 1
        cut = 1 + turn["call"] % 4
        packed = Packed(torch.tensor([0, cut, LENGTH], dtype=torch.int32).to(x.device), LENGTH)
        result: Tensor = layer(x, packed)
        return result

    build = partial(Stack, block=PackedAttention, call=call)
    expected = train(built(build, device), device, 6, 2)
    model = built(build, device)
    turn["call"] = 0
    with attached(model, LAYERS) as manager:
        assert differences(expected, train(model, device, 6, 2)) == []
        assert num_replays(manager) == 2 * 5 * 2


def test_b46_accumulation_nodes_that_somebody_holds(device: torch.device) -> None:
    """As DistributedDataParallel does, made on the stream of the caller."""
    nodes = []

    def script(loop: Loop) -> None:
        nodes.append([p.expand_as(p).grad_fn.next_functions[0][0] for p in loop.trained])
        for _ in range(5):
            loop.step(2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = twins(device, script, build=WITH_DROPOUT)
    assert loop.num_replays == 2 * 4 * 2
    assert len(nodes) == 2


def test_b46_a_loss_of_the_step_before_that_is_kept(device: torch.device) -> None:
    """With its graph, which holds the nodes."""
    models = [built(partial(Stack, block=lambda: Block(0.2)), device) for _ in range(2)]
    found = []
    for model in models:
        torch.manual_seed(4)
        kept, losses = [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached(model, LAYERS, policy="off" if model is models[0] else "required") as manager:
            for step in range(5):
                optimizer.zero_grad()
                loss = model(inputs(device, step))
                loss.backward()
                optimizer.step()
                kept.append(loss)
                losses.append(loss.detach().clone())
            assert model is models[0] or num_replays(manager) > 0
        assert all(map(torch.equal, kept, losses))
        found.append(torch.stack(losses))
    assert torch.equal(*found)


class Waits(Block):
    """Waits for what was started outside, as for a gathered parameter."""

    event: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return super().forward(x)


@pytest.mark.gpu
def test_b48_waiting_for_work_that_was_not_captured() -> None:
    """Eager where the policy allows it, else an error that names the region; training goes on."""
    device = torch.device("cuda")
    side = torch.cuda.Stream()

    def prefetch(model: nn.Module) -> Callable[[int], None]:
        def start(step: int) -> None:
            with torch.cuda.stream(side):
                torch.ones(1000, device=device).sum()
            model.layers[0].event = side.record_event()

        return start

    build = partial(Stack, block=Waits)
    model = built(build, device)
    expected = train(model, device, 5, before=prefetch(model))
    model = built(build, device)
    with attached(model, LAYERS, policy="auto") as manager, without_warnings():
        assert differences(expected, train(model, device, 5, before=prefetch(model))) == []
        assert manager.report().rows[1].num_replays > 0


class OutOfBand(torch.autograd.Function):
    """Adds the gradient of its weight by itself, and returns none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.weight_gradient = x.flatten(0, 1).t() @ gradient.flatten(0, 1)
        weight.main_grad.add_(ctx.weight_gradient)
        return gradient @ weight.t(), None


class FusedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.weight, "main_grad"):
            self.weight.main_grad = torch.zeros_like(self.weight)  # type: ignore[attr-defined]
        result: Tensor = OutOfBand.apply(self.norm(x), self.weight)
        return result


def test_b53_a_weight_gradient_that_is_computed_out_of_band(device: torch.device) -> None:
    build = partial(Stack, block=FusedLinear)
    models = [built(build, device) for _ in range(2)]
    found: list[list[Tensor]] = [[], []]
    for model, gradients in zip(models, found, strict=True):
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "layers" not in n], lr=0.1)
        with attached(model, LAYERS, policy="off" if model is models[0] else "required") as manager:
            for step in range(5):
                optimizer.zero_grad()
                for layer in model.layers:
                    if hasattr(layer.weight, "main_grad"):
                        layer.weight.main_grad.zero_()
                for microbatch in range(2):
                    model(inputs(device, 2 * step + microbatch)).backward()
                gradients.extend(layer.weight.main_grad.clone() for layer in model.layers)
                assert all(layer.weight.grad is None for layer in model.layers)
                optimizer.step()
            assert model is models[0] or num_replays(manager) == 2 * 4 * 2
    assert all(map(torch.equal, *found))
