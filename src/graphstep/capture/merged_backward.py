"""Backward of pairs that were captured as one graph, also where not all of them were called."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from graphstep.capture.gradients import hooks_off
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.reasons import EagerReason
from graphstep.engine import torch_private
from graphstep.errors import LifecycleError


def by_graph(pairs: Sequence[GraphPair]) -> list[tuple[int, int]]:
    """First and end of those that are launched together."""
    starts = [index for index, pair in enumerate(pairs) if pair.forward is not None]
    return list(pairwise([*starts, len(pairs)]))


def is_partial(graph: Sequence[GraphPair], given: Sequence[Sequence[Tensor | None]], *, is_chained: bool) -> bool:
    """True if the backward half of a graph is not what is asked for.

    Not all of its pairs may have been called, a result inside of it may have another use, or other results than at the
    capture may have gradients.
    """
    last = graph[-1]
    if is_chained and len(graph) == 1 and last.takes_all_gradients:
        return last.backward is None
    inside = [gradient for gradients in given[:-1] for gradient in gradients]
    return (
        last.backward is None
        or any(gradient is not None for gradient in inside)
        or (not is_chained and last.misses_some(given[-1]))
        or last.gets_unknown(given[-1])
    )


def count_partial(graph: Sequence[GraphPair], given: Sequence[Sequence[Tensor | None]], *, is_chained: bool) -> None:
    """Have the report tell that the pairs of a graph are computed again, and what was used otherwise.

    Takes the same arguments as :func:`is_partial`.
    """
    last = graph[-1]
    found: list[str] = []
    if last.backward is None:
        found.append(f"{last.region.name} is in a graph with layers after it that have no part in the backward")
    for pair, gradients in zip(graph[:-1], given, strict=False):
        found += [
            f"{pair.form.name_of(index)} of {pair.region.name} is used by others than the next layer of its graph"
            for index, gradient in enumerate(gradients)
            if gradient is not None
        ]
    for index, (gradient, place) in enumerate(zip(given[-1], last.grad_outputs, strict=False)):
        name = last.form.name_of(index)
        if gradient is not None and place is None:
            found.append(f"{name} of {last.region.name} has a gradient, and had none in the first step")
        elif gradient is None and place is not None and not is_chained:
            found.append(f"{name} of {last.region.name} has no gradient, and had one in the first step")
    for pair in graph:
        pair.stats.eager_calls[EagerReason.PARTIAL_BACKWARD] += 1
        pair.stats.last_detail = "; ".join(found)


def refuse_other_state(pair: GraphPair, *, has_other: bool) -> None:
    """Refuse to compute a pair again that would not compute what it has computed in the forward.

    Args:
        pair: in flight.
        has_other: a tensor that it reads has been written since.

    Raises:
        LifecycleError: that, or an attribute or hook of its modules has changed.
    """
    attributes = pair.left.attributes
    changed = attributes.changed() if attributes is not None else []
    if has_other or changed:
        what = f"{changed[0]} was changed" if changed else "a weight, buffer or argument was written"
        raise LifecycleError(
            f"{what} between the forward and the backward of a graph that was used in part, so that it cannot be "
            "computed again",
            where=pair.region.name,
            fix="change it after the backward; or use results as in the first step, and launch each layer by itself: "
            "--cuda-graph-merge-layers 1 (merge_layers=1)",
        )


def recomputed(
    graph: Sequence[GraphPair], given: Sequence[Sequence[Tensor | None]], *, is_chained: bool
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Run some pairs of a graph again, eagerly, with their backward, which the report counts.

    Returns:
        Gradients of the first one's inputs, and of the parameters whose gradients autograd accumulates. Those of all
        other parameters are accumulated.
    """
    count_partial(graph, given, is_chained=is_chained)
    if is_chained:
        graph[-1].load_output_gradients(given[-1], is_chained=True)
        given = [*given[:-1], graph[-1].grad_outputs]
    with torch.enable_grad():
        runs = _run_again(graph)
    found = [list(gradients) for gradients in given]
    incoming: list[Tensor | None] = []
    exposed: list[Tensor | None] = []
    for index in reversed(range(len(graph))):
        pair, (inputs, outputs) = graph[index], runs[index]
        incoming, exposed = _gradients_of(pair, inputs, outputs, found[index])
        if index:
            # One after the other, so that what comes from elsewhere is added where replays and eager code add it.
            found[index - 1] = handed_over(incoming, pair, found[index - 1])
    return incoming, exposed


def _run_again(graph: Sequence[GraphPair]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Run the regions eagerly, one after the other; the inputs and outputs of each."""
    runs: list[tuple[list[Tensor], list[Tensor]]] = []
    for pair in graph:
        repeated = dict(pair.signature.repeated)
        given = list(pair.inputs)
        for position, (_, output) in pair.chained.items() if runs else ():
            given[position] = runs[-1][1][output]
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
        inputs = [inputs[repeated.get(position, position)] for position in range(len(inputs))]
        runs.append((inputs, pair.recompute(inputs)))
    return runs


def _gradients_of(
    pair: GraphPair, inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of the inputs and of the parameters that autograd accumulates for; the others are accumulated."""
    repeated = {position for position, _ in pair.signature.repeated}
    used = [(o, g) for o, g in zip(outputs, given, strict=True) if g is not None and o.requires_grad]
    places = [n for n, tensor in enumerate(inputs) if tensor.requires_grad and n not in repeated]
    wanted = [*(inputs[place] for place in places), *pair.exposed, *pair.accumulated]
    with hooks_off(pair.exposed), torch.enable_grad():
        found: Sequence[Tensor | None] = (None,) * len(wanted)
        if used:
            found = torch_private.gradients([o for o, _ in used], wanted, [g for _, g in used])
    incoming: list[Tensor | None] = [None] * len(inputs)
    for place, gradient in zip(places, found, strict=False):
        incoming[place] = gradient
    rest = list(found[len(places) :])
    for parameter, gradient in zip(pair.accumulated, rest[len(pair.exposed) :], strict=True):
        if gradient is not None:
            pair.accumulate_eagerly(parameter, gradient)
    return incoming, rest[: len(pair.exposed)]


def handed_over(
    incoming: Sequence[Tensor | None], pair: GraphPair, given: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the results of the pair before, with those of this pair's inputs added."""
    found = list(given)
    for position, (_, output) in pair.chained.items():
        gradient, before = incoming[position], found[output]
        if gradient is not None:
            found[output] = gradient if before is None else before + gradient
    return found
