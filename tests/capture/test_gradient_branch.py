"""Gradients that are computed and added on a branch equal those of eager execution, whatever is issued beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.capture.late_branch import LateBranch, fresh_memory_is_poison
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graphstep.capture.gathered_gradients import GatheredGradients, GradientWatch
from graphstep.capture.gradient_branch import GradientBranch, LeafWorkWatch
from graphstep.engine.torch_private import storage_key

HIDDEN = 6
Run = Callable[[nn.Module], None]


class Model(nn.Module):
    """Linear layers with and without biases, a weight that is used twice, and one that is tied."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, HIDDEN, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(HIDDEN, 2 * HIDDEN, dtype=dtype),
                nn.GELU(),
                nn.Linear(2 * HIDDEN, HIDDEN, bias=False, dtype=dtype),
                nn.LayerNorm(HIDDEN, dtype=dtype),
            )
            for _ in range(3)
        )
        self.twice = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.shift = nn.Parameter(torch.zeros(HIDDEN, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(self.embedding(tokens)) + self.shift
        for layer in self.layers:
            x = x + layer(x)
        x = self.twice(x)
        return functional.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1).float(), tokens.flatten())


def tokens(number: int, model: nn.Module) -> Tensor:
    drawn = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(number))
    return drawn.to(next(model.parameters()).device)


def once(model: nn.Module) -> None:
    model(tokens(0, model)).backward()


def twice(model: nn.Module) -> None:
    for number in range(2):
        (model(tokens(number, model)) * 0.3).backward()


def graph_kept(model: nn.Module) -> None:
    loss = model(tokens(0, model))
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def differentiated_gradients(model: nn.Module) -> None:
    found = torch.autograd.grad(model(tokens(0, model)), list(model.parameters()), create_graph=True)
    sum(each.square().sum() for each in found).backward()  # type: ignore[union-attr]


def gradients_asked_for(model: nn.Module) -> None:
    loss = model(tokens(0, model))
    found = torch.autograd.grad(loss, [model.layers[1][0].weight, model.shift])
    (model.layers[0][0].weight * found[0].sum() + found[1].sum()).sum().backward()


def recomputed(model: nn.Module) -> None:
    for reentrant in (True, False):
        x = model.embedding(tokens(0, model))
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.square().sum().backward()


def chosen_inputs(model: nn.Module) -> None:
    loss = model(tokens(0, model))
    loss.backward(inputs=[model.shift, model.layers[1][0].weight, model.layers[2][0].bias])


def hooks_that_look(model: nn.Module) -> None:
    """In the middle of the pass: at gradients of the last layer, and at what a product works with."""
    last = model.layers[2][0]

    def look(gradient: Tensor) -> Tensor:
        if last.weight.grad is not None:
            model.shift.data.add_(last.weight.grad.sum() * 0.01)
        return gradient * 1.5

    x = model.embedding(tokens(0, model))
    for number, layer in enumerate(model.layers):
        x = layer(x)
        if number == 1:
            x.register_hook(look)
    x.square().sum().backward()


