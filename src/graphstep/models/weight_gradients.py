"""Weight gradients of linear layers, added by the matrix product itself, and on a branch of their own if wanted.

Shapes: M rows (tokens), N output and K input features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from graphstep.engine import torch_private

_MOST_PENDING: Final = 8
"""Products on the branch whose inputs are kept; at the next one the oldest has to be done."""


class WeightGradients:
    """Where the linear layers of a model add their weight gradients: straight into ``main_grad`` or ``.grad``.

    The product accumulates into the gradient, so that no gradient of its own is written and read again. That rounds
    once where autograd rounds twice. A weight that has no gradient yet gets one from autograd, as ever; so does one
    with hooks on its gradient, which would not be called otherwise.

    Args:
        device: of the model.
        is_parallel: on a GPU, run the products on a second stream beside the rest of the backward; :meth:`join` then
            has to be called before gradients are read. Products of weights that other operations also write the
            gradient of stay on the first.
        shared: weights that other operations use as well.
    """

    def __init__(self, device: torch.device, *, is_parallel: bool = False, shared: tuple[Tensor, ...] = ()) -> None:
        self._side = torch.cuda.Stream(device) if is_parallel and device.type == "cuda" else None
        self._shared = {id(weight) for weight in shared}
        self._pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def add(self, weight: Tensor, grad_MN: Tensor, x_MK: Tensor) -> bool:
        """Add ``grad.T @ x`` to the gradient of a weight [N, K]; False if autograd has to do it."""
        main = getattr(weight, "main_grad", None)
        home = main if isinstance(main, Tensor) else weight.grad
        if home is None or weight._backward_hooks or (main is None and weight._post_accumulate_grad_hooks):
            return False
        if self._side is None or id(weight) in self._shared:
            torch_private.add_product(home, grad_MN.t(), x_MK)
            return True
        current = torch.cuda.current_stream(home.device)
        if len(self._pending) >= _MOST_PENDING:
            current.wait_event(self._pending.popleft()[0])
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            torch_private.add_product(home, grad_MN.t(), x_MK)
            done = self._side.record_event()
        # Kept until the product is done: the allocator knows of the first stream only.
        self._pending.append((done, (grad_MN, x_MK)))
        return True

    def join(self) -> None:
        """Have the current stream wait for what is on the branch."""
        if self._side is not None and self._pending:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
            self._pending.clear()


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``, whose weight gradient goes where :class:`WeightGradients` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradients = gradients
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad: Tensor = grad_outputs[0]
        grad_MN, x_MK = grad.flatten(0, -2), x.flatten(0, -2)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1] and not ctx.gradients.add(weight, grad_MN, x_MK):
            grad_weight = grad_MN.t() @ x_MK
        grad_bias = grad_MN.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients | None) -> Tensor:
    """``torch.nn.functional.linear``, with weight gradients added by their products if ``gradients`` is given.

    Autocast, which multiplies copies of the weight, and forwards without gradients are left as they are.
    """
    is_plain = gradients is None or not torch.is_grad_enabled() or not weight.requires_grad
    if is_plain or torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, weight, bias)
    function: Callable[..., Tensor] = _Linear.apply
    return function(x, weight, bias, gradients)


class AddsWeightGradients(nn.Module):
    """A module whose products take part; see :func:`fuse_weight_gradients`."""

    weight_gradients: WeightGradients | None = None


def fuse_weight_gradients(model: nn.Module, *, is_parallel: bool = False) -> WeightGradients:
    """Have the linear layers of a model add their weight gradients by the products themselves.

    Args:
        model: with modules that are :class:`AddsWeightGradients`; others stay as they are.
        is_parallel: see :class:`WeightGradients`.

    Returns:
        The owner of the branch, to be joined.
    """
    parts = [module for module in model.modules() if isinstance(module, AddsWeightGradients)]
    taking_part = {id(p) for part in parts for p in part._parameters.values()}
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    shared = tuple(parameter for parameter in parameters if id(parameter) not in taking_part)
    gradients = WeightGradients(device, is_parallel=is_parallel, shared=shared)
    for part in parts:
        part.weight_gradients = gradients
    return gradients
