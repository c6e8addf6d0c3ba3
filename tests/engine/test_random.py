"""Random numbers: every replay draws anew, and all of them are those of an eager run with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.programs import Build, Program, assert_replays_equal_eager, bits, rng_state, run_replay
from torch import Tensor
from torch.nn import functional

from graphstep.engine import Engine, TapeEngine
from graphstep.errors import CaptureError


def draws(device: torch.device) -> Program:
    x = torch.rand(4, 6, device=device)

    def run() -> list[Tensor]:
        y = x.abs().clamp(0.05, 0.9)
        return [
            *(torch.rand(3, device=device), torch.randn(5, device=device), torch.randint(0, 9, (4,), device=device)),
            *(torch.rand_like(x), torch.randn_like(x), torch.bernoulli(y), x.clone().normal_(1, 2)),
            *(torch.randperm(6, device=device), torch.multinomial(y, 5, replacement=True), x.clone().random_(3, 9)),
            *(functional.dropout(x, 0.5), functional.dropout(x.bfloat16(), 0.3), functional.dropout1d(x, 0.5)),
            *(x.clone().uniform_(-1, 1), x.clone().normal_(), x.clone().exponential_(), x.clone().bernoulli_(0.3)),
            functional.gumbel_softmax(x, hard=True),
        ]

    return Program(run, [x])


def attention_dropout(device: torch.device) -> Program:
    q = torch.randn(1, 2, 4, 8, device=device, requires_grad=True)
    q.grad = torch.zeros_like(q)

    def run() -> Tensor:
        out = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        out.sum().backward()
        return out.detach()

    return Program(run, [q], [q.grad])


def forked(device: torch.device) -> Program:
    """What is drawn inside ``fork_rng`` is drawn again after it."""

    def run() -> list[Tensor]:
        first = torch.rand(3, device=device)
        with torch.random.fork_rng():
            inside = torch.rand(3, device=device)
        return [first, inside, torch.rand(3, device=device)]

    return Program(run)


def rewound(device: torch.device) -> Program:
    """Back to the beginning, twice, and on from the middle at the end."""
    module: Any = torch.cuda if device.type == "cuda" else torch

    def run() -> list[Tensor]:
        start = module.get_rng_state()
        results = [torch.rand(3, device=device)]
        middle = module.get_rng_state()
        results.append(torch.randn(4, device=device))
        for _ in range(2):
            module.set_rng_state(start)
            results.append(torch.rand(3, device=device))
        module.set_rng_state(middle)
        return results

    return Program(run)


@pytest.mark.parametrize("build", [draws, attention_dropout, forked, rewound], ids=lambda build: build.__name__)
def test_equals_eager(engine: Engine, build: Build) -> None:
    assert_replays_equal_eager(engine, build)


def test_each_replay_draws_anew_and_a_seed_repeats_them(engine: Engine) -> None:
    recording = engine.capture(lambda: functional.dropout(torch.ones(64, device=engine.device), 0.5))
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        for _ in range(3):
            run_replay(engine, recording)
            runs.append(bits(recording.result))
    assert runs[:3] == runs[3:]
    assert len(set(runs)) == 3


def test_eager_draws_between_replays_take_part(engine: Engine) -> None:
    draw = lambda: torch.rand(4, device=engine.device)  # noqa: E731
    recording = engine.capture(draw)
    torch.manual_seed(9)
    expected = [bits(draw()) for _ in range(3)]
    torch.manual_seed(9)
    found = []
    for step in range(3):
        if step != 1:
            run_replay(engine, recording)
        found.append(bits(draw() if step == 1 else recording.result))
    assert found == expected


def test_capture_keeps_the_generators(engine: Engine) -> None:
    generator = torch.Generator(engine.device)
    generator.manual_seed(3)
    states = rng_state(engine), generator.get_state()
    engine.capture(lambda: torch.rand(4, device=engine.device, generator=generator), generators=[generator])
    assert rng_state(engine) == states[0]
    assert torch.equal(generator.get_state(), states[1])


def test_named_generator(engine: Engine) -> None:
    generators = [torch.Generator(engine.device) for _ in range(2)]
    for generator in generators:
        generator.manual_seed(3)
    eager, captured = generators

    def draw(generator: torch.Generator) -> list[Tensor]:
        own = torch.rand(4, device=engine.device, generator=generator)
        default = torch.rand(2, device=engine.device)
        return [own, default, torch.empty(3, device=engine.device).normal_(generator=generator)]

    recording = engine.capture(lambda: draw(captured), generators=[captured])
    for _ in range(3):
        torch.manual_seed(4)
        expected = draw(eager)
        torch.manual_seed(4)
        run_replay(engine, recording)
        assert [bits(t) for t in recording.result] == [bits(t) for t in expected]
        assert torch.equal(captured.get_state(), eager.get_state())
    captured.manual_seed(3)
    eager.manual_seed(3)
    run_replay(engine, recording)
    assert bits(recording.result[0]) == bits(draw(eager)[0])


def test_default_generator_by_name(tape: TapeEngine) -> None:
    recording = tape.capture(lambda: [torch.rand(3, generator=torch.default_generator), torch.rand(3)])
    torch.manual_seed(2)
    expected = bits(torch.rand(3)), bits(torch.rand(3))
    torch.manual_seed(2)
    recording.replay()
    assert (bits(recording.result[0]), bits(recording.result[1])) == expected


def assert_refused(engine: Engine, function: Callable[[], Any], match: str) -> None:
    state = rng_state(engine)
    with pytest.raises(CaptureError, match=match):
        engine.capture(function)
    assert rng_state(engine) == state


def test_unknown_generator_is_refused(engine: Engine) -> None:
    generator = torch.Generator(engine.device)
    assert_refused(engine, lambda: torch.rand(3, device=engine.device, generator=generator), "generators=")


def test_reseeding_is_refused(engine: Engine) -> None:
    def reseed() -> Tensor:
        torch.manual_seed(77)
        return torch.rand(3, device=engine.device)

    assert_refused(engine, reseed, "seed before the captured call")


@pytest.mark.parametrize("draws_first", [False, True])
def test_reseeding_to_the_same_seed_is_refused(tape: TapeEngine, draws_first: bool) -> None:
    """The state after it is the one at which the capture began, but it is no rewind: eager runs would repeat."""

    def reseed() -> Tensor:
        first = torch.rand(3) if draws_first else torch.zeros(3)
        torch.manual_seed(77)
        return first + torch.rand(3)

    torch.manual_seed(77)
    assert_refused(tape, reseed, "reseeded")


def test_reseeding_at_the_end_is_refused(tape: TapeEngine) -> None:
    assert_refused(tape, lambda: [torch.rand(3), torch.manual_seed(1)], "reseeded")


def test_state_from_outside_is_refused(tape: TapeEngine) -> None:
    kept = torch.get_rng_state()
    assert_refused(tape, lambda: [torch.set_rng_state(kept), torch.rand(3)], "reseeded")


def test_named_generator_reseeded_before_its_first_draw_is_refused(tape: TapeEngine) -> None:
    generator = torch.Generator()
    generator.manual_seed(5)
    with pytest.raises(CaptureError, match="reseeded"):
        tape.capture(lambda: torch.rand(3, generator=generator.manual_seed(5)), generators=[generator])
    assert generator.initial_seed() == 5
