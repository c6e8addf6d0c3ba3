"""A capture that fails, wherever it does, has not happened: state, memory, generators, engine."""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.engine.programs import bits, rng_state, run_replay, snapshot
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from graphstep.engine import Engine, TapeEngine
from graphstep.errors import CaptureError


class OwnError(Exception):
    """An error of the function's own."""


class FailAt(TorchDispatchMode):
    """Raises at the n-th operation, which may be one of the backward pass."""

    def __init__(self, position: int | None) -> None:
        super().__init__()
        self.position = position
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.count == self.position:
            raise OwnError(func.name())
        self.count += 1
        return func(*args, **(kwargs or {}))


class Step:
    """A training step with everything that could be left half done."""

    def __init__(self, device: torch.device) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device)
        self.x, self.count = torch.randn(6, 3, device=device), torch.zeros(2, device=device)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self()
        self.num_operations = 0

    def __call__(self, position: int | None = None) -> Tensor:
        with FailAt(position) as counter:
            self.count.add_(1)
            loss = self.model(self.x).square().sum()
            loss.backward()
            self.optimizer.step()
            self.x.copy_(torch.rand_like(self.x))
        self.num_operations = counter.count
        return loss.detach()

    @property
    def tensors(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [self.x, self.count, *self.model.parameters(), *self.model.buffers(), *gradients, *momenta]


def test_failure_at_every_operation(engine: Engine) -> None:
    with engine.capture_stream():
        step = Step(engine.device)
        step()
    before, state = snapshot(*step.tensors), rng_state(engine)
    assert step.num_operations > 20
    sizes = set()
    for position in range(step.num_operations):
        with pytest.raises(OwnError):
            engine.capture(lambda position=position: step(position))
        assert snapshot(*step.tensors) == before, f"operation {position} left a trace"
        assert rng_state(engine) == state
        sizes.add(engine.pool_bytes)
        assert not engine.is_capturing
    if engine.device.type == "cpu":
        assert sizes == {0}
    else:
        assert engine.pool_bytes == max(sizes), "the pool grows with each failure"


def test_job_goes_on_after_a_failure(engine: Engine) -> None:
    """Eager random operations work, the engine captures again, and older recordings replay."""
    x = torch.ones(4, device=engine.device)
    older = engine.capture(lambda: x * 3)

    def fails() -> Tensor:
        return (torch.rand(4, device=engine.device) * x).sum().item()

    for _ in range(3):
        with pytest.raises(CaptureError):
            engine.capture(fails)
    torch.manual_seed(1)
    expected = bits(torch.rand(4, device=engine.device))
    torch.manual_seed(1)
    newer = engine.capture(lambda: functional.dropout(x, 0.0) + torch.rand(4, device=engine.device))
    assert bits(torch.rand(4, device=engine.device)) == expected
    torch.manual_seed(1)
    run_replay(engine, newer)
    assert bits(newer.result - 1.0) == bits(torch.ones_like(x) + _seeded(engine) - 1.0)
    run_replay(engine, older)
    assert older.result.tolist() == [3.0] * 4


def _seeded(engine: Engine) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(4, device=engine.device)


@pytest.mark.parametrize("fail", [lambda y: y.sum().item(), lambda y: y[99]], ids=["refused", "own"])
def test_intermediates_die_with_the_failure(engine: Engine, fail: Callable[[Tensor], Any]) -> None:
    """Without the help of the garbage collector: a job that goes on eagerly needs the memory."""
    x = torch.ones(4, device=engine.device)
    seen: list[weakref.ref[Tensor]] = []

    def step() -> Tensor:
        y = x * 2
        seen.append(weakref.ref(y))
        z = y.exp()
        seen.append(weakref.ref(z))
        return fail(z)

    with suppress(CaptureError, IndexError):
        engine.capture(step)
    assert [reference() for reference in seen] == [None, None]


def test_own_errors_pass_through(engine: Engine) -> None:
    def step() -> None:
        raise OwnError("as it is")

    with pytest.raises(OwnError, match="as it is"):
        engine.capture(step)


def test_interrupt_passes_through(engine: Engine) -> None:
    count = torch.zeros(1, device=engine.device)

    def step() -> None:
        count.add_(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.capture(step)
    assert count.tolist() == [0.0]
    assert engine.capture(lambda: count * 2).result is not None


@pytest.mark.parametrize("swallow", ["except", "logging"])
def test_swallowed_refusal_still_fails(engine: Engine, swallow: str) -> None:
    """A logger catches what goes wrong in formatting; on a GPU the capture is lost all the same."""
    x, count = torch.ones(3, device=engine.device), torch.zeros(1, device=engine.device)
    logger, lines = logging.Logger("of this test"), io.StringIO()
    logger.addHandler(logging.StreamHandler(lines))

    def step() -> Tensor:
        count.add_(1)
        if swallow == "logging":
            logger.warning("x is %s", x)
        else:
            with suppress(RuntimeError):
                x.sum().item()
        return x * 2

    raise_errors, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        with pytest.raises(CaptureError):
            engine.capture(step)
    finally:
        logging.raiseExceptions = raise_errors
    assert lines.getvalue() == ""
    assert count.tolist() == [0.0]
    recording = engine.capture(lambda: x + 1)
    run_replay(engine, recording)
    assert recording.result.tolist() == [2.0] * 3


def test_swallowed_refusal_names_its_line(tape: TapeEngine) -> None:
    x = torch.ones(3)

    def step() -> Tensor:
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x

    with pytest.raises(CaptureError, match="caught this error") as caught:
        tape.capture(step)
    assert f"{__file__}:{step.__code__.co_firstlineno + 2}" in caught.value.where