class _Scales(torch.autograd.Function):
    """Overwrites the gradient that it is given, which the product of the layer after it works with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.mul_(0.5)


def inputs_overwritten(model: nn.Module) -> None:
    """What a product reads is changed right after it was issued."""
    wide = model.embedding(tokens(0, model)).repeat(1, 1, 2)
    scaled = _Scales.apply(model.layers[0][2](wide))
    (scaled + model.layers[1][2](wide)).square().sum().backward()


def weights_written(model: nn.Module) -> None:
    """A hook of the first layer steps the last one with its gradient."""

    def step(_: Tensor) -> None:
        with torch.no_grad():
            for parameter in model.layers[2].parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad.zero_()

    x = model.embedding(tokens(0, model))
    x.register_hook(step)
    for layer in model.layers:
        x = layer(x)
    x.square().sum().backward()


def _trebled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def hooks_of_parameters(model: nn.Module) -> None:
    handles = [
        model.layers[0][0].weight.register_hook(lambda g: g * 2),
        model.layers[1][0].bias.register_post_accumulate_grad_hook(_trebled),
    ]
    once(model)
    for handle in handles:
        handle.remove()


def whole_step(model: nn.Module) -> None:
    """Zeroing in place, two passes, clipping, and a fused optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    optimizer.zero_grad(set_to_none=False)
    twice(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    once(model)


def zeroed_and_read(model: nn.Module) -> None:
    """Gradients that are read after they are zeroed, outside of a pass, and zeroed again in the middle of one."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
            model.shift.data.add_(parameter.grad.sum() + 0.5)
    x = model.embedding(tokens(0, model))
    for number, layer in enumerate(model.layers):
        x = layer(x)
        if number == 1:
            x.register_hook(lambda _: model.zero_grad(set_to_none=False))
    x.square().sum().backward()


class _InWorkspace(torch.autograd.Function):
    """A linear layer whose weight gradient lies in memory that is used again, past version counters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, workspace: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.workspace = workspace
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        place = ctx.workspace.data
        torch.mm(gradient.flatten(0, 1).t(), x.flatten(0, 1), out=place)
        return gradient @ weight, place.view_as(place), None


def one_workspace(model: nn.Module) -> None:
    """For two layers, and overwritten in the end."""
    workspace = torch.empty(HIDDEN, HIDDEN, device=next(model.parameters()).device)
    x = model.embedding(tokens(0, model))
    x.register_hook(lambda _: (workspace.data.zero_(), None)[1])
    y = _InWorkspace.apply(model.layers[2][3](x), model.twice.weight, workspace)
    other = model.layers[0][0].weight[:HIDDEN]
    _InWorkspace.apply(y, other, workspace).square().sum().backward()


def gradient_kept_and_zeroed(model: nn.Module) -> None:
    kept: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            found = gradient.flatten(0, 1).t() @ x.flatten(0, 1)
            kept.append(found.data)
            return gradient @ weight, found

    x = model.layers[0](model.embedding(tokens(0, model)))
    x.register_hook(lambda _: (kept[0].zero_(), None)[1])
    Keeps.apply(x, model.twice.weight).square().sum().backward()


def hooks_of_nodes(model: nn.Module) -> None:
    """On what adds a gradient: one that scales it, one that scales it in place, and one that reads it."""
    leaves = (model.layers[0][0].weight, model.layers[1][0].bias, model.layers[2][2].weight)
    first, second, third = (torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves)
    log = model.shift.data
    handles = [
        first.register_prehook(lambda g: (g[0] * 2,) if g[0] is not None else None),
        second.register_prehook(lambda g: (g[0].mul_(2), None)[1] if g[0] is not None else None),
        third.register_hook(lambda _, g: (log.add_(g[0].sum()), None)[1] if g[0] is not None else None),
    ]
    once(model)
    for handle in handles:
        handle.remove()


def read_in_inference_mode(model: nn.Module) -> None:
    """Operations that are views or copies come undivided there."""
    model.zero_grad(set_to_none=False)
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.grad is not None:
                model.shift.data.add_(parameter.grad.to(torch.float64).sum() + parameter.grad.t().reshape(-1)[0])
    once(model)


RUNS = [
    *(once, twice, graph_kept, differentiated_gradients, gradients_asked_for, recomputed, chosen_inputs),
    *(hooks_that_look, inputs_overwritten, weights_written, hooks_of_parameters),
    *(whole_step, zeroed_and_read, one_workspace, gradient_kept_and_zeroed, hooks_of_nodes, read_in_inference_mode),
]


def built(device: torch.device, dtype: torch.dtype = torch.float32, *, kind: str = "one each") -> Model:
    """A model with gradients: none, one each, all in one buffer, or some of them."""
    torch.manual_seed(0)
    model = Model(dtype).to(device)
    parameters = list(model.parameters())
    buffer = torch.randn(sum(p.numel() for p in parameters)).to(device, dtype)
    for number, (parameter, part) in enumerate(
        zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True)
    ):
        if kind != "none" and (kind != "some" or number % 3):
            parameter.grad = part.view_as(parameter) if kind == "flat" else part.view_as(parameter).clone()
    return model


