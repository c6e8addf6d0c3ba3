"""Sample inputs for ATen operations: what they take is described here and made, in several layouts, by the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Spec:
    """A tensor argument: floats, positive floats, integers below ``high``, bools, or complex numbers."""

    kind: str
    shape: tuple[int, ...]
    high: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Sample:
    """One call."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec("floats", shape, dtype=dtype)


def positive(*shape: int) -> Spec:
    return Spec("positive", shape)


def ints(*shape: int, high: int) -> Spec:
    return Spec("ints", shape, high, torch.int64)


def bools(*shape: int) -> Spec:
    return Spec("bools", shape, dtype=torch.bool)


def complexes(*shape: int) -> Spec:
    return Spec("complexes", shape, dtype=torch.complex64)


def sample(name: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(name, args, kwargs)


X = floats(3, 4)
HALF = floats(3, 4, dtype=torch.bfloat16)
POINTWISE = (
    *("abs", "neg", "exp", "sin", "cos", "tanh", "sigmoid", "relu", "silu", "hardswish", "mish", "erf", "floor"),
    *("round", "sign", "trunc", "frac", "reciprocal", "isnan", "isinf", "square", "positive", "logical_not", "sgn"),
    *("exp2", "expm1", "atan", "sinh", "relu6", "softplus", "hardtanh", "gelu", "log_sigmoid_forward", "elu"),
)
POSITIVE = ("log", "log2", "log1p", "sqrt", "rsqrt", "lgamma", "digamma")
PAIRS = (
    *(
        "add.Tensor",
        "sub.Tensor",
        "mul.Tensor",
        "div.Tensor",
        "maximum",
        "minimum",
        "atan2",
        "fmod.Tensor",
        "eq.Tensor",
    ),
    *("gt.Tensor", "logical_and", "hypot", "copysign.Tensor", "remainder.Tensor", "nextafter", "rsub.Tensor"),
    *(
        "fmax",
        "sigmoid_backward",
        "tanh_backward",
        "silu_backward",
        "gelu_backward",
        "mse_loss",
        "smooth_l1_loss",
        "dist",
    ),
)

SAMPLES: tuple[Sample, ...] = (
    *(sample(name, X) for name in POINTWISE),
    *(sample(name, positive(3, 4)) for name in POSITIVE),
    *(sample(name, X, X) for name in PAIRS),
    *(sample(name, HALF) for name in ("exp", "gelu", "silu", "sum", "mean", "rsqrt")),
    *(sample(name, HALF, HALF) for name in ("add.Tensor", "mul.Tensor", "div.Tensor")),
    # broadcasting, scalars, types
    sample("add.Tensor", X, floats(4), alpha=2),
    sample("mul.Tensor", floats(3, 1), floats(4)),
    sample("mul.Tensor", X, floats(3, 4, dtype=torch.float64)),
    sample("mul.Tensor", HALF, floats()),
    sample("add.Tensor", X, ints(3, 4, high=5)),
    sample("div.Tensor", ints(3, 4, high=5), floats()),
    sample("div.Tensor_mode", X, positive(3, 4), rounding_mode="floor"),
    sample("add.Scalar", X, 2.5),
    sample("mul.Scalar", ints(3, high=5), 2.5),
    sample("pow.Tensor_Scalar", X, 3),
    sample("pow.Scalar", 2.0, X),
    sample("pow.Tensor_Tensor", positive(3, 4), X),
    sample("rsub.Scalar", X, 1.0),
    sample("bitwise_and.Tensor", ints(3, high=9), ints(3, high=9)),
    sample("bitwise_not", ints(3, high=9)),
    sample("clamp", X, -0.5, 0.5),
    sample("clamp.Tensor", X, floats(4), None),
    sample("where.self", bools(3, 4), X, floats(4)),
    sample("where.ScalarOther", bools(3, 4), X, 2.0),
    sample("masked_fill.Scalar", X, bools(3, 4), -1e9),
    sample("masked_fill.Tensor", X, bools(3, 4), floats()),
    sample("masked_scatter", X, bools(3, 4), floats(12)),
    sample("lerp.Scalar", X, X, 0.3),
    sample("lerp.Tensor", X, X, X),
    sample("addcmul", X, X, X, value=0.5),
    sample("addcdiv", X, X, positive(3, 4)),
    sample("polar", positive(3), floats(3)),
    sample("nan_to_num", X, 0.0),
    sample("threshold_backward", X, X, 0),
    sample("leaky_relu", X, 0.1),
    sample("glu", X, 1),
    sample("_to_copy", X, dtype=torch.float64),
    sample("_to_copy", X, dtype=torch.bfloat16),
    sample("_to_copy", ints(3, high=5), dtype=torch.float32),
    sample("to.dtype", X, torch.float16),
    sample("clone", X),
    sample("clone", X, memory_format=torch.contiguous_format),
    # reductions and scans
    *(sample(name, X, [1]) for name in ("sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp")),
    *(sample(name, X, 1) for name in ("max.dim", "min.dim", "argmax", "argmin", "median.dim", "any.dim", "all.dim")),
    *(sample(name, X, 0) for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "mode")),
    *(
        sample(name, X)
        for name in ("sum", "mean", "max", "min", "prod", "argmax", "median", "aminmax", "count_nonzero")
    ),
    sample("sum.dim_IntList", X, [0], True, dtype=torch.float64),
    sample("sum.dim_IntList", HALF, [1], dtype=torch.float32),
    sample("cumsum", HALF, 1, dtype=torch.float32),
    sample("prod.dim_int", X, 1),
    sample("var.correction", X, [1], correction=1),
    sample("var_mean.correction", X, [1], correction=0, keepdim=True),
    sample("std.correction", X, None, correction=1),
    sample("linalg_vector_norm", X, 2, [1]),
    sample("norm.ScalarOpt_dim", X, 2, [0]),
    sample("norm.Scalar", X, 2),
    sample("trace", floats(4, 4)),
    sample("histc", X, 4, -1, 1),
    sample("bucketize.Tensor", X, sample("sort", floats(4)).args[0]),
    # order and index
    sample("sort", X, 1, True),
    sample("sort.stable", X, stable=True, dim=0),
    sample("topk", X, 2, 1, False),
    sample("kthvalue", X, 2, 1),
    sample("argsort", X, 1),
    sample("gather", X, 1, ints(3, 2, high=4)),
    sample("scatter.src", X, 1, ints(3, 1, high=4), X),
    sample("scatter.value", X, 1, ints(3, 1, high=4), 2.5),
    sample("scatter_add", X, 1, ints(3, 2, high=4), X),
    sample("scatter_reduce.two", X, 1, ints(3, 2, high=4), X, "amax"),
    sample("index.Tensor", X, [ints(2, high=3)]),
    sample("index.Tensor", X, [None, ints(2, 2, high=4)]),
    sample("index_put", X, [ints(2, high=3)], floats(4)),
    sample("index_put", X, [ints(2, high=3)], floats(2, 4), True),
    sample("index_select", X, 1, ints(5, high=4)),
    sample("index_add", X, 0, ints(2, high=3), floats(2, 4)),
    sample("index_copy", X, 0, ints(1, high=3), floats(1, 4)),
    sample("index_fill.int_Scalar", X, 0, ints(2, high=3), 1.5),
    sample("take", X, ints(2, 2, high=12)),
    sample("embedding", X, ints(2, 3, high=3)),
    sample("embedding_dense_backward", floats(2, 3, 4), ints(2, 3, high=5), 5, 1, False),
    sample("repeat_interleave.Tensor", ints(1, high=1), output_size=0),
    # shape, with copies
    sample("cat", [X, floats(1, 4), floats(0)], 0),
    sample("cat", [X, HALF], 1),
    sample("stack", [X, X], 1),
    sample("constant_pad_nd", X, [1, 2], 3.0),
    *(sample(name, X, 1) for name in ("tril", "triu", "diag_embed")),
    sample("flip", X, [1]),
    sample("roll", X, [1], [1]),
    sample("repeat", X, [2, 1]),
    sample("split_with_sizes_copy", X, [1, 3], 1),
    sample("unbind_copy.int", X),
    sample("expand_copy", floats(3, 1), [3, 4]),
    sample("permute_copy", X, [1, 0]),
    sample("unfold_backward", floats(3, 2, 2), [3, 4], 1, 2, 2),
    sample("select_backward", floats(4), [3, 4], 0, 1),
    sample("slice_backward", floats(2, 4), [3, 4], 0, 1, 3, 1),
    sample("_unsafe_view", floats(12), [12]),
    # made from nothing or from shapes only
    *(sample(name, X) for name in ("zeros_like", "ones_like", "empty_like")[:2]),
    sample("full_like", X, 2.5),
    sample("full", [2, 2], 3, dtype=torch.float64),
    sample("zeros", [2, 2]),
    sample("arange.start_step", 1, 9, 2),
    sample("arange", 4, dtype=torch.float32),
    sample("linspace", 0, 1, 5),
    sample("eye", 3),
    sample("scalar_tensor", 2.5),
    sample("new_zeros", X, [3]),
    sample("tril_indices", 3, 3),
    # matrices
    sample("mm", X, floats(4, 5)),
    sample("mm", HALF, floats(4, 5, dtype=torch.bfloat16)),
    sample("addmm", floats(5), X, floats(4, 5), beta=0.5, alpha=2),
    sample("addmm", floats(3, 5), X, floats(4, 5)),
    sample("mv", X, floats(4)),
    sample("dot", floats(4), floats(4)),
    sample("bmm", floats(2, 3, 4), floats(2, 4, 5)),
    sample("baddbmm", floats(2, 3, 5), floats(2, 3, 4), floats(2, 4, 5)),
    sample("addmv", floats(3), X, floats(4)),
    sample("addr", X, floats(3), floats(4)),
    sample("_cdist_forward", X, floats(2, 4), 2.0, None),
    sample("linalg_cholesky_ex", floats(3, 3)),
    sample("linalg_inv_ex", floats(3, 3)),
    sample("_linalg_svd", floats(3, 3)),
    sample("linalg_qr", floats(3, 3)),
    sample("_linalg_solve_ex", floats(3, 3), floats(3, 2)),
    sample("linalg_lu_factor_ex", floats(3, 3)),
    # networks
    sample("_softmax", X, -1, False),
    sample("_softmax", HALF, 0, False),
    sample("_log_softmax", X, 0, False),
    sample("_softmax_backward_data", X, X, -1, torch.float32),
    sample("_log_softmax_backward_data", X, X, -1, torch.float32),
    sample("native_layer_norm", X, [4], floats(4), floats(4), 1e-5),
    sample("native_layer_norm", HALF, [4], None, None, 1e-5),
    sample(
        "native_layer_norm_backward", X, X, [4], floats(3, 1), positive(3, 1), floats(4), None, [True, False, False]
    ),
    sample("native_layer_norm_backward", X, X, [4], floats(3, 1), positive(3, 1), floats(4), floats(4), [True] * 3),
    sample("_fused_rms_norm", X, [4], floats(4), 1e-5),
    sample("native_group_norm", floats(2, 4, 3), floats(4), floats(4), 2, 4, 3, 2, 1e-5),
    sample("native_batch_norm", X, floats(4), floats(4), None, None, True, 0.1, 1e-5),
    sample("native_batch_norm", X, floats(4), None, floats(4), positive(4), False, 0.1, 1e-5),
    sample("convolution", floats(1, 2, 6), floats(3, 2, 3), floats(3), [1], [1], [1], False, [0], 1),
    sample("convolution", floats(1, 2, 5, 5), floats(3, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
    sample(
        *("convolution_backward", floats(1, 3, 6), floats(1, 2, 6), floats(3, 2, 3), [3], [1], [1], [1], False, [0], 1),
        [True, True, False],
    ),
    sample("max_pool2d_with_indices", floats(1, 2, 4, 4), [2, 2]),
    sample("avg_pool2d", floats(1, 2, 4, 4), [2, 2]),
    sample("_adaptive_avg_pool2d", floats(1, 2, 4, 4), [3, 3]),
    sample("upsample_nearest2d", floats(1, 2, 3, 3), [5, 5]),
    sample("upsample_bilinear2d", floats(1, 2, 3, 3), [5, 5], False),
    sample("nll_loss_forward", X, ints(3, high=4), None, 1, -100),
    sample("nll_loss_backward", floats(), X, ints(3, high=4), None, 1, -100, positive()),
    sample("binary_cross_entropy_with_logits", X, X),
    sample("huber_loss", X, X),
    sample("_scaled_dot_product_flash_attention_for_cpu", *[floats(1, 2, 3, 8)] * 3, 0.0, True),
    sample("_embedding_bag", X, ints(4, high=3), ints(1, high=1)),
    sample("gelu_backward", X, X, approximate="tanh"),
    # complex and spectral
    sample("mul.Tensor", complexes(3, 4), complexes(3, 4)),
    *(sample(name, complexes(3, 4)) for name in ("abs", "angle", "conj_physical", "sgn", "view_as_real_copy", "exp")),
    sample("mm", complexes(3, 4), complexes(4, 2)),
    sample("complex", X, X),
    sample("_fft_c2c", complexes(3, 4), [1], 0, True),
    sample("_fft_r2c", X, [1], 0, True),
    sample("_fft_c2r", complexes(3, 4), [1], 0, 6),
    # lists
    sample("_foreach_add.Scalar", [X, floats(2)], 1.5),
    sample("_foreach_mul.List", [X, floats(2)], [X, floats(2)]),
    sample("_foreach_norm.Scalar", [X, floats(2)], 2),
    sample("_foreach_sqrt", [positive(3), positive(2)]),
    # no elements
    sample("sum.dim_IntList", floats(0, 4), [0]),
    sample("mm", floats(0, 4), floats(4, 3)),
    sample("mm", floats(3, 0), floats(0, 4)),
    sample("add.Tensor", floats(0), floats(1)),
    sample("native_layer_norm", floats(0, 4), [4], floats(4), floats(4), 1e-5),
    sample("sort", floats(0, 4), 1),
)
