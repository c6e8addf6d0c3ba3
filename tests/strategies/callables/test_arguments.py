"""Nested arguments and results, and calls with others than the sample had: refused, with the name of the argument."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from tests.strategies.callables.jobs import DTYPES, HIDDEN, SIZE, Block, Job, compared, nothing_is_replayed
from torch import Tensor

from graphstep import make_graphed_callables
from graphstep.errors import InputMismatchError


@dataclass
class Packed:
    """As packed sequences are described: tensors, and a number that seldom changes."""

    hidden: Tensor
    shift: Tensor | None
    longest: int = 7


class Output(NamedTuple):
    hidden: Tensor
    score: Tensor
    note: str | None = None


class Nested(Block):
    def forward(  # type: ignore[override]
        self,
        pair: tuple[Tensor, Tensor],
        extra: dict[str, Any],
        packed: Packed,
        scale: float = 1.0,
        mask: Tensor | None = None,
        *,
        mode: str = "plain",
    ) -> Any:
        x, y = pair
        hidden = super().forward(x * extra["gate"] + y * packed.longest) * scale
        if packed.shift is not None:
            hidden = hidden + packed.shift
        if mask is not None:
            hidden = hidden.masked_fill(mask, 0.0)
        for each in extra["more"]:
            hidden = hidden + each
        hidden = hidden + packed.hidden
        if mode == "dict":
            return {"hidden": hidden, "parts": [hidden * 2, (x * 3).detach()], "name": "result", "none": None}
        if mode == "dataclass":
            return Packed(hidden, (hidden * y).sum(0), longest=3)
        if mode == "tuple":
            return hidden, (hidden.sum(), None), 5
        if mode == "named":
            return Output(hidden, hidden.mean())
        return hidden


def arguments(draw: Callable[..., Tensor]) -> tuple[Any, ...]:
    x, y = draw(requires_grad=True), draw()
    extra = {"gate": draw(HIDDEN, requires_grad=True), "more": [draw(), draw(1, HIDDEN)], "title": "a", "flag": True}
    return (x, y), extra, Packed(draw(requires_grad=True), draw(HIDDEN)), 0.5


@pytest.mark.parametrize("mode", ["plain", "dict", "dataclass", "tuple", "named"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nested_arguments_and_results(device: torch.device, dtype: torch.dtype, mode: str) -> None:
    def script(job: Job) -> None:
        kinds: list[Any] = []
        module = job.built(Nested)
        given = job.graphed(module, arguments(job.sample), sample_kwargs={"mode": mode})

        def run(*values: Any) -> Any:
            result = given(*values, mode=mode)
            kinds.append(type(result))
            if mode == "dict":
                assert list(result) == ["hidden", "parts", "name", "none"]
                assert (result["name"], result["none"]) == ("result", None)
            if mode == "dataclass":
                assert result.longest == 3
            if mode == "tuple":
                assert result[1][1:] + result[2:] == (None, 5)
            return result

        job.train(run, lambda: arguments(job.draw))
        assert set(kinds) == {
            {"plain": Tensor, "dict": dict, "dataclass": Packed, "tuple": tuple, "named": Output}[mode]
        }

    compared(device, script, dtype=dtype, replays=5)


def test_none_where_a_tensor_may_be(device: torch.device) -> None:
    def script(job: Job) -> None:
        def feed(draw: Callable[..., Tensor]) -> tuple[Any, ...]:
            pair, extra, packed, _ = arguments(draw)
            return pair, extra, replace(packed, shift=None), 0.5, None

        job.train(job.graphed(job.built(Nested), feed(job.sample)), lambda: feed(job.draw))

    compared(device, script, replays=5)


def test_the_same_tensor_twice(device: torch.device) -> None:
    def script(job: Job) -> None:
        def function(x: Tensor, y: Tensor) -> Tensor:
            return x * 2 + y.square()

        sample = job.sample(requires_grad=True)
        given = job.graphed(function, (sample, sample))
        for _ in range(5):
            x = job.draw(requires_grad=True)
            given(x, x).sum().backward()
            y, z = job.draw(requires_grad=True), job.draw(requires_grad=True)
            given(y, z).sum().backward()
            job.note(arguments=(x, y, z))

    compared(device, script)


def test_arguments_of_other_strides_and_views(device: torch.device) -> None:
    def script(job: Job) -> None:
        given = job.graphed(job.built(Block), (job.sample(requires_grad=True),))
        for _ in range(5):
            base = job.draw(HIDDEN, SIZE, requires_grad=True)
            row = job.draw(HIDDEN, requires_grad=True)
            for x in (base.t(), row.expand(SIZE, HIDDEN), job.draw(2 * SIZE, HIDDEN, requires_grad=True)[::2]):
                # On a GPU strides decide on the kernel: the same bits are those of the copy.
                given(x if job.graphs else x.clone(memory_format=torch.contiguous_format)).sum().backward()
            job.note(arguments=(base, row))

    compared(device, script, replays=15)


# ----- strictness


@dataclass
class Wrong:
    """A call that no graph is for, and what the error has to name."""

    change: Callable[[dict[str, Any]], Any]
    name: str


def put(path: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Change what lies at ``path``: keys of dicts, places of lists and attributes, with dots between."""

    def apply(values: dict[str, Any]) -> None:
        *before, last = path.split(".")
        place: Any = values
        for key in before:
            place = _at(place, key)
        if isinstance(place, dict):
            place[last] = change(place[last])
        elif isinstance(place, list):
            place[int(last)] = change(place[int(last)])
        else:
            setattr(place, last, change(getattr(place, last)))

    return apply