def state(model: nn.Module) -> list[Tensor | None]:
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*grads, *(p.detach().clone() for p in model.parameters())]


def assert_same(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        assert (mine is None) is (theirs is None)
        if mine is not None and theirs is not None:
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), "bit for bit"


def watched(model: nn.Module, run: Run) -> tuple[GradientWatch, LeafWorkWatch]:
    watch, work = GradientWatch(model.parameters()), LeafWorkWatch(model.parameters())
    with watch.watching(), work.watching():
        run(model)
    return watch, work


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with fresh_memory_is_poison():
        yield


def on_a_branch(
    model: Model, run: Run, device: torch.device, dtype: torch.dtype, kind: str, *, most_pending: int = 8
) -> tuple[GradientBranch, LateBranch, GatheredGradients]:
    """Watch a model of the same kind, then run this one with all that can wait on a late branch."""
    seen = built(device, dtype, kind=kind)
    watch, work = watched(seen, run)
    twins = {id(a): b for a, b in zip(seen.parameters(), model.parameters(), strict=True)}
    found = {n: type(w)(twins[id(w.leaf)], w.operation, w.result) for n, w in work.found.items()}
    can_wait = [twins[id(leaf)] for leaf in watch.can_wait()]
    late = LateBranch(most_pending=most_pending)
    waiting = {id(leaf) for leaf in can_wait}
    homes = [(id(p) in waiting, storage_key(p.grad)) for p in model.parameters() if p.grad is not None]
    keys = {key for can, key in homes if can} - {key for can, key in homes if not can}
    branch = GradientBranch(
        late, found, lambda leaf: leaf.grad is None or gathered.takes(leaf), lambda t: storage_key(t) in keys
    )
    gathered = GatheredGradients((leaf for leaf in can_wait if leaf.grad is not None), branch=branch)
    with gathered.taken():
        run(model)
    assert late.num_pending == 0
    return branch, late, gathered


@pytest.mark.parametrize("most_pending", [1, 8, 1000])
@pytest.mark.parametrize("kind", ["none", "one each", "flat", "some"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_results_are_those_of_autograd(run: Run, kind: str, most_pending: int, device: torch.device) -> None:
    dtype = torch.float32
    plain, model = built(device, dtype, kind=kind), built(device, dtype, kind=kind)
    run(plain)
    branch, late, gathered = on_a_branch(model, run, device, dtype, kind, most_pending=most_pending)
    assert not gathered.went_wrong
    assert_same(state(model), state(plain))
    if run is once:
        # The weights and biases of the layers, and the shift; what is used twice or tied is added up first.
        assert branch.num_taken == 10
        assert late.num_done >= 10
    if run is whole_step and kind in ("one each", "flat"):
        assert late.num_done > 2 * 10, "zeroing is there too"


def many(number: int, device: torch.device) -> list[nn.Parameter]:
    sizes = [1 + 977 * i % 5000 for i in range(number)]
    drawn = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=drawn).to(device)) for size in sizes]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_fused_steps_are_done_side_by_side(kind: type[torch.optim.Optimizer], device: torch.device) -> None:
    both = [many(100, device) for _ in range(2)]
    late = LateBranch()
    for index, parameters in enumerate(both):
        optimizer = kind(parameters, lr=0.01, weight_decay=0.1, fused=True)  # type: ignore[call-arg]
        for step in range(3):
            drawn = torch.Generator().manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=drawn).to(device)
            with GradientBranch(late, {}, lambda _: False).beside() if index else nullcontext():
                optimizer.step()
    assert all(map(torch.equal, *both))
    assert late.num_spread == 3


