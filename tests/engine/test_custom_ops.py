"""Operations registered by a library or a user: annotated, not annotated, random, or reading values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.engine.programs import Program, assert_replays_equal_eager, snapshot
from torch import Tensor

from graphstep.engine import Engine, TapeEngine
from graphstep.errors import CaptureError

NAMESPACE = "graphstep_tests"
CONSTANT = torch.arange(3.0)


def returns_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results in the same memory."""
    twice = x * 2
    return twice[:2], twice[1:]


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """The operations of this file, gone after it."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema, kernel in {
        "scaled(Tensor x, float factor) -> Tensor": lambda x, factor: x * factor,
        "add_to(Tensor(a!) total, Tensor x) -> ()": lambda total, x: (total.add_(x), None)[1],
        "add_and_return(Tensor(a!) total, Tensor x) -> Tensor": lambda total, x: total.add_(x) * 2,
        "listed(Tensor[] xs) -> Tensor[]": lambda xs: [x + 1 for x in xs],
        "silent(Tensor total) -> Tensor": lambda total: total.add_(1),
        "silent_copy(Tensor total, Tensor x) -> ()": lambda total, x: (total.add_(x), None)[1],
        "silent_and_new(Tensor total, Tensor x) -> Tensor": lambda total, x: total.add_(x) * 1,
        "random(Tensor x) -> Tensor": lambda x: x * torch.rand_like(x),
        "repeated(Tensor x) -> Tensor": lambda x: x.sum().expand(3),
        "halves(Tensor x) -> (Tensor, Tensor)": returns_halves,
        "constant() -> Tensor": lambda: CONSTANT,
        "sometimes_view(Tensor(a) x) -> Tensor(a)": lambda x: x.t().reshape(-1),
        "reads(Tensor x) -> Tensor": lambda x: x * x.sum().item(),
        "grows(Tensor x) -> Tensor": lambda x: x[x > 0],
        "by_numpy(Tensor x) -> Tensor": lambda x: torch.from_numpy(np.sin(x.numpy())),
    }.items():
        library.define(schema)
        library.impl(schema.split("(", maxsplit=1)[0], kernel, "CompositeExplicitAutograd")
    yield
    library._destroy()


def program(name: str, device: torch.device) -> Program:
    call = getattr(getattr(torch.ops, NAMESPACE), name)
    x, total = torch.randn(3, device=device), torch.zeros(3, device=device)
    wide = torch.randn(2, 3, device=device)
    runs = {
        "scaled": lambda: call(x, 1.5) + 1,
        "add_to": lambda: [call(total, x), total * 2],
        "add_and_return": lambda: call(total, x),
        "listed": lambda: call([x, wide]),
        "silent": lambda: call(total) * x,
        "silent_copy": lambda: [call(total, x), total * 2],
        "silent_and_new": lambda: call(total, x),
        "random": lambda: [call(x), torch.rand(2, device=device)],
        "repeated": lambda: call(x) * 1,
        "halves": lambda: [half.add_(5) for half in call(x)],
        "constant": lambda: call().to(device) + x if device.type == "cpu" else x * 1,
        "sometimes_view": lambda: call(wide) * 2,
        "by_numpy": lambda: call(x) * 2,
    }
    return Program(runs[name], [x, wide], [total])


ON_BOTH = ("scaled", "add_to", "add_and_return", "listed", "random", "repeated", "halves", "sometimes_view")
WITHOUT_ANNOTATION = ("silent", "silent_copy", "silent_and_new", "constant")


@pytest.mark.parametrize("name", [*ON_BOTH, *WITHOUT_ANNOTATION])
def test_equals_eager(engine: Engine, name: str) -> None:
    assert_replays_equal_eager(engine, lambda device: program(name, device))


@pytest.mark.parametrize("name", WITHOUT_ANNOTATION[:3])
def test_unannotated_write_is_undone(tape: TapeEngine, name: str) -> None:
    """Such an operation writes its argument without saying so."""
    for fails in (False, True):
        step = program(name, tape.device)
        before = snapshot(*step.inputs, *step.state)

        def run(step: Program = step, fails: bool = fails) -> None:
            step.run()
            if fails:
                raise KeyError("the function's own")

        if fails:
            with pytest.raises(KeyError):
                tape.capture(run)
        else:
            tape.capture(run)
        assert snapshot(*step.inputs, *step.state) == before


@pytest.mark.parametrize("name", ["reads", "grows"])
def test_reading_kernel_is_refused(tape: TapeEngine, name: str) -> None:
    x = torch.ones(3)
    call = getattr(getattr(torch.ops, NAMESPACE), name)
    with pytest.raises(CaptureError, match=r"value|depends on values"):
        tape.capture(lambda: call(x))


def test_kernel_outside_of_torch_is_called_again(tape: TapeEngine) -> None:
    assert_replays_equal_eager(tape, lambda device: program("by_numpy", device))


def test_custom_op_with_a_backward(engine: Engine) -> None:
    @torch.library.custom_op(f"{NAMESPACE}::cubed", mutates_args=())
    def cubed(x: Tensor) -> Tensor:
        return x * x * x

    cubed.register_autograd(
        lambda ctx, gradient: gradient * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )

    @torch.library.custom_op(f"{NAMESPACE}::halved_", mutates_args=("x",))
    def halved_(x: Tensor) -> None:
        x.div_(2)

    def build(device: torch.device) -> Program:
        x, kept = torch.randn(3, device=device, requires_grad=True), torch.zeros(3, device=device)
        x.grad = torch.zeros_like(x)

        def run() -> Tensor:
            y = cubed(x)
            y.sum().backward()
            kept.add_(y.detach())
            halved_(kept)
            return y.detach()

        return Program(run, [x], [x.grad, kept])

    assert_replays_equal_eager(engine, build)
