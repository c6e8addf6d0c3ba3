"""A captured pair equals the eager function: results, gradients, generators, through several changing inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.capture.pairs import backward_half, call, callers_of, captured, chain_of, forward_pair
from torch import Tensor, nn
from torch.nn import functional

from graphstep.capture.pair_capture import capture_backwards
from graphstep.capture.session import GraphSession


class Two(NamedTuple):
    first: Tensor
    second: Tensor


class Block(nn.Module):
    """Everything at once: several outputs of several kinds, dropout, a buffer, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, gate: Tensor) -> Any:
        self.calls += 1
        y = functional.dropout(torch.tanh(self.inner(self.norm(x))), 0.3) * gate
        return {"y": (y @ self.inner.weight) * self.scale, "parts": Two(y.sum(-1), (y > 0)), "index": y.argmax(-1)}


def tensors(device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(4, 6, generator=generator).to(device) for _ in range(2))
    return x.requires_grad_(), gate


def test_replays_equal_eager(session: GraphSession, device: torch.device) -> None:
    eager = Block().to(device)
    graphed = copy.deepcopy(eager)
    pair = captured(session, graphed, *tensors(device, 0), modules=[graphed])
    assert int(graphed.calls) == 0
    for seed in range(1, 5):
        found = []
        for function in (eager, lambda *given: call(pair, *given)):
            torch.manual_seed(seed)
            x, gate = tensors(device, seed)
            out = function(x, gate)
            (out["y"].square().sum() + out["parts"].first.sum()).backward()
            assert out["parts"].second.dtype == torch.bool
            assert not out["index"].requires_grad
            assert not out["parts"].second.requires_grad
            found.append([out["y"], *out["parts"], out["index"], x.grad, torch.rand(3), torch.rand(3, device=device)])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    for (name, mine), (_, theirs) in zip(eager.named_parameters(), graphed.named_parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name
    assert int(graphed.calls) == int(eager.calls) == 4
    assert type(out["parts"]) is Two


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_any_number_of_warmups(session: GraphSession, device: torch.device, warmups: int) -> None:
    linear = nn.Linear(3, 3).to(device)
    x = torch.randn(2, 3, device=device, requires_grad=True)
    pair = captured(session, lambda x: linear(x).relu(), x, warmups=warmups)
    assert torch.equal(call(pair, x), linear(x).relu())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in linear.parameters())


def test_outputs_are_inputs_without_a_copy(session: GraphSession, device: torch.device) -> None:
    first, second = (nn.Linear(3, 3).to(device) for _ in range(2))
    x = torch.randn(2, 3, device=device, requires_grad=True)
    lower = forward_pair(session, first, x)
    upper = forward_pair(session, second, lower.outputs[0], inputs=[torch.empty(0)], chained={0: (lower, 0)})
    backward_half(upper)
    capture_backwards([lower], [upper.grad_inputs[0]])
    assert upper.inputs[0].data_ptr() == lower.outputs[0].data_ptr()
    for seed in range(3):
        torch.manual_seed(seed)
        given = [torch.randn(2, 3, device=device).requires_grad_() for _ in range(1)] * 2
        for module in (first, second):
            module.zero_grad()
        hidden = call(lower, given[0])
        assert hidden.data_ptr() == upper.inputs[0].data_ptr()
        call(upper, hidden).square().sum().backward()
        assert upper.grad_inputs[0] is lower.grad_outputs[0]
        grads = [given[0].grad, first.weight.grad.clone(), second.bias.grad.clone()]
        given[0].grad = None
        for module in (first, second):
            module.zero_grad()
        second(first(given[1])).square().sum().backward()
        assert all(map(torch.equal, grads, [given[1].grad, first.weight.grad, second.bias.grad]))


def test_unused_outputs_get_no_gradient(session: GraphSession, device: torch.device) -> None:
    a, b = (nn.Parameter(torch.randn(3, device=device)) for _ in range(2))
    x = torch.randn(3, device=device, requires_grad=True)
    pair = captured(session, lambda x: (x * a, x * b), x)
    for use in (0, 1, 0):
        x.grad = a.grad = b.grad = None
        call(pair, x)[use].sum().backward()
        assert torch.equal(x.grad, (a, b)[use].detach())
        assert torch.equal((a, b)[use].grad, x.detach())
        other = (a, b)[1 - use].grad
        assert other is None or not other.any()


def test_results_that_are_none_or_values(session: GraphSession, device: torch.device) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    pair = captured(session, lambda x: (x * 2, None, {"n": 3, "t": x + 1}), x)
    y, nothing, rest = call(pair, x)
    assert nothing is None
    assert rest["n"] == 3
    assert torch.equal(y, x * 2)
    assert torch.equal(rest["t"], x + 1)


def test_none_stays_none(session: GraphSession, device: torch.device) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    pair = captured(session, lambda x, mask: x * 2 if mask is None else x * mask, x, None)
    assert len(pair.inputs) == 1
    assert torch.equal(call(pair, x), x * 2)


def test_an_output_that_is_an_input(session: GraphSession, device: torch.device) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1

    x = torch.randn(3, device=device, requires_grad=True)
    pair = captured(session, function, x)
    for value in (1.0, 2.0):
        x = torch.full((3,), value, device=device, requires_grad=True)
        same, more = call(pair, x)
        assert torch.equal(same, x)
        assert torch.equal(more, x + 1)
        (same * 2 + more * 3).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 5.0, device=device))


def test_an_input_that_wants_no_gradient(session: GraphSession, device: torch.device) -> None:
    linear = nn.Linear(3, 2).to(device)
    x = torch.randn(2, 3, device=device)
    pair = captured(session, linear, x)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, device=device)
        linear.zero_grad()
        out = call(pair, x)
        assert out.requires_grad
        out.sum().backward()
        expected = torch.autograd.grad(linear(x).sum(), linear.weight)[0]
        assert torch.equal(linear.weight.grad, expected)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:1].expand(4, 6),
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[:, ::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_inputs(session: GraphSession, device: torch.device, name: str) -> None:
    def at(seed: int) -> Tensor:
        return LAYOUTS[name](tensors(device, seed)[0].detach())

    weight = nn.Parameter(torch.randn(1, device=device))
    static = torch.empty_strided(at(0).shape, at(0).stride(), device=device)
    pair = captured(session, lambda x: x.tanh() * weight, at(0), inputs=[static])
    for seed in (1, 2):
        x = at(seed)
        assert torch.equal(call(pair, x), x.tanh() * weight)


def test_expanded_gradients(session: GraphSession, device: torch.device) -> None:
    x = torch.randn(4, 6, device=device, requires_grad=True)
    pair = captured(session, lambda x: x * 3, x)
    call(pair, x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_a_named_generator_goes_on(session: GraphSession, device: torch.device) -> None:
    generators = [torch.Generator(device).manual_seed(5) for _ in range(2)]

    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.rand(x.shape, generator=generator, device=device)

    x = torch.ones(4, device=device, requires_grad=True)
    pair = captured(session, lambda x: noisy(x, generators[1]), x)
    for _ in range(3):
        assert torch.equal(call(pair, x), noisy(x, generators[0]))
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_a_run_is_over_after_its_backward(session: GraphSession, device: torch.device) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    pair = captured(session, lambda x: x * 2, x)
    (caller,) = callers_of(chain_of(pair))
    out = caller(x)
    assert (pair.num_in_flight, caller.num_closed) == (1, 0)
    out.sum().backward()
    assert (pair.num_in_flight, caller.num_closed) == (0, 1)
    del out
    assert caller.num_closed == 1
