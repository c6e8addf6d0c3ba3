"""Experts: MLPs of one shape, each with weights of its own, run over rows that are sorted by expert.

Shapes: N rows, E experts, C rows of an expert when padded, H hidden, F width inside an expert, 2F with SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.engine import torch_private
from graphstep.errors import CaptureError, ConfigError, Problem
from graphstep.models.initialization import WeightInitializer
from graphstep.models.mlp import swiglu, swiglu_backward, swiglu_forward

_ROW_BYTES = 16  # Where rows of the matrices of a grouped product may begin.
_HOPPER, _BLACKWELL = (9, 0), (10, 0)
_PADDING = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
_EAGER = "name moe_router and the other modules of the model in --cuda-graph-modules of local or transformer_engine"


class Experts(nn.Module):
    """Weights of all experts of a layer and their activation; the products are those of the classes below.

    With SwiGLU the first F columns of ``up`` are the gate and the last F the value.

    Raises:
        ConfigError: biases were asked for, and the product has none.
    """

    takes_biases: ClassVar[bool] = True

    def __init__(
        self,
        config: ModelConfig,
        num_experts: int,
        inner: int,
        *,
        bias: bool,
        rank: int = 0,
        num_ranks: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bias and not self.takes_biases:
            raise ConfigError(
                Problem(
                    code="moe-grouped-gemm-bias",
                    what="experts in one grouped matrix multiplication have no biases, and linear layers have them",
                    where="--moe-grouped-gemm, --disable-bias-linear",
                    fix="add --disable-bias-linear, or leave --moe-grouped-gemm out",
                )
            )
        self.rank, self.num_ranks = rank, num_ranks

        def allocated(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.num_experts = num_experts
        self.gated = config.swiglu
        width, hidden = inner * (2 if self.gated else 1), config.hidden_size
        self.up = allocated(num_experts, hidden, width)
        self.down = allocated(num_experts, inner, hidden)
        self.up_bias = allocated(num_experts, width) if bias else None
        self.down_bias = allocated(num_experts, hidden) if bias else None

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Draw normal weights, those of the down projections scaled by depth; biases are zero.

        Every rank draws those of all experts and keeps its own, so that they do not depend on the number of ranks.
        """
        self._fill(self.up, initializer.normal_)
        self._fill(self.down, initializer.residual_normal_)
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x_NH: Tensor, ends_E: Tensor) -> Tensor:
        """Transform rows [N, H] sorted by expert; ``ends_E`` is the row behind the last one of each, int32.

        Rows behind the last end belong to nobody: what is returned for them, and their gradient, mean nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} has to multiply")

    def forward_padded(self, x_NH: Tensor) -> Tensor:
        """Transform the same number of rows an expert: two batched products, static shapes whatever the class is."""
        x_ECH = x_NH.unflatten(0, (self.num_experts, -1))
        inner_ECF = self._activate(_batched_product(x_ECH, self.up, self.up_bias))
        return _batched_product(inner_ECF, self.down, self.down_bias).flatten(0, 1)

    def extra_repr(self) -> str:
        """Say how large the experts are."""
        num_experts, inner, hidden = self.down.shape
        return f"num_experts={num_experts}, hidden={hidden}, inner={inner}, gated={self.gated}"

    def _fill(self, weight: Tensor, fill_: Callable[[Tensor], None]) -> None:
        if self.num_ranks == 1:
            fill_(weight)
            return
        of_all = weight.new_empty(self.num_ranks, *weight.shape)
        fill_(of_all.flatten(0, 1))
        with torch.no_grad():
            weight.copy_(of_all[self.rank])

    def _activate(self, inner: Tensor) -> Tensor:
        return swiglu(inner) if self.gated else functional.gelu(inner)


class GroupedExperts(Experts):
    """All experts in two grouped matrix products, whose ends are read on the device: static shapes, nothing dropped.

    On CUDA this holds in bfloat16, with H and F multiples of 8; for other types PyTorch reads the ends on the host.
    """

    takes_biases: ClassVar[bool] = False

    def forward(self, x_NH: Tensor, ends_E: Tensor) -> Tensor:
        """See :class:`Experts`.

        Raises:
            CaptureError: under capture, where the product reads the ends on the host.
        """
        refuse_host_reads(x_NH, self.up, self.down)
        if self.gated and not torch.compiler.is_compiling() and not x_NH.is_meta:
            function: Callable[..., Tensor] = _GatedExperts.apply
            return function(x_NH, self.up, self.down, ends_E)
        inner_NF = self._activate(grouped_product(x_NH, self.up, ends_E))
        return grouped_product(inner_NF, self.down, ends_E)


class SequentialExperts(Experts):
    """One expert after the other: the reference. Reads the ends on the host, so it cannot be captured."""

    def forward(self, x_NH: Tensor, ends_E: Tensor) -> Tensor:
        """See :class:`Experts`; here rows behind the last end are zero.

        Raises:
            CaptureError: under capture.
        """
        if not torch.compiler.is_compiling() and torch_private.capture_is_under_way():
            raise CaptureError(
                "experts that run one after another read on the host where the rows of each end",
                where="SequentialExperts",
                fix="multiply them together (--moe-grouped-gemm --disable-bias-linear --bf16); or pad them "
                f"({_PADDING}); or leave them eager: {_EAGER}",
            )
        ends: list[int] = ends_E.tolist()
        starts = [0, *ends[:-1]]
        parts = [
            self._expert(x_NH[start:end], number) for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        return torch.cat([*parts, torch.zeros_like(x_NH[ends[-1] :])])

    def _expert(self, x_MH: Tensor, number: int) -> Tensor:
        inner_MF = x_MH @ self.up[number]
        if self.up_bias is not None:
            inner_MF = inner_MF + self.up_bias[number]
        y_MH = self._activate(inner_MF) @ self.down[number]
        return y_MH if self.down_bias is None else y_MH + self.down_bias[number]


class PaddedExperts(Experts):
    """The same number of rows an expert: two batched products, static shapes on every device and in every type."""

    def forward(self, x_NH: Tensor, ends_E: Tensor) -> Tensor:
        """See :class:`Experts`; the ends are multiples of N / E and are not looked at."""
        return self.forward_padded(x_NH)


def build_experts(
    config: ModelConfig,
    moe: MoEConfig,
    num_experts: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Experts:
    """The experts of one rank, as the options say: padded to a capacity, in one grouped product, or one by one.

    Args:
        config: sizes, and whether there are gates and biases.
        moe: ``moe_ffn_hidden_size``, ``moe_grouped_gemm`` and ``moe_pad_expert_input_to_capacity``.
        num_experts: experts of this rank.
        rank: of the expert ranks; it has the experts from ``rank * num_experts`` on.
        num_ranks: expert ranks.
        device: where the weights live.
        dtype: of the weights.

    Raises:
        ConfigError: a grouped product was asked for, and biases, or widths that it cannot have.
    """
    kind: type[Experts] = GroupedExperts if moe.moe_grouped_gemm else SequentialExperts
    if moe.pads_experts:
        kind = PaddedExperts
    inner = moe.moe_ffn_hidden_size or config.ffn_hidden_size
    multiple = _ROW_BYTES // (dtype or torch.get_default_dtype()).itemsize
    if kind is GroupedExperts and (config.hidden_size % multiple or inner % multiple):
        raise ConfigError(
            Problem(
                code="moe-grouped-gemm-sizes",
                what=f"the grouped matrix multiplication needs widths that are multiples of {multiple}, and the hidden "
                f"size is {config.hidden_size}, the width of an expert {inner}",
                where="hidden_size, moe_ffn_hidden_size",
                fix=f"round them to multiples of {multiple}",
            )
        )
    bias = config.add_bias_linear
    return kind(config, num_experts, inner, bias=bias, rank=rank, num_ranks=num_ranks, device=device, dtype=dtype)


def reads_on_host(x: Tensor, up_EHF: Tensor, down_EFH: Tensor) -> bool:
    """Would a grouped product of rows like these wait for the GPU, to read the ends of each expert's rows?"""
    if not x.is_cuda:
        return False
    is_wide = all(width % 8 == 0 for width in (up_EHF.shape[1], up_EHF.shape[2], down_EFH.shape[1]))
    return not (x.dtype is torch.bfloat16 and is_wide and torch.cuda.get_device_capability(x.device) >= _HOPPER)


