"""Gradients that are added many at a time equal those that autograd adds one by one, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphstep.capture import gathered_gradients
from graphstep.capture.gathered_gradients import GatheredGradients, GradientWatch
from graphstep.engine import torch_private

HIDDEN = 6
Run = Callable[[nn.Module], None]


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def num_additions(self) -> int:
        return self.count["add_"]

    @property
    def num_joint_additions(self) -> int:
        return self.count["_foreach_add_"]


class Tied(nn.Module):
    """A stack whose first and last weight are one, with a weight of its own that is used twice."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, HIDDEN, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN, dtype=dtype), nn.LayerNorm(HIDDEN, dtype=dtype)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(((x * self.scale) @ self.embedding.weight.t()).float(), tokens)


def tokens(number: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.randint(9, (5,), generator=torch.Generator().manual_seed(number)).to(device)


def once(model: nn.Module) -> None:
    model(tokens(0, next(model.parameters()).device)).backward()


def twice_and_scaled(model: nn.Module) -> None:
    for number in range(2):
        (model(tokens(number, next(model.parameters()).device)) * 0.3).backward()


def graph_kept(model: nn.Module) -> None:
    loss = model(tokens(0, next(model.parameters()).device))
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def differentiated_gradients(model: nn.Module) -> None:
    loss = model(tokens(0, next(model.parameters()).device))
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(each.square().sum() for each in found).backward()  # type: ignore[union-attr]


def recomputed(model: nn.Module) -> None:
    for reentrant in (True, False):
        x = model.embedding(tokens(0, next(model.parameters()).device))
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.square().sum().backward()


def chosen_inputs(model: nn.Module) -> None:
    loss = model(tokens(0, next(model.parameters()).device))
    loss.backward(inputs=[model.scale, model.layers[1][0].weight])


RUNS = [once, twice_and_scaled, graph_kept, differentiated_gradients, recomputed, chosen_inputs]


def built(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, is_flat: bool = False) -> Tied:
    """A model whose gradients have values already, in one buffer if wanted."""
    torch.manual_seed(0)
    model = Tied(dtype).to(device)
    parameters = list(model.parameters())
    buffer = torch.randn(sum(p.numel() for p in parameters)).to(device, dtype)
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter) if is_flat else part.view_as(parameter).clone()
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for mine, theirs in zip(left, right, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), "bit for bit"


def gathered(model: nn.Module, run: Run, *, leaves: list[Tensor] | None = None) -> Calls:
    """Run it with gradients gathered; what is there before is there after."""
    shown = [parameter.grad for parameter in model.parameters()]
    with GatheredGradients(model.parameters() if leaves is None else leaves).taken(), Calls() as calls:
        run(model)
    assert all(p.grad is before for p, before in zip(model.parameters(), shown, strict=True))
    assert all(p._backward_hooks is None and p._post_accumulate_grad_hooks is None for p in model.parameters())
    return calls


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_results_are_those_of_autograd(run: Run, dtype: torch.dtype, is_flat: bool, device: torch.device) -> None:
    plain, model = built(device, dtype, is_flat=is_flat), built(device, dtype, is_flat=is_flat)
    with Calls() as before:
        run(plain)
    calls = gathered(model, run)
    assert_same(gradients(model), gradients(plain))
    if run is not differentiated_gradients:
        assert calls.num_joint_additions > 0
    assert calls.num_additions < before.num_additions


def test_one_launch_for_all_of_a_pass() -> None:
    model = built()
    assert gathered(model, once).num_joint_additions == 1
    assert gathered(model, twice_and_scaled).num_joint_additions == 2


def test_large_ones_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits keeps memory in use: past a limit it is added. What is as large by itself is left to autograd."""
    monkeypatch.setattr(gathered_gradients, "_LEAST_BYTES", 1)
    plain, model = built(), built()
    once(plain)
    calls = gathered(model, once)
    assert_same(gradients(model), gradients(plain))
    assert 2 < calls.num_joint_additions <= len(list(model.parameters()))
    assert calls.num_additions == sum(
        p.nbytes >= sum(q.nbytes for q in model.parameters()) // 16 for p in model.parameters()
    )


def test_without_callbacks_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "after_backward_pass", lambda action: action())
    plain, model = built(), built()
    twice_and_scaled(plain)
    gathered(model, twice_and_scaled)
    assert_same(gradients(model), gradients(plain))


def test_leaves_that_are_left_to_autograd() -> None:
    """Those with hooks of the user's own, and those that have no gradient yet."""
    plain, model = built(), built()
    seen: dict[str, list[Tensor]] = {"plain": [], "gathered": []}
    for name, each in (("plain", plain), ("gathered", model)):
        each.scale.register_hook(lambda g: g * 2)
        each.layers[0][0].bias.register_post_accumulate_grad_hook(
            lambda p, name=name: seen[name].append(p.grad.clone())  # type: ignore[misc]
        )
        each.layers[1][0].weight.grad = None
    once(plain)
    with GatheredGradients(model.parameters()).taken():
        once(model)
    assert_same(gradients(model), gradients(plain))
    assert_same(seen["gathered"], seen["plain"])