@pytest.mark.parametrize("what", ["reads", "zeroes", "steps"])
@pytest.mark.parametrize("kind", ["one each", "flat"])
def test_a_pass_that_looks_where_the_watched_one_did_not(kind: str, what: str, device: torch.device) -> None:
    """Gradients that wait are added before an operation that meets them, and what is pending is waited for."""
    is_watched = False

    def run(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.layers[2].parameters(), lr=0.1)

        def hook(_: Tensor) -> None:
            if is_watched:
                return
            if what == "reads":
                model.shift.data.add_(sum(p.grad.sum() for p in model.layers.parameters()))
            elif what == "zeroes":
                model.zero_grad(set_to_none=False)
            else:
                optimizer.step()

        x = model.layers[0](model.embedding(tokens(0, model)))
        x.register_hook(hook)
        model.layers[2](model.layers[1](x)).square().sum().backward()

    plain, model, seen = (built(device, kind=kind) for _ in range(3))
    run(plain)
    is_watched = True
    watch, work = watched(seen, run)
    is_watched = False
    twins = {id(a): b for a, b in zip(seen.parameters(), model.parameters(), strict=True)}
    found = {n: type(w)(twins[id(w.leaf)], w.operation, w.result) for n, w in work.found.items()}
    branch = GradientBranch(LateBranch(), found, lambda leaf: leaf.grad is None or gathered.takes(leaf))
    gathered = GatheredGradients([twins[id(leaf)] for leaf in watch.can_wait()], branch=branch)
    with gathered.taken():
        run(model)
    assert not gathered.went_wrong
    assert_same(state(model), state(plain))


def test_a_gradient_that_is_given_other_memory(device: torch.device) -> None:
    model = built(device)
    weight = model.layers[2][0].weight

    def run(model: nn.Module) -> None:
        x = model.embedding(tokens(0, model))
        x.register_hook(lambda _: setattr(weight.grad, "data", torch.zeros_like(weight)))
        model.layers[2](x).square().sum().backward()

    gathered = GatheredGradients(model.parameters())
    with gathered.taken():
        run(model)
    assert gathered.went_wrong


def test_memory_that_is_freed_while_it_is_read(device: torch.device) -> None:
    """A hook resizes an activation, as some do to save memory: nothing tells of it but its size."""
    model = built(device)

    def run(model: nn.Module) -> None:
        x = model.layers[1](model.embedding(tokens(0, model)))
        x.register_hook(lambda _: (x.untyped_storage().resize_(x.untyped_storage().nbytes() + 64), None)[1])
        model.layers[0](x).square().sum().backward()

    _, work = watched(model, run)
    for parameter in model.parameters():
        parameter.grad = None
    branch = GradientBranch(LateBranch(), work.found, lambda leaf: leaf.grad is None)
    gathered = GatheredGradients([], branch=branch)
    with gathered.taken():
        run(model)
    assert gathered.went_wrong


def test_work_on_other_streams(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have waited for what now comes later, and are not waited for themselves."""
    monkeypatch.setattr(LateBranch, "is_here", False)
    _, late, gathered = on_a_branch(built(device, kind="none"), once, device, torch.float32, "none")
    assert late.num_done == 0
    assert gathered.went_wrong


def test_drivers_that_do_not_tell(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateBranch, "num_nodes", lambda _: None)
    model = built(device)
    _, _, gathered = on_a_branch(model, once, device, torch.float32, "one each")
    assert gathered.went_wrong, "kernels of others would not be seen"


@pytest.mark.parametrize("when", ["pending", "not pending"])
def test_kernels_that_no_operation_launches(when: str, device: torch.device) -> None:
    """As those of Triton: one that comes while something is pending may meet it, whatever it is."""
    late = LateBranch()

    class Unseen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            late.num_unseen += 1
            return gradient

    def run(model: nn.Module) -> None:
        x = model.layers[0](model.embedding(tokens(0, model)))
        x = Unseen.apply(x) if when == "pending" else x
        x = model.layers[1](x)
        x = Unseen.apply(x) if when == "not pending" else x
        x.square().sum().backward()

    model = built(device)
    _, work = watched(model, run)
    late.num_unseen = 0
    branch = GradientBranch(late, work.found, lambda leaf: leaf.grad is None or gathered.takes(leaf))
    gathered = GatheredGradients(model.parameters(), branch=branch)
    with gathered.taken():
        run(model)
    assert late.num_unseen == 1
    assert gathered.went_wrong is (when == "pending")
