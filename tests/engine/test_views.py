"""Views, writes through views, ``out=`` and results that are arguments: memory that several tensors share."""

from __future__ import annotations

import pytest
import torch
from tests.engine.programs import Build, Program, assert_replays_equal_eager, run_replay
from torch import Tensor

from graphstep.engine import Engine


def views_of_a_result(device: torch.device) -> Program:
    x = torch.randn(4, 6, device=device)

    def run() -> list[Tensor]:
        y = x * 2
        return [
            *(y[1:3], y[:, ::2], y.t(), y.view(2, 12), y.unflatten(1, (2, 3)), y.select(0, 1), y.narrow(1, 2, 3)),
            *(y.diagonal(), y.unfold(1, 2, 2), y.movedim(0, 1), y.squeeze(), y.unsqueeze(0), y.flatten(), y[None, 0]),
            *(y.expand(3, 4, 6), y.as_strided((2, 2), (7, 1), 1), y.view(torch.int32), y.detach(), y[..., -1]),
        ]

    return Program(run, [x])


def writes_through_views(device: torch.device) -> Program:
    x = torch.randn(4, 6, device=device)

    def run() -> list[Tensor]:
        y = x.clone()
        y[0] = 1.5
        y[:, 1] += x[:, 0]
        y.t()[2].mul_(3)
        y.view(2, 12)[1, ::3] = x[0, :4]
        y.diagonal().fill_(-1)
        y.as_strided((2, 2), (7, 1), 1).add_(x[:2, :2])
        head, tail = y.chunk(2, dim=1)
        head.copy_(tail)
        y.narrow(0, 3, 1).zero_()
        return [y, head, y.sum(0)]

    return Program(run, [x])


def writes_into_input(device: torch.device) -> Program:
    """What a run writes into its own input is there for the next one."""
    x, total = torch.randn(4, device=device), torch.zeros(4, device=device)

    def run() -> Tensor:
        total[1:].add_(x[1:])
        x[0] = total[2] + 1
        return total * 2

    return Program(run, [x], [total])


def inplace_shapes(device: torch.device) -> Program:
    """In-place changes of shape on a tensor of the function's own."""
    x = torch.randn(3, 4, device=device)

    def run() -> list[Tensor]:
        y = x * 2
        y.t_()
        y.add_(1)
        y.unsqueeze_(0)
        z = y * 3
        y.squeeze_(0)
        y.transpose_(0, 1)
        return [y, z, y.as_strided_((2, 2), (1, 2))]

    return Program(run, [x])


def broadcast(device: torch.device) -> Program:
    x, y = torch.randn(3, 1, device=device), torch.randn(4, device=device)

    def run() -> list[Tensor]:
        wide = x.expand(3, 4)
        return [wide + y, wide.sum(0), wide.reshape(-1), torch.broadcast_to(y, (2, 4)) * 2, wide]

    return Program(run, [x, y])


def out_arguments(device: torch.device) -> Program:
    x, kept = torch.randn(3, 4, device=device), torch.zeros(3, 4, device=device)

    def run() -> list[Tensor]:
        torch.mul(x, 2, out=kept)
        fresh = torch.empty(0, device=device)  # resized by the operation, as it is the function's own
        torch.add(x, kept, out=fresh)
        values, indices = torch.empty(3, 2, device=device), torch.empty(3, 2, dtype=torch.long, device=device)
        torch.topk(x, 2, out=(values, indices))
        rows = torch.empty(2, 3, 4, device=device)
        torch.sin(x, out=rows[1])
        torch.cos(x, out=rows[0])
        return [fresh + 1, values, indices, rows]

    return Program(run, [x], [kept])


def returns_its_arguments(device: torch.device) -> Program:
    x = torch.randn(3, device=device)
    return Program(lambda: [x, x + 1, x.view(3, 1), x.contiguous(), x.to(torch.float32), x.float()], [x])


def arguments_overlap(device: torch.device) -> Program:
    x = torch.randn(6, device=device)

    def run() -> list[Tensor]:
        left, right = x[:3], x[3:]
        left.add_(right)
        right.mul_(left)
        x.add_(x)
        return [torch.cat([left, x, right]), left + x[1:4]]

    return Program(run, [x])


def no_elements(device: torch.device) -> Program:
    empty, x = torch.randn(0, 4, device=device), torch.randn(3, 4, device=device)

    def run() -> list[Tensor]:
        leaf = empty.detach().requires_grad_()
        result = (leaf @ x.t()).softmax(-1)
        result.sum().backward()
        assert leaf.grad is not None
        return [result.detach(), leaf.grad, torch.cat([empty, x]), empty.sum(0), empty.t().reshape(-1), x[3:], x[:0]]

    return Program(run, [x])


@pytest.mark.parametrize(
    "build",
    [
        *(views_of_a_result, writes_through_views, writes_into_input, inplace_shapes, broadcast, out_arguments),
        *(returns_its_arguments, arguments_overlap, no_elements),
    ],
    ids=lambda build: build.__name__,
)
def test_shared_memory(engine: Engine, build: Build) -> None:
    assert_replays_equal_eager(engine, build)


def test_result_keeps_its_address(engine: Engine) -> None:
    x = torch.ones(8, device=engine.device)
    recording = engine.capture(lambda: {"twice": x * 2, "view": x[2:]})
    address = recording.result["twice"].data_ptr()
    for value in (1.0, 5.0):
        x.fill_(value)
        run_replay(engine, recording)
        assert recording.result["twice"].data_ptr() == address
        assert recording.result["twice"].tolist() == [2 * value] * 8
    assert recording.result["view"].data_ptr() == x[2:].data_ptr()


def test_data_assigned_after_capture_stays_outside(engine: Engine) -> None:
    x, y = torch.ones(4, device=engine.device), torch.full((4,), 7.0, device=engine.device)
    captured = x.detach()
    recording = engine.capture(lambda: x * 2)
    x.data = y
    captured.fill_(3.0)
    run_replay(engine, recording)
    assert recording.result.tolist() == [6.0] * 4
