"""A linear layer that multiplies in fp8, forward and backward, with delayed scaling.

Shapes: M rows (tokens), K input features, N output features, T the three scaled tensors, L entries of a history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from graphstep.engine import torch_private
from graphstep.errors import ConfigError, Problem
from graphstep.models.delayed_scaling import DelayedScaling, begin_step, note_amax, quantise

INPUT, WEIGHT, GRADIENT = range(3)
"""Places in the scales, and in the last dimension of the histories."""

_MULTIPLE: Final = 16
"""Of the rows and columns of a matrix that fp8 kernels take."""
_FLOATS: Final = ("amax_history", "scale", "target")


class Float8Linear(nn.Linear):
    """``torch.nn.Linear`` with input, weight and gradient of the output quantised to fp8, each with one scale.

    In training a forward that *begins a step* takes the scales of all three from their histories, and quantises the
    weight. Every forward and backward adds to the histories.

    Without ``caches_weight`` each forward in training begins a step. With it only the first one after
    :func:`mark_first_microbatch` does; later ones use the weight as it was quantised then, and the same scales. Which
    of the two a forward is, the device decides: one graph serves both. All that runs between two marks so has the same
    scales, also a forward that is computed again; without ``caches_weight``, activation recompute would go on to
    other scales. All backwards of a step have to come before the first forward of the next one.

    In evaluation nothing is written: the scales stay, and the weight is quantised anew.

    The state lies in buffers that are written in place. In the state dict are ``amax_history`` [L, T] and ``scale``
    [T], float32 whatever the module is cast to, and ``skip_weight_update``. A fresh module has scales of one, so that
    its first step is coarse where values are small. Where DistributedDataParallel broadcasts buffers
    (``broadcast_buffers``), it hands the state of the first rank to the others.

    Args:
        in_features: K, a multiple of 16.
        out_features: N, likewise.
        bias: add a bias, in the dtype of the result.
        recipe: how scales follow from histories.
        caches_weight: keep the weight in fp8, also transposed for the backward: 2 N K bytes.
        device: where it lives.
        dtype: of the parameters. The result has the dtype of the input, or that of autocast.

    Raises:
        ConfigError: sizes that fp8 kernels do not take.

    Cost: three products in fp8, and copies of input, gradient and weight that are transposed. For the gradient of the
    weight the number of rows is filled up to a multiple of 16. Keeping the weight saves no time here: it is quantised
    in each forward, and the result is used or not.
    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433).
    """

    amax_history: Tensor  # [L, T]
    scale: Tensor  # [T]
    target: Tensor  # [T]
    skip_weight_update: Tensor  # bool scalar; False: the next forward begins a step
    weight_bytes: Tensor | None  # uint8 [N, K]
    weight_bytes_transposed: Tensor | None  # uint8 [K, N]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: DelayedScaling | None = None,
        caches_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        problems = [
            Problem(
                "fp8-linear-size",
                f"{name} is {size}; fp8 kernels take multiples of {_MULTIPLE}",
                f"Float8Linear, argument {name}",
                f"use {-(-size // _MULTIPLE) * _MULTIPLE}, or torch.nn.Linear for this layer",
            )
            for name, size in (("in_features", in_features), ("out_features", out_features))
            if size % _MULTIPLE or size <= 0
        ]
        if problems:
            raise ConfigError(problems)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.recipe = DelayedScaling.of(recipe) if recipe is not None else DelayedScaling()
        self.caches_weight = caches_weight
        length = self.recipe.amax_history_len
        self.register_buffer("amax_history", torch.empty((length, 3), device=device, dtype=torch.float32))
        self.register_buffer("scale", torch.empty(3, device=device, dtype=torch.float32))
        self.register_buffer("target", torch.empty(3, device=device, dtype=torch.float32), persistent=False)
        self.register_buffer("skip_weight_update", torch.empty((), device=device, dtype=torch.bool))
        self._make_room()
        self.reset_fp8_state()
        self.register_load_state_dict_post_hook(_quantise_again)  # type: ignore[no-untyped-call]

    def reset_fp8_state(self) -> None:
        """Forget all histories; scales are one. Also needed after ``to_empty()``."""
        self.amax_history.zero_()
        self.scale.fill_(1.0)
        self.skip_weight_update.fill_(False)
        self._fill_target()

    def use_recipe(self, recipe: Any, *, caches_weight: bool) -> None:
        """Go on with another recipe. A history of another length is a new buffer, with the newest entries of the old.

        Args:
            recipe: as :meth:`DelayedScaling.of` takes it.
            caches_weight: see the class.

        Raises:
            ConfigError: no recipe of delayed scaling.
        """
        self.recipe = DelayedScaling.of(recipe)
        length = self.recipe.amax_history_len
        if length != len(self.amax_history):
            kept = self.amax_history[:length]
            self.amax_history = functional.pad(kept, (0, 0, 0, length - len(kept)))
        self.target = self.target.clone()
        self._fill_target()
        if caches_weight != self.caches_weight:
            self.caches_weight = caches_weight
            self._make_room()
            self.skip_weight_update.fill_(False)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        if not input.numel():
            return functional.linear(input, self.weight, self.bias)
        result = _multiply(input.reshape(-1, self.in_features).to(dtype), self.weight, self)
        if self.bias is not None:
            result = result + self.bias.to(dtype)
        return result.view(*input.shape[:-1], self.out_features)

    def quantised_weight(self) -> tuple[Tensor, Tensor]:
        """The weight in fp8, [N, K] and transposed [K, N], after beginning a step if this forward does."""
        dtype = self.recipe.forward_dtype
        if self.training:
            refreshes = (
                self.skip_weight_update.logical_not()
                if self.caches_weight
                else torch.ones_like(self.skip_weight_update)
            )
            begin_step(self.amax_history, self.scale, self.target, refreshes, self.recipe.amax_compute_algo)
            note_amax(self.amax_history, WEIGHT, self.weight)
        fresh = quantise(self.weight, self.scale[WEIGHT], dtype).contiguous()
        if not self.training or self.weight_bytes is None or self.weight_bytes_transposed is None:
            return fresh, fresh.t()
        fresh = fresh.view(torch.uint8)
        for kept, new in ((self.weight_bytes, fresh), (self.weight_bytes_transposed, fresh.t())):
            kept.copy_(torch.where(refreshes, new, kept))
        self.skip_weight_update.fill_(True)
        return self.weight_bytes.view(dtype), self.weight_bytes_transposed.view(dtype)

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe}, caches_weight={self.caches_weight}"

    def _fill_target(self) -> None:
        self.target[:GRADIENT].fill_(self.recipe.target(self.recipe.forward_dtype))
        self.target[GRADIENT:].fill_(self.recipe.target(self.recipe.backward_dtype))

    def _make_room(self) -> None:
        """Make the buffers of the weight in fp8, or let go of them. Bytes: casts of the module leave them alone."""
        sizes = ((self.out_features, self.in_features), (self.in_features, self.out_features))
        for name, size in zip(("weight_bytes", "weight_bytes_transposed"), sizes, strict=True):
            room = torch.zeros(size, device=self.weight.device, dtype=torch.uint8) if self.caches_weight else None
            self.register_buffer(name, room, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float8Linear:
        """Move the state with the module, but never cast it: scales are float32."""
        before = {name: self._buffers[name] for name in _FLOATS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = new.to(old.dtype) if old.is_meta else old.to(new.device)
        return self


class _Multiply(torch.autograd.Function):
    """``input @ weight.T``, with both, and the gradient that comes back, in fp8."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, layer: Float8Linear) -> Tensor:
        weight8_NK, weight8_KN = layer.quantised_weight()
        if layer.training:
            note_amax(layer.amax_history, INPUT, x_MK)
        x8_MK = quantise(x_MK, layer.scale[INPUT], layer.recipe.forward_dtype).contiguous()
        inverse = layer.scale.reciprocal()  # A copy: the next step may begin before this backward runs.
        ctx.layer, ctx.dtype, ctx.weight_dtype, ctx.training = layer, x_MK.dtype, weight_NK.dtype, layer.training
        # A weight that is kept is not saved through autograd: each microbatch writes the same bytes once more, which
        # would count as a change.
        ctx.kept_KN = weight8_KN if layer.training and layer.caches_weight else None
        ctx.save_for_backward(x8_MK, inverse, None if ctx.kept_KN is not None else weight8_KN)
        return torch_private.fp8_matmul(
            x8_MK, weight8_NK, inverse[INPUT], inverse[WEIGHT], dtype=x_MK.dtype, is_fast=True
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None]:
        grad_MN: Tensor = grad_outputs[0]
        layer: Float8Linear = ctx.layer
        x8_MK, inverse, fresh_KN = ctx.saved_tensors
        weight8_KN = (fresh_KN if ctx.kept_KN is None else ctx.kept_KN).contiguous()
        if ctx.training:
            note_amax(layer.amax_history, GRADIENT, grad_MN)
        scale = layer.scale[GRADIENT]
        inverse_grad = scale.reciprocal()
        grad8_MN = quantise(grad_MN, scale, layer.recipe.backward_dtype).contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch_private.fp8_matmul(grad8_MN, weight8_KN, inverse_grad, inverse[WEIGHT], dtype=ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch_private.fp8_matmul(
                _columns(grad8_MN), _columns(x8_MK), inverse_grad, inverse[INPUT], dtype=ctx.weight_dtype
            )
        return grad_x, grad_weight, None


def _multiply(x_MK: Tensor, weight_NK: Tensor, layer: Float8Linear) -> Tensor:
    function: Callable[..., Tensor] = _Multiply.apply
    return function(x_MK, weight_NK, layer)


def _columns(matrix8: Tensor) -> Tensor:
    """The transposed matrix, contiguous, with columns of zeros up to a multiple of what fp8 kernels take."""
    rows = matrix8.view(torch.uint8).t()
    return functional.pad(rows, (0, -rows.shape[1] % _MULTIPLE)).contiguous().view(matrix8.dtype)


def _quantise_again(layer: Float8Linear, _incompatible: Any) -> None:
    """After loading: the weight in fp8 follows from the weight and its scale, should the state be of mid-step."""
    if layer.weight_bytes is not None and layer.weight_bytes_transposed is not None and not layer.weight.is_meta:
        with torch.no_grad():
            fresh = quantise(layer.weight, layer.scale[WEIGHT], layer.recipe.forward_dtype).view(torch.uint8)
            layer.weight_bytes.copy_(fresh)
            layer.weight_bytes_transposed.copy_(fresh.t())


def float8_layers(model: nn.Module) -> Iterator[Float8Linear]:
    """The fp8 layers of a model, each once."""
    return (module for module in model.modules() if isinstance(module, Float8Linear))


def mark_first_microbatch(model: nn.Module) -> None:
    """Say that the next microbatch is the first one of a step, for the layers that cache their weight.

    Called before each step, outside of graphs or inside of one. Does not wait for the device; one kernel for all.
    """
    flags = [layer.skip_weight_update for layer in float8_layers(model) if layer.caches_weight]
    if flags:
        torch._foreach_zero_(flags)


def reduce_amax(model: nn.Module, group: torch.distributed.ProcessGroup | None = None) -> None:
    """Share the running entries of all histories among ranks, so that they go on with the same scales.

    Called after the last backward of a step, by all ranks of the group. One collective for all layers.
    """
    running = [layer.amax_history[0] for layer in float8_layers(model)]
    if running:
        together = torch.stack(running)
        torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX, group=group)
        torch._foreach_copy_(running, list(together.unbind(0)))
