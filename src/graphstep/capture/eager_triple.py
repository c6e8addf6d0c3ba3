"""An eager call whose weight gradients are accumulated apart from its backward, where no graph can be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.backward_refusals import refuse_second_derivatives
from graphstep.capture.gradients import hooks_off, leaves_reached
from graphstep.capture.split_backward import SplitBackward
from graphstep.capture.tree import flatten, unflatten
from graphstep.capture.triple_run import WaitingRun, accumulate
from graphstep.errors import LifecycleError


class EagerTriple:
    """Stands in for a :class:`graphstep.capture.triple_run.TripleRun`.

    Its backward computes everything, and the weight gradients are kept until their turn. Nothing is known of what the
    function does now: a pass in two parts would run hooks on activations twice, and compute checkpoints again.

    Args:
        function: what runs.
        where: its name.
        on_close: called once when the run is over, or when its backward will not come.
        before_backward: called before the backward; refuses it by an error.
        on_wait: called with this object when the backward is done, and has to keep it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        where: str,
        on_close: Callable[[], None],
        before_backward: Callable[[], None],
        on_wait: Callable[[WaitingRun], None],
    ) -> None:
        self._function, self._where = function, where
        self._on_close, self._before_backward, self._on_wait = on_close, before_backward, on_wait
        self._is_open = True
        self._inputs: dict[int, Tensor] = {}
        """By identity of the argument: a leaf with its values."""
        self._outputs: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._split: SplitBackward | None = None

    def start(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run the function; returns what it returns."""
        tensors, structure = flatten((arguments, dict(named)))
        self._inputs = {id(t): t.detach().requires_grad_(t.requires_grad) for t in tensors}
        own_arguments, own_named = unflatten(structure, [self._inputs[id(tensor)] for tensor in tensors])
        result = self._function(*own_arguments, **own_named)
        self._outputs, found = flatten(result)
        wanted = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
        device = self._outputs[0].device if self._outputs else None
        anchor = torch.empty(0, device=device, requires_grad=True)
        return unflatten(found, list(_Eager.apply(self, anchor, *wanted.values())))  # type: ignore[no-untyped-call]

    def forward(self) -> tuple[Tensor, ...]:
        """What callers get."""
        return tuple(output.detach() for output in self._outputs)

    def not_differentiable(self) -> list[int]:
        """Positions of results without a gradient."""
        return [position for position, output in enumerate(self._outputs) if not output.requires_grad]

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients of the arguments that want one.

        Raises:
            LifecycleError: it has run before, or second derivatives are wanted.
            PlanError: it is not its turn.
        """
        refuse_second_derivatives(self._where)
        if self._split is not None or not self._is_open:
            raise LifecycleError(
                "the backward of this call has run already",
                where=self._where,
                fix="add up the losses and call backward once",
            )
        self._before_backward()
        used = [(o, g) for o, g in zip(self._outputs, gradients, strict=True) if g is not None and o.requires_grad]
        inputs = [tensor for tensor in self._inputs.values() if tensor.requires_grad]
        own = set(map(id, inputs))
        self._leaves = [leaf for leaf in leaves_reached([output for output, _ in used]) if id(leaf) not in own]
        self._split = SplitBackward(
            [output for output, _ in used],
            [gradient for _, gradient in used],
            inputs,
            self._leaves,
            is_undivided=True,
        )
        with hooks_off(self._leaves):
            found = self._split.input_gradients()
        self._outputs.clear()
        self._on_wait(self)
        return found

    def prepare_weight_gradients(self) -> None:
        """Nothing can be wrong."""

    def weight_gradients(self) -> None:
        """See :class:`graphstep.capture.triple_run.WaitingRun`."""
        split, leaves = self._split, self._leaves
        gradients: list[Tensor | None] = []
        if split is not None:
            with hooks_off(leaves):
                gradients = list(split.parameter_gradients())
        self.close()
        if leaves:
            accumulate(leaves, gradients, torch.empty(0, device=leaves[0].device, requires_grad=True))

    def close(self) -> None:
        """It is over. May be called twice."""
        if self._is_open:
            self._is_open = False
            self._on_close()

    def __del__(self) -> None:
        self.close()


class _Eager(torch.autograd.Function):
    """Stands for the call in the graph of its caller."""

    @staticmethod
    def forward(ctx: Any, run: EagerTriple, _anchor: Tensor, *_wanted: Tensor) -> tuple[Tensor, ...]:
        """What the call has computed."""
        ctx.set_materialize_grads(False)
        ctx.run = run
        outputs = run.forward()
        ctx.mark_non_differentiable(*(outputs[position] for position in run.not_differentiable()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the arguments."""
        run: EagerTriple = ctx.run
        return (None, None, *run.backward(gradients))
