"""What makes a backward by replays impossible, each with an error that says so."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.merged_backward import is_partial
from graphstep.errors import LifecycleError

_wants_gradient: Final = attrgetter("requires_grad")


def refuse_second_derivatives(where: str) -> None:
    """Refuse a backward under ``create_graph=True``.

    Gradients that a replay gives have no history: a loss that is made of them would lose a part in silence.

    Raises:
        LifecycleError: second derivatives are wanted.
    """
    if torch.is_grad_enabled():
        raise LifecycleError(
            "a backward that can be differentiated again was asked for (create_graph=True), and a captured "
            "backward gives no second derivatives",
            where=where,
            fix="leave this module out of the captured ones; or call backward without create_graph, if its "
            "gradients are not differentiated",
        )


def refuse_frozen(pairs: Sequence[GraphPair]) -> None:
    """Refuse if a parameter was frozen since the forward.

    Raises:
        LifecycleError: names the regions.
    """
    frozen = [pair.region.name for pair in pairs if not all(map(_wants_gradient, pair.trained))]
    if frozen:
        raise LifecycleError(
            "parameters were frozen (requires_grad_(False)) between the forward and the backward; the captured "
            "backward would give them gradients",
            where=", ".join(frozen),
            fix="freeze them before the forward, or after the backward",
        )


def refuse_new_hooks(pairs: Sequence[GraphPair], has_hooks: bool) -> None:
    """Refuse if a parameter got a hook on its gradient since the forward.

    Raises:
        LifecycleError: names the regions.
    """
    named = [pair.region.name for pair in pairs if pair.has_new_hook()] if has_hooks else []
    if named:
        raise LifecycleError(
            "a parameter got a hook on its gradient between the forward and the backward; the captured backward does "
            "not run it",
            where=", ".join(named),
            fix="register hooks before the forward",
        )


def refuse_if_spoilt(pair: GraphPair, versions: Sequence[int], read_by_next: Collection[int]) -> None:
    """Refuse if a result was changed in place that the backward needs, or that shares memory with another one.

    Args:
        pair: whose results have other versions than when they were handed out.
        versions: those.
        read_by_next: results that the next pair reads where they are.

    Raises:
        LifecycleError: says which of both.
    """
    now = pair.versions()
    if any(now[index] != versions[index] for index in pair.shared_results):
        raise LifecycleError(
            "a result was changed in place that shares memory with another result; the captured backward does not know "
            "what that does to the gradient of the other one",
            where=pair.region.name,
            fix="return results with memory of their own (such as y[:2].clone()), or change a clone",
        )
    if pair.spoilt(versions, read_by_next):
        raise LifecycleError(
            "a result was changed in place, and the backward needs it as it was",
            where=pair.region.name,
            fix="use an operation that makes a new tensor, such as x + y instead of x.add_(y)",
        )


def refuse_if_partial(graph: Sequence[GraphPair], given: Sequence[Sequence[Tensor | None]], *, is_last: bool) -> None:
    """Refuse if a graph cannot give the gradients that are asked for, and its pairs cannot be computed again.

    Args:
        graph: pairs that are launched together.
        given: gradients of their results.
        is_last: nothing after it takes part in the backward.

    Raises:
        LifecycleError: says what is used otherwise than in the first step.
    """
    if all(pair.runs_again for pair in graph):
        return
    if len(graph) > 1 or graph[-1].backward is None:
        if is_partial(graph, given, is_chained=not is_last):
            raise LifecycleError(
                "a result inside a graph of several layers was used by itself, and they cannot be computed again",
                where=graph[-1].region.name,
                fix="launch each layer by itself: --cuda-graph-merge-layers 1 (merge_layers=1)",
            )
    elif graph[-1].gets_unknown(given[-1]):
        raise LifecycleError(
            "a result has a gradient that had none in the first step, and this region, which draws random numbers or "
            "changes state, cannot be computed again",
            where=graph[-1].region.name,
            fix="use all results of the region in the first step's loss",
        )
