"""What a pair refuses, and how."""

from __future__ import annotations

import pytest
import torch
from tests.capture.pairs import call, captured, forward_pair
from torch import Tensor, nn

from graphstep.capture.pair_capture import capture_backwards, capture_forwards
from graphstep.capture.session import GraphSession
from graphstep.errors import CaptureError, GraphstepError, LifecycleError


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(2, 3, device=device, requires_grad=True)


def test_a_second_backward_of_one_call_is_refused(session: GraphSession, x: Tensor) -> None:
    pair = captured(session, lambda x: x.tanh() * 2, x)
    out = call(pair, x)
    out.sum().backward(retain_graph=True)
    with pytest.raises(LifecycleError, match="backward of this call has run already") as caught:
        out.sum().backward()
    assert caught.value.where == "region"
    assert caught.value.fix


def test_a_backward_of_a_backward_is_refused(session: GraphSession, x: Tensor) -> None:
    """Also where nothing is there that could tell later: the gradient that comes in is a constant."""
    pair = captured(session, lambda x: x.tanh() * 2, x)
    with pytest.raises(LifecycleError, match="create_graph=True") as caught:
        torch.autograd.grad(call(pair, x).sum(), x, create_graph=True)
    assert caught.value.where == "region"
    assert caught.value.fix


def test_stale_outputs_that_autograd_saved_are_refused(session: GraphSession, device: torch.device, x: Tensor) -> None:
    pair = captured(session, lambda x: x * 2, x)
    square = call(pair, x).square()
    call(pair, torch.zeros_like(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_a_held_result_is_noticed(session: GraphSession, x: Tensor) -> None:
    pair = captured(session, lambda x: (x * 2, x + 1), x)
    assert not pair.is_held()
    out = call(pair, x)
    assert pair.is_held()
    out[0].sum().backward()
    view = out[1].detach()[0]
    del out
    assert pair.is_held()
    del view
    assert not pair.is_held()


def test_halves_come_in_order(session: GraphSession, device: torch.device, x: Tensor) -> None:
    pair = captured(session, lambda x: x * 2, x)
    fresh = type(pair)(pair.region, pair.signature, [x.detach()], frozenset(), session, session.stats("r", "layer"))
    assert not fresh.is_ready
    with pytest.raises(LifecycleError):
        capture_backwards([fresh], [])


def test_a_half_is_captured_once(session: GraphSession, x: Tensor) -> None:
    pair = captured(session, lambda x: x * 2, x)
    with pytest.raises(LifecycleError):
        capture_forwards([pair])
    with pytest.raises(LifecycleError):
        capture_backwards([pair], pair.grad_outputs)


def test_a_region_without_gradient_is_refused(session: GraphSession, x: Tensor) -> None:
    with pytest.raises(CaptureError, match="no result of it needs a gradient"):
        forward_pair(session, lambda x: x.detach() * 2, x)


def test_a_host_read_names_the_line_and_leaves_no_trace(session: GraphSession, device: torch.device, x: Tensor) -> None:
    linear = nn.Linear(3, 3).to(device)

    def reads(x: Tensor) -> Tensor:
        y = linear(x)
        return y * y.max().item()  # the line to name

    with pytest.raises(CaptureError) as caught:
        captured(session, reads, x)
    assert "test_graph_pair_errors.py" in caught.value.where
    assert "the line to name" in caught.value.where
    assert caught.value.fix


def test_a_replay_after_the_session_is_closed_is_refused(session: GraphSession, x: Tensor) -> None:
    pair = captured(session, lambda x: x * 2, x)
    out = call(pair, x)
    session.close()
    with pytest.raises(GraphstepError):
        call(pair, x)
    with pytest.raises(GraphstepError):
        out.sum().backward()