def test_sparse_gradients_are_left_to_autograd() -> None:
    table = nn.Embedding(9, 4, sparse=True)
    table.weight.grad = torch.ones(9, 4)
    with GatheredGradients([table.weight]).taken():
        table(tokens(0)).sum().backward()
    expected = torch.ones(9, 4)
    expected.index_add_(0, tokens(0), torch.ones(5, 4))
    assert torch.equal(table.weight.grad, expected)


def test_an_error_in_the_pass_leaves_gradients_where_they_were() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            raise ValueError("in the middle")

    model = built()
    shown = [parameter.grad for parameter in model.parameters()]
    x = model.layers[0](Fails.apply(model.embedding(tokens(0))))
    with pytest.raises(ValueError, match="in the middle"), GatheredGradients(model.parameters()).taken():
        model.layers[1](x).sum().backward()
    assert all(p.grad is before for p, before in zip(model.parameters(), shown, strict=True))
    assert all(p._backward_hooks is None for p in model.parameters())
    once(model)


def test_nothing_to_gather() -> None:
    with GatheredGradients([]).taken():
        once(built())


# ----- which can wait


def names_that_can_wait(model: nn.Module, run: Run) -> set[str]:
    watch = GradientWatch(model.parameters())
    with watch.watching():
        run(model)
    found = {id(leaf) for leaf in watch.can_wait()}
    assert all(p._backward_hooks is None and p._post_accumulate_grad_hooks is None for p in model.parameters())
    return {name for name, parameter in model.named_parameters() if id(parameter) in found}


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("run", [once, twice_and_scaled, graph_kept], ids=lambda run: run.__name__)
def test_all_can_wait_where_nothing_looks(run: Run, is_flat: bool, device: torch.device) -> None:
    model = built(device, is_flat=is_flat)
    assert names_that_can_wait(model, run) == {name for name, _ in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    assert names_that_can_wait(model, run) == {name for name, _ in model.named_parameters()}, "from none as well"


@pytest.mark.parametrize("is_flat", [False, True])
def test_gradients_that_a_hook_reads(is_flat: bool, device: torch.device) -> None:
    """In the backward of the first layer a hook reads gradients of the last one: those of others can wait."""
    model, read = built(device, is_flat=is_flat), []
    last, first = model.layers[2][0], model.layers[0][0]

    def reads(_: Tensor) -> None:
        read.append(last.weight.grad.norm())
        read.append(first.weight.grad is None)  # Not an operation, and not yet given.

    def run(model: nn.Module) -> None:
        x = model.embedding(tokens(0, device))
        x.register_hook(reads)
        for layer in model.layers:
            x = layer(x)
        x.sum().backward()

    waiting = names_that_can_wait(model, run)
    assert "layers.2.0.weight" not in waiting
    assert {"layers.2.0.bias", "layers.1.0.weight", "layers.0.0.weight"} <= waiting


def test_gradients_that_a_function_writes(device: torch.device) -> None:
    """As fused kernels for weight gradients do, here to a weight that autograd has given a gradient before."""
    model = built(device)
    weight = model.layers[2][0].weight

    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            assert weight.grad is not None
            weight.grad.mul_(0.5)
            return gradient

    def run(model: nn.Module) -> None:
        model.layers[2](Halves.apply(model.embedding(tokens(1, device)))).sum().backward()

    waiting = names_that_can_wait(model, run)
    assert "layers.2.0.weight" not in waiting
    assert "layers.2.0.bias" in waiting


def test_optimizers_that_step_in_the_backward(device: torch.device) -> None:
    """A hook of one parameter steps with the gradients of others: they cannot wait, and it has hooks itself."""
    model = built(device)
    others = [model.layers[2][0].weight, model.layers[2][0].bias]
    optimizer = torch.optim.SGD(others, lr=0.1)
    model.scale.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    def run(model: nn.Module) -> None:
        (model.layers[2](model.embedding(tokens(0, device)) * model.scale)).sum().backward()

    plain = {"layers.2.0.weight", "layers.2.0.bias", "scale"}
    watch = GradientWatch(model.parameters())
    with watch.watching():
        run(model)
    waiting = {id(leaf) for leaf in watch.can_wait()}
    assert not waiting & {id(parameter) for name, parameter in model.named_parameters() if name in plain}
    assert id(model.embedding.weight) in waiting


def test_a_second_gradient_in_one_pass(device: torch.device) -> None:
    """Passes inside of passes can give a leaf several: the later one looks at the first."""
    model = built(device)

    def run(model: nn.Module) -> None:
        x = model.embedding(tokens(0, device))
        for _ in range(2):
            x = checkpoint(model.layers[0], x, use_reentrant=True)
        x.sum().backward()

    plain = built(device)
    run(plain)
    can_wait = names_that_can_wait(built(device), run)
    leaves = [p for name, p in model.named_parameters() if name in can_wait]
    gathered(model, run, leaves=leaves)
    assert_same(gradients(model), gradients(plain))


def test_gradients_that_an_inner_pass_reads(device: torch.device) -> None:
    """The outer pass has given one to the last layer; a hook in a pass inside of it reads it."""
    model, read = built(device), []
    last = model.layers[2][0]

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            with torch.enable_grad():
                x = gradient.detach().requires_grad_() * 1
                x.register_hook(lambda _: read.append(last.weight.grad.norm()))
                model.layers[0](x).sum().backward()
            return gradient

    def run(model: nn.Module) -> None:
        last(Inner.apply(model.embedding(tokens(1, device)))).sum().backward()

    waiting = names_that_can_wait(model, run)
    assert read
    assert "layers.2.0.weight" not in waiting
    assert {"layers.2.0.bias", "embedding.weight"} <= waiting


def test_gradients_that_a_callback_of_the_engine_reads(device: torch.device) -> None:
    """What a hook queues for the end of the pass may come before what is added there."""
    model, read = built(device), []
    engine: Any = torch.autograd.Variable
    weight = model.layers[2][0].weight

    def run(model: nn.Module) -> None:
        x = model.layers[2](model.embedding(tokens(1, device)))
        x.register_hook(lambda _: engine._execution_engine.queue_callback(lambda: read.append(weight.grad.norm())))
        x.sum().backward()

    waiting = names_that_can_wait(model, run)
    assert read
    assert "layers.2.0.weight" not in waiting
    assert {"layers.2.0.bias", "embedding.weight"} <= waiting


def test_gradients_with_lazy_bits() -> None:
    """A conjugate that is not worked out yet: left to autograd, in either place."""
    plain = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    plain.grad = torch.zeros(3, dtype=torch.complex64).conj()
    with GatheredGradients([plain]).taken():
        (plain.conj() * 2).real.sum().backward()
    twin = nn.Parameter(plain.detach().clone())
    twin.grad = torch.zeros(3, dtype=torch.complex64)
    (twin.conj() * 2).real.sum().backward()
    assert torch.equal(plain.grad, twin.grad)


def test_memory_of_another_library(device: torch.device) -> None:
    """Gradients in an array, of which a hook reads all: the same memory, through other storages."""
    if device.type != "cpu":
        pytest.skip("arrays are on the host")
    model, read = built(device), []
    layer = model.layers[2][0]
    array = np.zeros(HIDDEN * HIDDEN, dtype=np.float32)
    layer.weight.grad = torch.from_numpy(array).view(HIDDEN, HIDDEN)

    def run(model: nn.Module) -> None:
        x = model.embedding(tokens(0, device))
        x.register_hook(lambda _: read.append(torch.from_numpy(array).norm()))
        layer(x).sum().backward()

    assert "layers.2.0.weight" not in names_that_can_wait(model, run)


def test_what_went_wrong_is_told() -> None:
    """A pass that did not end: the capture is to be made again, without this."""
    model = built()
    stopped = GatheredGradients(model.parameters())

    def stop(_: Tensor) -> None:
        raise ValueError

    with stopped.taken():
        x = model.embedding(tokens(0))
        x.register_hook(stop)
        with suppress(ValueError):
            model.layers[0](x).sum().backward()
    assert stopped.went_wrong
    right = GatheredGradients(model.parameters())
    with right.taken():
        once(model)
    assert not right.went_wrong
