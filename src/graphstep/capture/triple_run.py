"""Replays of graph triples: the backward gives the gradients of the inputs, a later call those of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from graphstep.capture.chain import Chain
from graphstep.capture.chain_run import ChainRun
from graphstep.capture.gradients import Guests, hooks_off
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.graph_triple import GraphTriple
from graphstep.capture.merged_backward import count_partial
from graphstep.capture.split_backward import SplitBackward
from graphstep.errors import LifecycleError


class WaitingRun(Protocol):
    """A run whose backward is done, and whose weight gradients are to come."""

    def prepare_weight_gradients(self) -> None:
        """Before :meth:`weight_gradients`: refuse what it could not give. May be called again.

        Raises:
            LifecycleError: a result was changed in place meanwhile, or a parameter got a hook.
            StaleAddressError: a gradient has moved.
        """

    def weight_gradients(self) -> None:
        """Compute the gradients of the parameters and accumulate them. The run is over then."""

    def close(self) -> None:
        """Give them up. May be called twice."""


class TripleRun(ChainRun):
    """One run of a graph triple, until its weight gradients are computed or its results are dropped.

    Args:
        chain: of one triple.
        on_close: called once when the run is over.
        before_backward: called before the backward half runs; refuses it by an error.
        on_wait: called with this run when the backward is done, and has to keep it.
    """

    def __init__(
        self,
        chain: Chain,
        triple: GraphTriple,
        on_close: Callable[[], None],
        before_backward: Callable[[GraphPair], None] | None,
        on_wait: Callable[[WaitingRun], None],
    ) -> None:
        super().__init__(chain, 0, on_close, before_backward)
        self._triple = triple
        self._on_wait = on_wait
        self._unreached: list[Tensor] = []
        self._empty: list[Tensor] = []
        """Those of them that have no gradient, before the replay."""
        self._guests: Guests = {}
        self._again: _Recomputed | None = None

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward half.

        Args:
            gradients: of all results.

        Returns:
            Gradients of the inputs that want one.

        Raises:
            LifecycleError: a result was changed in place, or has a gradient that had none at the capture and the region
                cannot be computed again; or a parameter got a hook.
            PlanError: it is not its turn.
        """
        triple = self._triple
        if self._before_backward is not None:
            self._before_backward(triple)
        (given,) = self._checked((triple,), gradients)
        self._unreached = triple.not_reached_from(given, None)
        is_other = triple.gets_unknown(given) or triple.misses_some(given)
        if is_other and triple.is_pure:
            self._refuse_other_state({0}, [(0, 1)])
            count_partial((triple,), (given,), is_chained=False)
            self._again = _Recomputed(triple, given)
            incoming: Sequence[Tensor | None] = self._again.incoming
        elif triple.gets_unknown(given):
            raise LifecycleError(
                "a result has a gradient that had none at the capture, and this region, which draws random numbers or "
                "changes state, cannot be computed again",
                where=triple.region.name,
                fix="use the same results of it in every loss",
            )
        else:
            triple.load_output_gradients(given, is_chained=False)
            triple.launch_backward({})
            incoming = triple.grad_inputs
        self._has_run = True
        wanted = [g for g, tensor in zip(incoming, triple.inputs, strict=True) if tensor.requires_grad]
        # Whoever receives a gradient may keep it, and the static one is overwritten by the next backward half.
        results = [None if g is None else g.clone() for g in wanted]
        self._on_wait(self)
        return results

    def prepare_weight_gradients(self) -> None:
        """See :class:`WaitingRun`."""
        self._checked((self._triple,), [None] * len(self._triple.outputs))
        if self._again is None:
            self._empty = [parameter for parameter in self._unreached if parameter.grad is None]
            self._guests = self.chain.settle((self._triple,))

    def weight_gradients(self) -> None:
        """Replay the weight gradients, and accumulate those that the recording has not."""
        triple = self._triple
        if self._again is not None:
            exposed = self._again.parameter_gradients()
            self.close()
        else:
            triple.launch_weight_gradients(self._guests)
            # The recording writes into all of its gradients. Eager code leaves None where the loss does not reach.
            for parameter in self._empty:
                parameter.grad = None
            left_out = set(map(id, self._unreached))
            pairs = zip(triple.exposed_later, triple.exposed_gradients, strict=True)
            # The static ones are overwritten by the next replay.
            exposed = [None if g is None or id(p) in left_out else g.clone() for p, g in pairs]
            self.close()
            if triple.poisons:
                triple.poison_dead()
        accumulate(triple.exposed_later, exposed, self.chain.anchor)


class _Recomputed:
    """A triple run again eagerly, because other results have gradients than at the capture."""

    def __init__(self, triple: GraphTriple, given: Sequence[Tensor | None]) -> None:
        self._triple = triple
        repeated = dict(triple.signature.repeated)
        with torch.enable_grad():
            copies = [t.detach().requires_grad_(t.requires_grad) for t in triple.inputs]
            inputs = [copies[repeated.get(position, position)] for position in range(len(copies))]
            outputs = triple.recompute(inputs)
        used = [(o, g) for o, g in zip(outputs, given, strict=True) if g is not None and o.requires_grad]
        places = [n for n, tensor in enumerate(inputs) if tensor.requires_grad and n not in repeated]
        self._leaves = [*triple.exposed_later, *triple.accumulated_later]
        self._split = SplitBackward(
            [output for output, _ in used],
            [gradient for _, gradient in used],
            [inputs[place] for place in places],
            self._leaves,
            is_undivided=triple.is_undivided,
        )
        with hooks_off(self._leaves):
            found = self._split.input_gradients()
        self.incoming: list[Tensor | None] = [None] * len(inputs)
        for place, gradient in zip(places, found, strict=True):
            self.incoming[place] = gradient

    def parameter_gradients(self) -> list[Tensor | None]:
        """Those that autograd accumulates; the others are accumulated."""
        with hooks_off(self._leaves):
            found = list(self._split.parameter_gradients())
        num_exposed = len(self._triple.exposed_later)
        for parameter, gradient in zip(self._triple.accumulated_later, found[num_exposed:], strict=True):
            if gradient is not None:
                self._triple.accumulate_eagerly(parameter, gradient)
        return found[:num_exposed]


def accumulate(parameters: Sequence[Tensor], gradients: list[Tensor | None], anchor: Tensor) -> None:
    """Have autograd accumulate gradients, with all hooks that a backward pass would run. Takes the list over.

    Args:
        parameters: leaves.
        gradients: theirs, each in memory of its own, or ``None``.
        anchor: any leaf that wants a gradient; it gets none.
    """
    if any(gradient is not None for gradient in gradients):
        with torch.enable_grad():
            total: Tensor = _Accumulation.apply(gradients, anchor, *parameters)  # type: ignore[no-untyped-call]
        total.backward()


class _Accumulation(torch.autograd.Function):
    """Its backward hands gradients over that are there already."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], anchor: Tensor, *_parameters: Tensor) -> Tensor:
        """A zero."""
        ctx.gradients = gradients
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_given: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, with no other reference to them, so that autograd need not copy them."""
        found = tuple(ctx.gradients)
        ctx.gradients.clear()
        return (None, None, *found)
