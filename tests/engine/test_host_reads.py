"""Host reads and shapes that depend on values are refused: the operation, this file and line, and a way out."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.programs import Program, assert_replays_equal_eager, run_replay
from torch import Tensor, nn
from torch.nn import functional

from graphstep.engine import Engine, TapeEngine
from graphstep.errors import CaptureError

Function = Callable[..., Any]

READS: Mapping[str, Function] = {
    "item": lambda x, i: x.sum().item(),
    "tolist": lambda x, i: x.tolist(),
    "bool": lambda x, i: bool(x[0, 0] > 0),
    "if": lambda x, i: x if x.sum() > 0 else -x,
    "int": lambda x, i: int(i[0]),
    "float": lambda x, i: float(x[0, 0]),
    "contains": lambda x, i: 3 in i,
    "as_index": lambda x, i: [10, 20, 30, 40][i[0]],
    "as_range": lambda x, i: list(range(i[0])),
    "as_slice": lambda x, i: x[: i[0]],
    "as_size": lambda x, i: torch.zeros(i[0], 2, device=x.device),
    "as_scalar": lambda x, i: torch.full((2,), x[0, 0], device=x.device),
    "print": lambda x, i: print(x, file=io.StringIO()),
    "repr": lambda x, i: repr(x),
    "repr_parameter": lambda x, i: str(nn.Parameter(x)),
    "format": lambda x, i: f"{x.sum():.3f}",
    "percent": lambda x, i: "%s" % x,  # noqa: UP031
    "cpu": lambda x, i: x.cpu(),
    "nonzero": lambda x, i: x.nonzero(),
    "where_alone": lambda x, i: torch.where(x > 0),
    "argwhere": lambda x, i: torch.argwhere(x),
    "mask_index": lambda x, i: x[x > 0],
    "mask_put": lambda x, i: x.index_put((x > 0,), x[0, :1].expand(12)),
    "mask_set": lambda x, i: x.clone().__setitem__(x > 0, x[0, 0]),
    "number_put": lambda x, i: x.clone().__setitem__((i, 1), 5.0),
    "masked_select": lambda x, i: x.masked_select(x > 0),
    "unique": lambda x, i: i.unique(),
    "unique_consecutive": lambda x, i: i.unique_consecutive(),
    "bincount": lambda x, i: i.bincount(minlength=5),
    "repeat_interleave": lambda x, i: x.repeat_interleave(i, dim=0),
    "equal": lambda x, i: torch.equal(x, x * 2),
    "allclose": lambda x, i: torch.allclose(x, x * 2),
    "one_hot_of_any_width": lambda x, i: functional.one_hot(i),
    "inverse": lambda x, i: torch.linalg.inv(x.view(3, 4)[:, :3]),
    "error_if_nonfinite": lambda x, i: nn.utils.get_total_norm([x]).isfinite().item(),
    "pickle": lambda x, i: pickle.dumps(x),
    "save": lambda x, i: torch.save(x, io.BytesIO()),
    "tensor_of_tensors": lambda x, i: torch.tensor([x[0, 0], x[0, 1]], device=x.device),
}

ON_TAPE_ONLY: Mapping[str, Function] = {  # tensors on a GPU take these, or never do
    "numpy": lambda x, i: x.numpy(),
    "numpy_array": lambda x, i: np.asarray(x),
    "numpy_function": lambda x, i: np.multiply(x, 2),
    "deepcopy": lambda x, i: copy.deepcopy(x),
    "dlpack": lambda x, i: np.from_dlpack(x),
    "storage": lambda x, i: x.storage(),
    "set": lambda x, i: torch.empty(0, device=x.device).set_(x),
    "resize": lambda x, i: (x * 2).resize_(2),
    "as_tensor": lambda x, i: torch.as_tensor([x[0, 0]]),
    "new_tensor": lambda x, i: x.new_tensor([[x[0, 0]]]),
    "tensor_split": lambda x, i: x.tensor_split(i.sort().values),
    "python_loop": lambda x, i: (x * 2).apply_(lambda value: value + 1),
    "transposed_in_place": lambda x, i: x.t_(),
}


def assert_refused(engine: Engine, function: Function) -> CaptureError:
    """At the line where ``function`` is defined."""
    x, i = torch.randn(4, 3, device=engine.device), torch.tensor([3, 1, 2, 0], device=engine.device)
    with pytest.raises(CaptureError) as caught:
        engine.capture(lambda: function(x, i))
    error = caught.value
    assert error.what
    assert f"{__file__}:{function.__code__.co_firstlineno} in " in error.where
    assert error.fix
    assert x.shape == (4, 3)
    recording = engine.capture(lambda: x * 2)  # the engine is usable
    run_replay(engine, recording)
    assert torch.equal(recording.result, x * 2)
    return error


@pytest.mark.parametrize("name", READS)
def test_refused(engine: Engine, name: str) -> None:
    assert_refused(engine, READS[name])


@pytest.mark.parametrize("name", ON_TAPE_ONLY)
def test_refused_on_the_tape(tape: TapeEngine, name: str) -> None:
    assert_refused(tape, ON_TAPE_ONLY[name])


@pytest.mark.parametrize("name", ["item", "where_alone", "bool", "equal", "mask_index", "tolist"])
def test_refused_in_inference_mode(engine: Engine, name: str) -> None:
    function = READS[name]
    x = torch.randn(4, 3, device=engine.device)
    i = torch.tensor([3, 1, 2, 0], device=engine.device)
    with torch.inference_mode(), pytest.raises(CaptureError) as caught:
        engine.capture(lambda: function(x * 1, i))
    assert f"{__file__}:{function.__code__.co_firstlineno} in " in caught.value.where


@pytest.mark.parametrize(
    ("name", "operation"),
    [("item", "_local_scalar_dense"), ("tolist", "Tensor.tolist"), ("nonzero", "aten::nonzero"), ("cpu", "Tensor.cpu")],
)
def test_the_tape_names_the_operation(tape: TapeEngine, name: str, operation: str) -> None:
    error = assert_refused(tape, READS[name])
    assert operation in error.what
    assert operation in str(error)
    assert "fix:" in str(error)


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, read: Function) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.read = read
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        ctx.read(gradient, None)
        return gradient * 2, None


BACKWARDS: Mapping[str, Function] = {
    "method": lambda loss, leaf: loss.backward(),
    "of_several": lambda loss, leaf: torch.autograd.backward([loss, loss * 2], [loss, loss]),
    "to_inputs": lambda loss, leaf: loss.backward(inputs=[leaf]),
    "grad": torch.autograd.grad,
    "grad_by_name": lambda loss, leaf: torch.autograd.grad(outputs=[loss], inputs=[leaf], allow_unused=True),
}


@pytest.mark.parametrize("read", ["item", "tolist", "repr", "cpu", "if"])
@pytest.mark.parametrize("how", BACKWARDS)
def test_refused_in_the_backward_of_a_function(engine: Engine, how: str, read: str) -> None:
    """Function modes are off while they handle ``backward``, so that these need care on the tape."""
    leaf, reads = torch.ones(3, 3, device=engine.device, requires_grad=True), READS[read]
    with pytest.raises(CaptureError) as caught:
        engine.capture(lambda: BACKWARDS[how](ReadsInBackward.apply(leaf, reads).sum(), leaf))
    assert f"{__file__}:{reads.__code__.co_firstlineno} in " in caught.value.where
    assert leaf.grad is None


@pytest.mark.parametrize("how", BACKWARDS)
def test_ways_to_run_backward_are_replayed(engine: Engine, how: str) -> None:
    def build(device: torch.device) -> Program:
        leaf = torch.randn(3, 3, device=device, requires_grad=True)
        leaf.grad, heard = torch.zeros_like(leaf), torch.zeros_like(leaf)
        leaf.register_hook(lambda gradient: heard.add_(gradient).clone())
        return Program(lambda: BACKWARDS[how]((leaf**3).sum(), leaf), [leaf], [leaf.grad, heard])

    assert_replays_equal_eager(engine, build)


def test_refused_in_a_hook(engine: Engine) -> None:
    leaf = torch.ones(3, device=engine.device, requires_grad=True)
    reads = lambda gradient: gradient * float(gradient.sum())  # noqa: E731
    leaf.register_hook(reads)
    with pytest.raises(CaptureError) as caught:
        engine.capture(lambda: (leaf * 2).sum().backward())
    assert f"{__file__}:{reads.__code__.co_firstlineno} in " in caught.value.where


@pytest.mark.parametrize("foreach", [False, True])
def test_refused_in_an_optimizer(engine: Engine, foreach: bool) -> None:
    """Adam that keeps its step count for the host."""
    weight = torch.ones(3, device=engine.device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam([weight], foreach=foreach)
    optimizer.step()
    before = weight.tolist()

    def step() -> None:
        optimizer.step()

    with pytest.raises(CaptureError) as caught:
        engine.capture(step)
    assert f"{__file__}:{step.__code__.co_firstlineno + 1} in step" in caught.value.where
    assert weight.tolist() == before


ALLOWED: Mapping[str, Function] = {
    "one_hot": lambda x, i: functional.one_hot(i, 4),
    "repeat_interleave_of_known_size": lambda x, i: x.repeat_interleave(i, dim=0, output_size=6),
    "mask_filled": lambda x, i: x.masked_fill(x > 0, 1.0),
    "mask_set_to_a_number": lambda x, i: set_where_positive(x),
    "shape": lambda x, i: x.new_zeros(x.shape[0], len(x)) + x.numel() + x.dim(),
    "iterated": lambda x, i: [row * 2 for row in x],
    "module_printed": lambda x, i: [x * 2, repr(nn.Linear(2, 2))][0],
    "tensor_of_tensor": lambda x, i: x.clone().detach() * 2,
}


def set_where_positive(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 7.0
    return y


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(engine: Engine, name: str) -> None:
    """What reads nothing, or reads only on the CPU, is no false alarm."""
    function = ALLOWED[name]
    x, i = torch.randn(4, 3, device=engine.device), torch.tensor([3, 1, 2, 0], device=engine.device)
    recording = engine.capture(lambda: function(x, i))
    x.neg_()
    i.copy_(i.flip(0))
    run_replay(engine, recording)
    found, expected = recording.result, function(x, i)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