def refuse_host_reads(x_NH: Tensor, up_EHF: Tensor, down_EFH: Tensor) -> None:
    """Say what is in the way of a capture; CUDA would say no more than that something is not permitted.

    Raises:
        CaptureError: the stream is capturing, and a grouped product of these reads the ends on the host.
    """
    if torch.compiler.is_compiling() or not x_NH.is_cuda or not torch.cuda.is_current_stream_capturing():
        return
    widths = (up_EHF.shape[1], up_EHF.shape[2], down_EFH.shape[1])
    if not reads_on_host(x_NH, up_EHF, down_EFH):
        return
    raise CaptureError(
        f"the grouped matrix product of experts reads on the host where each expert's rows end, for {x_NH.dtype} and "
        f"the widths {', '.join(map(str, widths))}; it does so on the device in bfloat16, from Hopper on, with widths "
        "that are multiples of 8",
        where="GroupedExperts",
        fix=f"train in bf16 (--bf16); or pad the experts ({_PADDING}); or leave them eager: {_EAGER}",
    )


def grouped_product(x_NK: Tensor, weight_EKM: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each row by its expert's matrix: [N, M]. Rows behind the last end are not written.

    Gradients of experts without rows are zero; those of rows behind the last end are not written.
    """
    if weight_EKM.is_meta and weight_EKM.dtype is not torch.bfloat16:
        return x_NK @ weight_EKM[0]  # The operator knows fewer types there than elsewhere.
    if torch.compiler.is_compiling():  # A compiler can't ask for the generation of the card in a backward.
        return functional.grouped_mm(x_NK, weight_EKM, offs=ends_E)
    function: Callable[..., Tensor] = _GroupedProduct.apply
    return function(x_NK, weight_EKM, ends_E)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_EKM: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_NK, weight_EKM, ends_E)
        return functional.grouped_mm(x_NK, weight_EKM, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x_NK, weight_EKM, ends_E = ctx.saved_tensors
        grad_NM: Tensor = grad_outputs[0].contiguous()  # An expanded gradient is refused.
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = functional.grouped_mm(grad_NM, weight_EKM.transpose(1, 2), offs=ends_E)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(x_NK, grad_NM, ends_E)
        return grad_x, grad_weight, None


class _GatedExperts(torch.autograd.Function):
    """Product, SwiGLU, product in one node: where experts run eagerly, nodes are what the host is busy with."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, up_EHM: Tensor, down_EFH: Tensor, ends_E: Tensor) -> Tensor:
        gated_NM = functional.grouped_mm(x_NH, up_EHM, offs=ends_E)
        inner_NF, activated_NF = swiglu_forward(gated_NM)
        ctx.save_for_backward(x_NH, up_EHM, down_EFH, ends_E, gated_NM, activated_NF, inner_NF)
        return functional.grouped_mm(inner_NF, down_EFH, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_NH, up_EHM, down_EFH, ends_E, gated_NM, activated_NF, inner_NF = ctx.saved_tensors
        grad_NH: Tensor = grad_outputs[0].contiguous()
        grad_x = grad_up = grad_down = None
        if ctx.needs_input_grad[2]:
            grad_down = _weight_gradient(inner_NF, grad_NH, ends_E)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad_NF = functional.grouped_mm(grad_NH, down_EFH.transpose(1, 2), offs=ends_E)
            grad_NM = swiglu_backward(grad_NF, gated_NM, activated_NF)
            if ctx.needs_input_grad[1]:
                grad_up = _weight_gradient(x_NH, grad_NM, ends_E)
            if ctx.needs_input_grad[0]:
                grad_x = functional.grouped_mm(grad_NM, up_EHM.transpose(1, 2), offs=ends_E)
        return grad_x, grad_up, grad_down, None


def _weight_gradient(x_NK: Tensor, grad_NM: Tensor, ends_E: Tensor) -> Tensor:
    grad_EKM = functional.grouped_mm(x_NK.t(), grad_NM, offs=ends_E)
    if grad_EKM.is_cuda and torch.cuda.get_device_capability(grad_EKM.device) >= _BLACKWELL:
        grad_EKM.masked_fill_(_is_empty(ends_E)[:, None, None], 0.0)
    return grad_EKM


def _is_empty(ends_E: Tensor) -> Tensor:
    """Whether an expert has no rows. On Blackwell the product leaves its gradient unwritten (pytorch issue 172439)."""
    return torch.diff(ends_E, prepend=torch.zeros_like(ends_E[:1])) == 0


def _batched_product(x_ECK: Tensor, weight_EKM: Tensor, bias_EM: Tensor | None) -> Tensor:
    if bias_EM is None:
        return torch.bmm(x_ECK, weight_EKM)
    return torch.baddbmm(bias_EM[:, None, :], x_ECK, weight_EKM)
