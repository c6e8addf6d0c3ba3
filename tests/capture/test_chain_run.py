"""Runs of linked pairs equal the eager functions, whoever else uses their results, and whatever call comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.capture.chains import Layers, Model, Straight, counts, straight
from tests.capture.pairs import callers_of, linked
from torch import Tensor, nn

from graphstep.capture.session import GraphSession


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_linked_pairs_equal_eager(session: GraphSession, num_blocks: int, merge: int) -> None:
    model = Model(session, num_blocks, merge=merge)
    model.compare(straight, range(1, 6))
    assert counts(model) == [(5, 0, 0), *[(0, 5, 0)] * (num_blocks - 1)]
    model.check_idle()
    assert [pair.num_replays for pair in model.chain.pairs] == [5] * num_blocks
    num_graphs = -(-num_blocks // merge)
    assert sum(row.num_launches for row in session.report().rows) == 2 * 5 * num_graphs


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_one_node_stands_for_all(session: GraphSession, num_blocks: int) -> None:
    model = Model(session, num_blocks)
    results = [model.inputs(1)[0]]
    for caller in model.callers:
        results.append(caller(results[-1]))
    nodes = {result.grad_fn for result in results[1:]}
    assert len(nodes) == 1
    assert [result.output_nr for result in results[1:]] == list(range(num_blocks))
    assert [result.data_ptr() for result in results[1:]] == [pair.outputs[0].data_ptr() for pair in model.chain.pairs]


def test_nothing_is_copied_between_pairs(session: GraphSession) -> None:
    first, second = Model(session).chain.pairs
    assert second.inputs[0].data_ptr() == first.outputs[0].data_ptr()
    assert second.grad_inputs[0].data_ptr() == first.grad_outputs[0].data_ptr()


def test_gradients_add_up_over_microbatches(session: GraphSession) -> None:
    model = Model(session)
    for _ in range(2):
        model.compare(straight)
    model.check_idle()


def test_accumulated_gradients_outlive_the_results_of_zero_grad(session: GraphSession) -> None:
    model = Model(session)
    for to_none in (True, False, True):
        for blocks in (model.eager, model.graphed):
            blocks.zero_grad(set_to_none=to_none)
        model.compare(straight)


@pytest.mark.parametrize("num_run", [1, 2])
def test_a_run_cut_short(session: GraphSession, num_run: int) -> None:
    """Early exit: fewer calls than the chain has, and then all of them again."""
    model = Model(session, 3)

    def cut(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        return straight(layers[:num_run], xs)

    for script in (cut, straight, cut, straight):
        model.compare(script)
        model.check_idle()
    assert [caller.num_eager for caller in model.callers] == [0, 0, 0]
    assert [pair.num_replays for pair in model.chain.pairs] == [12] * num_run + [6] * (3 - num_run)


def test_calls_after_the_backward_of_a_part_run_by_themselves(session: GraphSession) -> None:
    model = Model(session)

    def script(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        hidden = layers[0](xs[0])
        hidden.square().sum().backward(retain_graph=False)
        again = layers[1](hidden.detach().requires_grad_())
        again.sum().backward()
        return [again.detach().clone()]

    model.compare(script)
    assert counts(model) == [(3, 0, 0), (0, 0, 3)]
    model.check_idle()


def other_tensor(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return layers[1](xs[1])


def an_alias(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return layers[1](hidden.view_as(hidden))


def a_computed_tensor(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return layers[1](hidden * 1.5)


def detached(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return layers[1](hidden.detach())


def retained(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    hidden.retain_grad()
    return layers[1](hidden)


def hooked(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: gradient * 2)
    return layers[1](hidden)


def further_argument(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return layers[1](hidden, torch.full_like(hidden, 0.5))


def other_keyword(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return layers[1](hidden, scale=0.5)


def by_keyword(layers: Layers, xs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return layers[1](x=hidden)


UNEXPECTED = [
    other_tensor,
    an_alias,
    a_computed_tensor,
    detached,
    retained,
    hooked,
    further_argument,
    other_keyword,
    by_keyword,
]


@pytest.mark.parametrize("use", UNEXPECTED)
def test_a_call_that_is_not_the_expected_one(
    session: GraphSession, use: Callable[[Layers, Sequence[Tensor], Tensor], Tensor]
) -> None:
    model = Model(session)

    def script(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        hidden = layers[0](xs[0])
        out = use(layers, xs, hidden)
        (out.square().sum() + hidden.sum()).backward()
        return [out.detach().clone(), hidden.detach().clone(), *([hidden.grad] if hidden.retains_grad else [])]

    model.compare(script)
    assert counts(model) == [(3, 0, 0), (0, 0, 3)]
    model.check_idle()
    model.compare(straight)
    assert counts(model)[1] == (0, 3, 3)
    model.check_idle()


def test_a_result_that_is_changed_in_place(session: GraphSession, device: torch.device) -> None:
    blocks = [nn.Linear(4, 4).to(device) for _ in range(2)]
    chain = linked(session, blocks, torch.ones(3, 4, device=device, requires_grad=True), modules=[[b] for b in blocks])
    callers = callers_of(chain)
    for value in (1.0, 2.0):
        found = []
        for layers in (blocks, callers):
            x = torch.full((3, 4), value, device=device, requires_grad=True)
            for block in blocks:
                block.zero_grad()
            hidden = layers[0](x)
            hidden.mul_(2)
            layers[1](hidden).square().sum().backward()
            found.append([x.grad, *(p.grad.clone() for block in blocks for p in block.parameters())])
        assert all(map(torch.equal, *found))
    assert callers[1].num_eager == 2


def test_a_hook_that_comes_after_the_next_call_sees_what_others_add(session: GraphSession) -> None:
    """What a hook sees then is said where users look; results and gradients are right all the same."""
    model = Model(session)

    def script(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        hidden = layers[0](xs[0])
        out = layers[1](hidden)
        hidden.register_hook(lambda gradient: None)
        out.sum().backward()
        return [out.detach().clone()]

    model.compare(script)
    model.check_idle()


@pytest.mark.parametrize("uses", [(0,), (0, 1), (1, 2), (0, 1, 2)])
def test_results_that_others_use_as_well(session: GraphSession, uses: tuple[int, ...]) -> None:
    """Their gradients come to those that the next pair has left."""
    model = Model(session, 3, Straight)

    def script(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        results = [xs[0]]
        for layer in layers:
            results.append(layer(results[-1]))
        loss = results[-1].square().sum()
        for use in uses:
            loss = loss + (results[use + 1] * (use + 2)).cos().sum()
        loss.backward()
        return [loss.detach()]

    model.compare(script)
    assert counts(model) == [(3, 0, 0), (0, 3, 0), (0, 3, 0)]
    model.check_idle()
    model.compare(straight)


def test_a_further_use_of_what_a_layer_uses_twice_rounds_differently(session: GraphSession) -> None:
    """Eager execution adds each use by itself, from the last to the first; the recording has added its own before."""
    model = Model(session)
    gradients = []
    for layers in (list(model.eager), model.callers):
        torch.manual_seed(1)
        x = model.inputs(1)[0]
        hidden = layers[0](x)
        (layers[1](hidden).sum() + hidden.cos().sum()).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)  # a few units in the last place of float32


@pytest.mark.parametrize("used", [0, 1, 2])
def test_a_loss_of_one_result_of_a_whole_run(session: GraphSession, used: int) -> None:
    """What comes after it gets no gradient, as in eager execution."""
    model = Model(session, 3)

    def script(layers: Layers, xs: Sequence[Tensor]) -> None:
        results = [xs[0]]
        for layer in layers:
            results.append(layer(results[-1]))
        results[used + 1].square().sum().backward()

    model.compare(script)
    model.check_idle()
    model.compare(straight)


class Context:
    """What all layers are given besides the hidden state."""

    def __init__(self, session: GraphSession, **options: Any) -> None:
        self.gate = torch.rand(3, 4).to(session.device)
        self.model = Model(session, examples=(self.gate,), **options)

    def compare(self, second: Callable[[Tensor, Tensor, Callable[..., Tensor]], Tensor]) -> None:
        def script(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
            gate = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)).to(xs[0].device)
            hidden = layers[0](xs[0], gate)
            out = second(hidden, gate, layers[1])
            out.square().sum().backward()
            return [out.detach().clone()]

        self.model.compare(script)
        self.model.check_idle()


def test_a_context_is_copied_once(session: GraphSession) -> None:
    context = Context(session)
    first, second = context.model.chain.pairs
    assert first.inputs[1] is second.inputs[1]
    assert context.model.chain.shares_copies
    context.compare(lambda hidden, gate, layer: layer(hidden, gate))
    assert counts(context.model) == [(3, 0, 0), (0, 3, 0)]


def test_another_context_object(session: GraphSession) -> None:
    context = Context(session)
    context.compare(lambda hidden, gate, layer: layer(hidden, gate.clone() * 2))
    assert counts(context.model) == [(3, 0, 0), (0, 0, 3)]


def test_a_context_that_is_changed_in_place(session: GraphSession, device: torch.device) -> None:
    functions = [lambda x, shift: (x + shift).tanh()] * 2
    examples = torch.ones(3, device=device, requires_grad=True), torch.ones(3, device=device)
    callers = callers_of(linked(session, functions, *examples))
    for value in (1.0, 2.0):
        found = []
        for layers in (functions, callers):
            x = torch.full((3,), value, device=device, requires_grad=True)
            shift = torch.full((3,), 0.5, device=device)
            hidden = layers[0](x, shift)
            out = layers[1](hidden, shift.mul_(2))
            out.sum().backward()
            found.append([x.grad, out.detach().clone()])
        assert all(map(torch.equal, *found))
    assert (callers[1].num_expected, callers[1].num_eager) == (0, 2)


def test_a_context_without_some_argument(session: GraphSession) -> None:
    context = Context(session)
    context.compare(lambda hidden, gate, layer: layer(hidden))
    assert counts(context.model) == [(3, 0, 0), (0, 0, 3)]


class NamedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, *, mask: Tensor, scale: float, hidden: Tensor) -> dict[str, Tensor]:
        return {"out": self.inner(hidden) * mask * scale}


@pytest.mark.parametrize("scale", [2.0, 3.0])
def test_arguments_by_keyword(session: GraphSession, device: torch.device, scale: float) -> None:
    """Values are compared by identity: another one is another call."""
    first_scale = 2.0
    layers = [NamedLayer().to(device) for _ in range(2)]
    mask, hidden = torch.rand(3, 4, device=device), torch.rand(3, 4, device=device, requires_grad=True)
    named = {"mask": mask, "scale": first_scale, "hidden": hidden}
    chain = linked(session, layers, named=named, modules=[list(m.modules()) for m in layers], handover=(("hidden", 0),))
    callers = callers_of(chain)
    found = []
    for functions in (layers, callers):
        x = hidden.detach().clone().requires_grad_()
        for layer in layers:
            layer.zero_grad()
        out = functions[0](mask=mask, scale=first_scale, hidden=x)["out"]
        out = functions[1](scale=first_scale if scale == 2.0 else scale, hidden=out, mask=mask)["out"]
        out.square().sum().backward()
        found.append([out.detach().clone(), x.grad, *(layer.inner.weight.grad.clone() for layer in layers)])
    assert all(map(torch.equal, *found))
    assert (callers[1].num_expected, callers[1].num_eager) == ((1, 0) if scale == 2.0 else (0, 1))


def test_several_results_are_handed_over(session: GraphSession, device: torch.device) -> None:
    """In another order, with a number of them before, and one that has no gradient."""
    weights = [nn.Parameter(torch.rand(4, device=device)) for _ in range(3)]

    def layer(weight: Tensor) -> Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
        return lambda _num, a, b, index: ((a * b).tanh(), index + 1, (b * weight).sin())

    functions = [layer(weight) for weight in weights]

    def arguments() -> list[Tensor]:
        a, b = (torch.rand(2, 4, device=device).requires_grad_() for _ in range(2))
        return [a, b, torch.arange(4, device=device)]

    chain = linked(session, functions, 7, *arguments(), handover=((2, 0), (3, 1), (1, 2)))
    callers = callers_of(chain)
    for seed in (1, 2, 3):
        found = []
        for layers in (functions, callers):
            torch.manual_seed(seed)
            for weight in weights:
                weight.grad = None
            given = arguments()
            carried: Sequence[Tensor] = given
            for each in layers:
                y, index, z = each(7, *carried)
                carried = [z, y, index]
            (carried[0].sum() + carried[1].square().sum()).backward()
            kept = [tensor.detach().clone() for tensor in carried]
            found.append([*kept, given[0].grad, given[1].grad, *(weight.grad.clone() for weight in weights)])
            assert not carried[2].requires_grad
        assert all(map(torch.equal, *found))
    assert [caller.num_expected for caller in callers] == [0, 3, 3]


def both_of_a_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both arguments have one and the same gradient tensor."""
    both = a + b
    return both.tanh(), both.sin()