def _at(place: Any, key: str) -> Any:
    if isinstance(place, dict):
        return place[key]
    return place[int(key)] if key.isdigit() else getattr(place, key)


WRONG = {
    "longer": Wrong(put("pair.0", lambda t: torch.cat([t, t]).detach().requires_grad_()), "pair"),
    "one less dimension": Wrong(put("pair.0", lambda t: t[0].detach().requires_grad_()), "pair"),
    "shape that would broadcast": Wrong(put("extra.more.0", lambda t: t[:1].clone()), "extra"),
    "empty": Wrong(put("pair.1", lambda t: t[:0].clone()), "pair"),
    "other dtype": Wrong(put("pair.1", torch.Tensor.double), "pair"),
    "half": Wrong(put("packed.shift", torch.Tensor.half), "packed"),
    "integers": Wrong(put("extra.more.1", torch.Tensor.long), "extra"),
    "other device": Wrong(put("pair.1", lambda t: t.to("meta")), "pair"),
    "other device in a dataclass": Wrong(put("packed.shift", lambda t: t.to("meta")), "packed"),
    "no gradient any more": Wrong(put("extra.gate", torch.Tensor.detach), "extra"),
    "gradient all at once": Wrong(put("pair.1", lambda t: t.clone().requires_grad_()), "pair"),
    "other number": Wrong(put("scale", lambda _: 0.25), "scale"),
    "number of another type": Wrong(put("scale", lambda _: 1), "scale"),
    "other number in a dataclass": Wrong(put("packed.longest", lambda _: 8), "packed"),
    "other text in a dict": Wrong(put("extra.title", lambda _: "b"), "extra"),
    "other flag in a dict": Wrong(put("extra.flag", lambda _: False), "extra"),
    "None for a tensor": Wrong(put("packed.shift", lambda _: None), "packed"),
    "number for a tensor": Wrong(put("extra.gate", lambda _: 1.0), "extra"),
    "list one longer": Wrong(put("extra.more", lambda more: [*more, more[0]]), "extra"),
    "list one shorter": Wrong(put("extra.more", lambda more: more[:1]), "extra"),
    "further key": Wrong(put("extra", lambda extra: {**extra, "new": 1}), "extra"),
    "key that is missing": Wrong(put("extra", lambda e: {k: v for k, v in e.items() if k != "title"}), "extra"),
    "dict for a dataclass": Wrong(put("packed", vars), "packed"),
    "further argument": Wrong(lambda values: values.update(mask=torch.zeros(SIZE, HIDDEN, dtype=torch.bool)), "mask"),
    "further argument that is None": Wrong(lambda values: values.update(mask=None), "mask"),
    "further argument that is not known": Wrong(lambda values: values.update(unknown=1), "unknown"),
    "missing argument": Wrong(lambda values: values.pop("scale"), "scale"),
    "missing keyword": Wrong(lambda values: values.pop("mode"), "mode"),
    "other value of a keyword": Wrong(put("mode", lambda _: "dict"), "mode"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_not_as_in_the_sample_is_refused_by_name(device: torch.device, wrong: Wrong, ordered: bool) -> None:
    job = Job(device, True, torch.float32)
    module = job.built(Nested)
    named = {"mode": "plain"}
    if ordered:
        (given,) = job.graphed((module,), (arguments(job.sample),), sample_kwargs=(named,), _order=[1, -1])
    else:
        given = job.graphed(module, arguments(job.sample), sample_kwargs=named)
    names = ("pair", "extra", "packed", "scale")
    given(*arguments(job.draw), mode="plain").sum().backward()
    values: dict[str, Any] = dict(zip(names, arguments(job.draw), strict=True), mode="plain")
    values["pair"] = list(values["pair"])
    wrong.change(values)
    if isinstance(values["pair"], list):
        values["pair"] = tuple(values["pair"])
    positional = [values.pop(name) for name in names if name in values]
    with nothing_is_replayed(job.handles[0], module), pytest.raises(InputMismatchError, match=re.escape(wrong.name)):
        given(*positional, **values)
    given(*arguments(job.draw), mode="plain").sum().backward()
    assert job.rows[0].num_replays == 2
    job.close()


def test_all_differences_at_once(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    given = job.graphed(job.built(Nested), arguments(job.sample))
    pair, extra, packed, _ = arguments(job.draw)
    with pytest.raises(InputMismatchError) as caught:
        given((pair[0], pair[1].double()), {**extra, "title": "b"}, replace(packed, shift=packed.hidden), 0.25)
    for name in ("pair", "title", "shift", "scale", "callables[0]"):
        assert name in str(caught.value), name
    job.close()


@pytest.mark.parametrize("values", [{}, {"x": None}])
def test_no_argument_at_all(device: torch.device, values: Mapping[str, Any]) -> None:
    job = Job(device, True, torch.float32)
    module = job.built(Block)
    given = job.graphed(module, (job.sample(requires_grad=True),))
    with nothing_is_replayed(job.handles[0], module), pytest.raises(InputMismatchError, match="'x'"):
        given(**values)
    job.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_refused_call_does_not_take_the_turn(device: torch.device, ordered: bool) -> None:
    def script(job: Job) -> None:
        sample = (job.sample(requires_grad=True),)
        module = job.built(Block)
        if ordered:
            calls = job.graphed(module, (sample,) * 2, _order=[1, 1, -1, -1])
        else:
            calls = job.graphed((module, job.built(Block)), (sample,) * 2)
        for _ in range(5):
            first = calls[0](job.draw(requires_grad=True))
            if job.graphs:
                with pytest.raises(InputMismatchError, match="'x'"):
                    calls[1](job.sample(5, HIDDEN, requires_grad=True))
            second = calls[1](job.draw(requires_grad=True))
            for result in (first, second) if ordered else (second, first):
                result.sum().backward()
            job.note(first=first, second=second)
            del first, second, result

    compared(device, script, replays=10)


def test_keyword_for_what_was_positional_in_the_sample_is_refused(device: torch.device) -> None:
    """A keyword in the call for what was positional in the sample is another call: named, not guessed."""
    job = Job(device, True, torch.float32)
    module = job.built(Block)
    given = job.graphed(module, (job.sample(requires_grad=True),))
    with nothing_is_replayed(job.handles[0], module), pytest.raises(InputMismatchError, match="'x'"):
        given(x=job.draw(requires_grad=True))
    job.close()


@pytest.mark.parametrize("is_negated", [False, True])
def test_a_view_with_other_values_over_the_same_memory_is_refused(device: torch.device, is_negated: bool) -> None:
    """What lies in memory is the negative of its values, or of the sample's."""
    layer = torch.nn.Linear(HIDDEN, HIDDEN, device=device)
    plain = torch.ones(SIZE, HIDDEN, device=device)
    given, other = (torch._neg_view(plain), plain) if is_negated else (plain, torch._neg_view(plain))
    expected = layer(given)
    graphed = make_graphed_callables(layer, (given.clone() if not is_negated else torch._neg_view(plain.clone()),))
    assert torch.equal(graphed(given), expected)
    with pytest.raises(InputMismatchError, match="argument 'input' changed is_neg"):
        graphed(other)
