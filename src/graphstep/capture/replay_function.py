"""The autograd function that stands for a replayed pair: forward half now, backward half when its turn comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphstep.engine import torch_private
from graphstep.errors import LifecycleError

if TYPE_CHECKING:
    from graphstep.capture.graph_pair import GraphPair


class Replay(torch.autograd.Function):
    """Runs a pair's forward half and hooks its backward half behind the outputs.

    Inputs: the pair, its lease, the number of arguments, the arguments, the parameters whose gradients autograd
    accumulates, and the pair's anchor.
    """

    @staticmethod
    def forward(ctx: Any, pair: GraphPair, lease: Any, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward half on these arguments."""
        ctx.set_materialize_grads(False)
        ctx.pair, ctx.lease, ctx.num_tensors, ctx.has_run = pair, lease, len(tensors), False
        # Whoever receives a gradient may keep it: only what another pair reads at once is the static one.
        ctx.handed_on = tuple(
            position in pair.chained and _comes_from_a_replay(tensor)
            for position, tensor in enumerate(tensors[:num_inputs])
        )
        outputs = pair.replay_forward(tensors[:num_inputs])
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, pair.differentiable, strict=True) if not d))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay the backward half, once, if it can give what is asked for.

        Raises:
            LifecycleError: it has run before, or only gradients of chosen tensors are wanted.
            PlanError: it comes out of order.
        """
        if ctx.has_run:
            raise LifecycleError(
                "the backward of this call has run already, and the memory of its forward is used again",
                where=ctx.pair.region.name,
                fix="add up the losses and call backward once, or leave this module out of the captured ones",
            )
        if ctx.pair.accumulates and not torch_private.will_accumulate(ctx.next_functions[-1][0]):
            raise LifecycleError(
                "gradients of chosen tensors were asked for (autograd.grad, or backward with inputs=...); the captured "
                "backward would also add to the gradients of its parameters",
                where=ctx.pair.region.name,
                fix="call backward() and read .grad of the tensors, or leave this module out of the captured ones",
            )
        ctx.lease.backward_begins()
        ctx.has_run = True
        given = ctx.pair.replay_backward(gradients)
        ctx.lease.close()
        handed_on = (*ctx.handed_on, *([False] * (len(given) - len(ctx.handed_on))))
        found = [g if g is None or stays else g.clone() for g, stays in zip(given, handed_on, strict=True)]
        return (None, None, None, *found, *([None] * (ctx.num_tensors - len(found))))


def _comes_from_a_replay(tensor: Tensor) -> bool:
    """True if nobody but another pair sees the gradient of this argument."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "ReplayBackward" and not tensor._backward_hooks
