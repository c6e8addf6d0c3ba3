"""How long a run holds its slots, and who owns what it hands out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.capture.chains import Layers, Model, counts, straight
from tests.capture.pairs import call, callers_of, captured, chain_of, linked
from torch import Tensor, nn

from graphstep.capture.chain_run import ChainRun
from graphstep.capture.lanes import Span
from graphstep.capture.session import GraphSession
from graphstep.errors import GraphstepError, LifecycleError


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Nothing but reference counts frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run_all(model: Model, num: int, x: Tensor) -> list[Tensor]:
    results = [x]
    for caller in model.callers[:num]:
        results.append(caller(results[-1]))
    return results[1:]


# ----- slots


@pytest.mark.parametrize("merge", [1, 3])
@pytest.mark.parametrize("num_run", [1, 2, 3])
@pytest.mark.usefixtures("no_collections")
def test_dropped_results_give_the_slots_back(session: GraphSession, num_run: int, merge: int) -> None:
    model = Model(session, 3, merge=merge)
    results = run_all(model, num_run, model.inputs(1)[0])
    assert [pair.num_in_flight for pair in model.chain.pairs] == [1] * num_run + [0] * (3 - num_run)
    assert model.chain.lane.latest is not None
    assert all(pair.is_held() for pair in model.chain.pairs[:num_run])
    del results
    model.check_idle()
    assert not any(pair.is_held() for pair in model.chain.pairs)


@pytest.mark.usefixtures("no_collections")
def test_a_backward_gives_the_slots_back_while_results_are_kept(session: GraphSession) -> None:
    model = Model(session, 3)
    results = run_all(model, 3, model.inputs(1)[0])
    results[-1].sum().backward()
    assert all(pair.num_in_flight == 0 for pair in model.chain.pairs)
    assert model.chain.lane.latest is None
    assert all(pair.is_held() for pair in model.chain.pairs)
    del results
    assert not any(pair.is_held() for pair in model.chain.pairs)
    model.check_idle()


@pytest.mark.usefixtures("no_collections")
def test_any_result_keeps_the_run_open(session: GraphSession) -> None:
    model = Model(session, 3)
    results = run_all(model, 3, model.inputs(1)[0])
    kept = results[1]
    del results
    assert [pair.num_in_flight for pair in model.chain.pairs] == [1, 1, 1]
    assert [pair.is_held() for pair in model.chain.pairs] == [False, True, False]
    del kept
    model.check_idle()


@pytest.mark.usefixtures("no_collections")
def test_a_run_is_expected_only_as_long_as_its_result_lives(session: GraphSession) -> None:
    model = Model(session)
    hidden = model.callers[0](model.inputs(1)[0])
    assert model.callers[1].pending is not None
    loss = hidden.sum()
    del hidden
    assert model.callers[1].pending is None
    assert not model.chain.pairs[1].is_held()
    loss.backward()
    model.check_idle()


@pytest.mark.usefixtures("no_collections")
def test_a_pending_call_that_is_dropped_lets_go_of_the_later_results(session: GraphSession) -> None:
    model = Model(session)
    hidden = model.callers[0](model.inputs(1)[0])
    pending = model.callers[1].pending
    assert pending is not None
    assert model.chain.pairs[1].is_held()
    pending.drop()
    pending.drop()
    assert model.callers[1].pending is None
    assert not model.chain.pairs[1].is_held()
    assert not pending.matches((hidden,), {})
    del pending, hidden
    model.check_idle()


@pytest.mark.usefixtures("no_collections")
def test_arguments_are_not_kept_alive(session: GraphSession, device: torch.device) -> None:
    """Neither during a run nor after it."""
    functions = [lambda x, shift: (x + shift).tanh()] * 2
    examples = torch.ones(3, device=device, requires_grad=True), torch.ones(3, device=device)
    callers = callers_of(linked(session, functions, *examples))
    given, context = torch.ones(3, device=device, requires_grad=True) * 1, torch.ones(3, device=device)
    refs = [weakref.ref(given), weakref.ref(context)]
    hidden = callers[0](given, context)
    out = callers[1](hidden, context)
    del given, context
    assert [ref() for ref in refs] == [None, None]
    assert torch.equal(out, (hidden + 1).tanh())


def test_a_new_run_starts_over_where_one_was_left(session: GraphSession) -> None:
    model = Model(session)
    hidden = model.callers[0](model.inputs(1)[0])
    del hidden
    for block in model.eager[:1]:
        block.calls += 1
    model.compare(straight)
    model.check_idle()


def test_held_results_keep_out_what_was_captured_before_them(session: GraphSession) -> None:
    """Their memory may be that of an earlier forward half, and is never that of a later one."""
    model = Model(session, 3)
    lane = model.chain.lane
    assert not any(map(lane.holds_results, range(3)))
    results = run_all(model, 3, model.inputs(1)[0])
    results[-1].sum().backward()
    for kept in range(2, -1, -1):
        assert [lane.holds_results(position) for position in range(3)] == [position <= kept for position in range(3)]
        results.pop()
    assert not any(map(lane.holds_results, range(3)))
    model.check_idle()


def test_what_is_held_of_a_dropped_pair_is_kept_in_mind(session: GraphSession) -> None:
    model = Model(session)
    lane, pair = model.chain.lane, model.chain.pairs[1]
    kept = run_all(model, 2, model.inputs(1)[0])[-1]
    kept.sum().backward()
    before = kept.detach().clone()
    pair.release()
    lane.drop(pair)
    lane.drop(pair)
    assert lane.holds_results(0)
    assert torch.equal(kept, before)
    del kept
    assert not lane.holds_results(0)


def test_what_enters_the_lane_in_between_ends_the_run(session: GraphSession) -> None:
    model = Model(session)
    hidden = model.callers[0](model.inputs(1)[0])
    other = Span(0, 9)
    model.chain.lane.enter(other)
    out = model.callers[1](hidden)
    assert counts(model)[1] == (0, 0, 1)
    model.chain.lane.leave(other)
    out.sum().backward()
    del hidden, out
    model.check_idle()


def test_the_lane_knows_how_far_a_run_is(session: GraphSession) -> None:
    model = Model(session)
    lane = model.chain.lane
    hidden = model.callers[0](model.inputs(1)[0])
    assert [lane.allows(position) for position in range(4)] == [False, True, True, False]
    out = model.callers[1](hidden)
    assert [lane.allows(position) for position in range(4)] == [False, False, False, False]
    out.sum().backward()
    assert all(map(lane.allows, range(4)))


# ----- backwards


@pytest.mark.parametrize("merge", [1, 2])
def test_a_second_backward_is_refused(session: GraphSession, merge: int) -> None:
    model = Model(session, merge=merge)
    results = run_all(model, 2, model.inputs(1)[0])
    results[-1].sum().backward(retain_graph=True)
    before = [parameter.grad.clone() for parameter in model.graphed.parameters()]
    for result in results[::-1]:
        with pytest.raises(LifecycleError, match="backward of this call has run already") as caught:
            result.sum().backward(retain_graph=True)
        assert caught.value.where == "layers.1"
    after = [parameter.grad for parameter in model.graphed.parameters()]
    assert all(map(torch.equal, before, after))
    del results, result, caught
    model.check_idle()


def test_two_losses_of_one_run_in_two_backwards_are_refused(session: GraphSession) -> None:
    model = Model(session)
    first, second = run_all(model, 2, model.inputs(1)[0])
    second.sum().backward(retain_graph=True)
    with pytest.raises(LifecycleError, match="add up the losses"):
        first.sum().backward()


def test_gradients_of_chosen_tensors_are_refused(session: GraphSession) -> None:
    model = Model(session)
    x = model.inputs(1)[0]
    out = run_all(model, 2, x)[-1]
    with pytest.raises(LifecycleError, match="gradients of chosen tensors") as caught:
        torch.autograd.grad(out.sum(), x)
    del out, caught
    model.check_idle()


def test_gradients_of_chosen_tensors_where_nothing_is_accumulated(session: GraphSession, device: torch.device) -> None:
    functions = [torch.sin, torch.exp]
    callers = callers_of(linked(session, functions, torch.ones(3, device=device, requires_grad=True)))
    for value in (1.0, 2.0):
        x = torch.full((3,), value, device=device, requires_grad=True)
        (found,) = torch.autograd.grad(callers[1](callers[0](x)).sum(), x)
        (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
        assert torch.equal(found, expected)


def test_a_run_in_a_closed_session_gives_its_slots_back(session: GraphSession) -> None:
    model = Model(session)
    session.close()
    with pytest.raises(GraphstepError) as caught:
        model.callers[0](model.inputs(1)[0])
    assert caught.value.what
    del caught
    model.check_idle()


# ----- the middle of a chain


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_may_begin_in_the_middle(session: GraphSession, first: int) -> None:
    """With a tensor of the caller's, which is copied to where the result of the pair before was."""
    model = Model(session, 3)
    model.callers[first].may_start = True

    def rest(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        return straight(layers[first:], xs)

    for script in (rest, straight, rest):
        model.compare(script)
    assert [pair.num_replays for pair in model.chain.pairs] == [3] * first + [9] * (3 - first)
    model.check_idle()


def test_a_run_may_go_on_as_another(session: GraphSession) -> None:
    """The result of a cut run is the argument of the next, without a copy."""
    model = Model(session)
    model.callers[1].may_start = True

    def script(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        hidden = layers[0](xs[0])
        hidden.retain_grad()  # so that the run is cut
        out = layers[1](hidden)
        out.square().sum().backward()
        return [hidden.grad, out.detach().clone()]

    model.compare(script)
    assert counts(model) == [(3, 0, 0), (3, 0, 0)]
    model.check_idle()


def test_a_start_in_the_middle_that_would_overwrite_is_known(session: GraphSession) -> None:
    model = Model(session)
    second = model.chain.pairs[1]
    other = model.inputs(2)
    assert not second.overwrites_what_is_in_use(other[:1])
    hidden = model.callers[0](model.inputs(1)[0])
    assert second.overwrites_what_is_in_use(other[:1])
    assert not second.overwrites_what_is_in_use([hidden])
    model.chain.receivers[1].pending = None
    hidden.sum().backward()
    assert second.overwrites_what_is_in_use(other[:1])  # It is held still.
    del hidden
    assert not second.overwrites_what_is_in_use(other[:1])


def test_what_reads_a_result_keeps_it_from_being_overwritten(session: GraphSession) -> None:
    """A run that begins with the result of another one, or with a copy in its place."""
    model = Model(session, 3)
    model.callers[1].may_start = True
    lane = model.chain.lane
    out = model.callers[1](model.inputs(2)[0])
    # As if the first pair's result were held, and the second pair in flight.
    assert [lane.allows(position) for position in range(6)] == [False, False, True, True, False, False]
    assert model.chain.pairs[1].overwrites_what_is_in_use(model.inputs(3)[:1])
    out.sum().backward()
    del out
    assert all(map(lane.allows, range(6)))
    model.check_idle()


def test_an_argument_is_not_copied_over_what_is_in_flight(session: GraphSession) -> None:
    """The place for it, a result, may lie in memory that something captured earlier needs until its backward."""
    model = Model(session)
    second, lane = model.chain.pairs[1], model.chain.lane
    earlier = Span(-2, -1)
    lane.enter(earlier)
    assert second.overwrites_what_is_in_use(model.inputs(2)[:1])
    lane.leave(earlier)
    assert not second.overwrites_what_is_in_use(model.inputs(2)[:1])


def test_an_input_that_is_read_in_place_has_to_be_there(session: GraphSession, device: torch.device) -> None:
    table = torch.rand(3, device=device)
    x = torch.rand(3, device=device, requires_grad=True)
    pair = captured(session, lambda x, table: x * table, x, table, inputs=[x.detach().clone().requires_grad_(), table])
    pair.in_place = frozenset([1])
    assert not pair.moved_inputs([x, table])
    assert pair.moved_inputs([x, table.clone()])


# ----- gradients


def memory(model: Model) -> set[int]:
    """Addresses of all static tensors at the seams."""
    tensors = [
        tensor
        for pair in model.chain.pairs
        for tensor in (*pair.inputs, *pair.outputs, *pair.grad_outputs, *pair.grad_inputs, *pair.exposed_gradients)
        if tensor is not None
    ]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("merge", [1, 2])
def test_gradients_that_are_kept_survive_replays(session: GraphSession, merge: int) -> None:
    model = Model(session, merge=merge)
    static, kept, values = memory(model), list[Tensor](), list[Tensor]()
    for seed in range(4):
        x = model.inputs(seed)[0]
        inner = x * 1.5
        inner.retain_grad()
        inner.register_hook(kept.append)
        run_all(model, 2, inner)[-1].square().sum().backward()
        kept += [x.grad, inner.grad]
        values += [gradient.clone() for gradient in kept[len(values) :]]
        assert all(map(torch.equal, kept, values))
    addresses = {gradient.untyped_storage().data_ptr() for gradient in kept}
    assert not addresses & static
    assert all(p.grad.untyped_storage().data_ptr() not in static for p in model.graphed.parameters())


def test_gradients_of_results_that_are_kept_survive_replays(session: GraphSession) -> None:
    model = Model(session, 3)
    static, kept, values = memory(model), list[Tensor](), list[Tensor]()
    for caller in model.callers:
        caller.may_start = True
    for seed in range(4):
        results = [model.inputs(seed)[0]]
        for caller in model.callers:
            results.append(caller(results[-1]))
            results[-1].retain_grad()
            results[-1].register_hook(kept.append)
        results[-1].square().sum().backward()
        kept += [result.grad for result in results]
        values += [gradient.clone() for gradient in kept[len(values) :]]
        del results
        assert all(map(torch.equal, kept, values))
    assert not {gradient.untyped_storage().data_ptr() for gradient in kept} & static
    model.check_idle()


def test_gradients_that_autograd_accumulates_survive_replays(session: GraphSession, device: torch.device) -> None:
    linear = nn.Linear(3, 3).to(device)
    x = torch.rand(2, 3, device=device, requires_grad=True)
    through = frozenset(map(id, linear.parameters()))
    pair = captured(session, linear, x, through_autograd=through)
    assert len(pair.exposed) == 2
    kept: list[Tensor] = []
    for parameter in linear.parameters():
        parameter.register_hook(kept.append)
    values: list[Tensor] = []
    for _ in range(3):
        linear.zero_grad()
        call(pair, torch.rand(2, 3, device=device, requires_grad=True)).square().sum().backward()
        kept += [parameter.grad for parameter in linear.parameters()]
        values += [gradient.clone() for gradient in kept[len(values) :]]
        assert all(map(torch.equal, kept, values))


def test_on_close_is_told_once(session: GraphSession, device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    chain, told = chain_of(captured(session, lambda x: x * 2, x)), list[int]()
    run = ChainRun(chain, 0, lambda: told.append(1))
    run.close()
    assert told == []  # It has not been opened.
    run.start((x,), (x,), {}, ()).sum().backward()
    assert told == [1]
    run.close()
    del run
    assert told == [1]