def one_each(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.sin(), b.cos()


def use_one_as_well(layers: Layers, xs: Sequence[Tensor]) -> None:
    a, b = layers[0](*xs)
    c, d = layers[1](a, b)
    (c.sum() + d.sum() + (a * 3).sum()).backward()


def use_both_and_stop(layers: Layers, xs: Sequence[Tensor]) -> None:
    a, b = layers[0](*xs)
    (a.sum() + (b * 5).sum()).backward()


def use_all(layers: Layers, xs: Sequence[Tensor]) -> None:
    c, d = layers[1](*layers[0](*xs))
    (c.sum() + d.square().sum()).backward()


@pytest.mark.parametrize("script", [use_one_as_well, use_both_and_stop])
def test_results_whose_gradients_are_one_tensor(
    session: GraphSession, device: torch.device, script: Callable[[Layers, Sequence[Tensor]], None]
) -> None:
    functions = [one_each, both_of_a_sum]
    examples = [torch.ones(3, device=device, requires_grad=True) for _ in range(2)]
    callers = callers_of(linked(session, functions, *examples, handover=((0, 0), (1, 1))))
    for used in (use_all, script, use_all):
        found = []
        for layers in (functions, callers):
            xs = [torch.full((3,), value, device=device, requires_grad=True) for value in (0.5, 0.75)]
            used(layers, xs)
            found.append([x.grad for x in xs])
        assert all(map(torch.equal, *found)), used.__name__


@pytest.mark.parametrize("is_run_on", [True, False])
def test_a_result_whose_gradient_is_expanded(session: GraphSession, device: torch.device, is_run_on: bool) -> None:
    functions: list[Callable[[Tensor], Tensor]] = [torch.sin, torch.sum]
    callers = callers_of(linked(session, functions, torch.ones(3, device=device, requires_grad=True)))
    for _ in range(2):
        found = []
        for layers in (functions, callers):
            x = torch.full((3,), 0.5, device=device, requires_grad=True)
            hidden = layers[0](x)
            loss = hidden.square().sum()
            (loss + layers[1](hidden) if is_run_on else loss).backward()
            found.append(x.grad)
        assert torch.equal(*found)


class GivesItsConstant(torch.autograd.Function):
    """Its gradient is a tensor that it has saved, as that of losses that compute it in their forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, constant: Tensor) -> Tensor:
        ctx.save_for_backward(constant)
        return (x * constant).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def test_a_gradient_that_is_memory_of_the_model_is_not_written(session: GraphSession, device: torch.device) -> None:
    constant = torch.full((3,), 2.0, device=device)
    functions: list[Callable[[Tensor], Tensor]] = [torch.sin, lambda x: GivesItsConstant.apply(x, constant)]  # type: ignore[no-untyped-call]
    callers = callers_of(linked(session, functions, torch.ones(3, device=device, requires_grad=True)))
    hidden = callers[0](torch.ones(3, device=device, requires_grad=True))
    (callers[1](hidden) + hidden.sum()).backward()
    assert torch.equal(constant, torch.full_like(constant, 2.0))
