"""Programs to capture, and the one check that counts: replays with changed inputs equal eager runs, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphstep.engine import Engine, Recording

Bits = tuple[torch.dtype, tuple[int, ...], bytes]


@dataclass
class Program:
    """A function without arguments and the tensors around it."""

    run: Callable[[], Any]
    inputs: Sequence[Tensor] = ()
    """What a caller writes before each run."""
    state: Sequence[Tensor] = ()
    """What a run changes, besides what it returns."""
    generators: Sequence[torch.Generator] = ()


Build = Callable[[torch.device], Program]


def assert_replays_equal_eager(
    engine: Engine,
    build: Build,
    *,
    num_replays: int = 3,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Build a program twice, run one eagerly and replay the other, and compare everything after each run."""
    eager, graphed = (_built_and_warm(engine, build, context) for _ in range(2))
    before = snapshot(*graphed.inputs, *graphed.state)
    torch.manual_seed(11)
    state = rng_state(engine)
    with context():
        recording = engine.capture(graphed.run, generators=graphed.generators)
    assert snapshot(*graphed.inputs, *graphed.state) == before, "the capture left a trace"
    assert rng_state(engine) == state, "the capture drew random numbers"
    for replay in range(num_replays):
        change(eager.inputs, seed=replay)
        change(graphed.inputs, seed=replay)
        state = rng_state(engine)
        with context():
            expected = eager.run()
        end_state = rng_state(engine)
        set_rng_state(engine, state)
        with context():
            run_replay(engine, recording)
        assert_same_bits(recording.result, expected, f"result of replay {replay}")
        assert_same_bits(list(graphed.inputs), list(eager.inputs), f"inputs after replay {replay}")
        assert_same_bits(list(graphed.state), list(eager.state), f"state after replay {replay}")
        assert rng_state(engine) == end_state, f"replay {replay} left another generator state"
    recording.close()


def _built_and_warm(engine: Engine, build: Build, context: Callable[[], AbstractContextManager[Any]]) -> Program:
    """The same program each time, after one eager run."""
    torch.manual_seed(3)
    with engine.capture_stream():
        program = build(engine.device)
        with context():
            program.run()
    engine.synchronize()
    return program


def run_replay(engine: Engine, recording: Recording) -> None:
    recording.replay()
    engine.synchronize()


@torch.no_grad()
def change(inputs: Sequence[Tensor], *, seed: int) -> None:
    """Write new values: other floats, and integers and bools in another order.

    Floats are multiples of 1/16, so that sums do not depend on the order in which a GPU adds.
    """
    source = torch.Generator().manual_seed(1000 + seed)
    for tensor in inputs:
        if tensor.is_complex():
            parts = torch.randn(*tensor.shape, 2, generator=source)
            tensor.copy_(torch.view_as_complex((parts * 16).round() / 16))
        elif tensor.is_floating_point():
            tensor.copy_((torch.randn(tensor.shape, generator=source) * 16).round() / 16)
        else:
            order = torch.randperm(tensor.numel(), generator=source)
            tensor.copy_(tensor.cpu().reshape(-1)[order].reshape(tensor.shape))


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def bits(tensor: Tensor) -> Bits:
    """Type, shape and content, to be compared with ``==``: a NaN equals itself and zeros have a sign."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def snapshot(*tensors: Tensor) -> list[Bits]:
    return [bits(tensor) for tensor in tensors]


def assert_same_bits(actual: Any, expected: Any, what: str) -> None:
    found, wanted = list(tensors_of(actual)), list(tensors_of(expected))
    assert len(found) == len(wanted), f"{what}: {len(found)} tensors, expected {len(wanted)}"
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if bits(one) != bits(other):
            raise AssertionError(f"{what}, tensor {index}: got\n{one}\nexpected\n{other}")


def default_generator(engine: Engine) -> torch.Generator:
    """The default generator of the engine's device."""
    if engine.device.type == "cuda":
        return torch.cuda.default_generators[engine.device.index]
    return torch.default_generator


def rng_state(engine: Engine) -> bytes:
    return default_generator(engine).get_state().numpy().tobytes()


def set_rng_state(engine: Engine, state: bytes) -> None:
    default_generator(engine).set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
