"""Switches of the process that choose kernels: those of attention, cuBLAS and cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import call
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphstep.engine import torch_private

_ATTENTION_BACKENDS: Final[tuple[torch_private.Switch, ...]] = (
    *torch_private.switch("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    *torch_private.switch("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    *torch_private.switch("_get_math_sdp_enabled", "_set_sdp_use_math"),
    *torch_private.switch("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    *torch_private.switch("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
)
_ATTENTION_ORDER: Final = torch_private.switch("_get_sdp_priority_order", "_set_sdp_priority_order")
_CUDNN_ROUNDING: Final = torch_private.switch("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32")
_BACKEND_FLAGS: Final[tuple[torch_private.Switch, ...]] = tuple(
    found
    for name in (
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation",
        "cudnn_deterministic",
        "cudnn_enabled",
        "cudnn_benchmark",
    )
    for found in torch_private.switch(f"_get_{name}", f"_set_{name}")
)
_READ_ATTENTION: Final = tuple(get for get, _ in _ATTENTION_BACKENDS)
_READ_FLAGS: Final = tuple(get for get, _ in (*_CUDNN_ROUNDING, *_BACKEND_FLAGS))


def attention_backends() -> tuple[Any, ...]:
    """Which kernels ``scaled_dot_product_attention`` may use now, and their order; empty where torch does not tell."""
    found = tuple(map(call, _READ_ATTENTION))
    return (*found, tuple(_ATTENTION_ORDER[0][0]())) if _ATTENTION_ORDER else found


def settle_attention_order(device: torch.device) -> None:
    """Have torch set its order of attention kernels for a GPU now: it does so at the process's first attention call.

    Otherwise the order would change between the first warmup and the first capture, as if the user had changed it.
    Nothing is launched but the making of one tiny tensor.
    """
    with torch.autocast(device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):  # One that any user can have.
        torch_private.choose_attention(*[torch.zeros(1, 1, 8, 8, device=device)] * 3)


def set_attention_backends(values: Sequence[Any]) -> None:
    """Put them back to what :func:`attention_backends` has told."""
    if _ATTENTION_ORDER:
        *values, order = values
        _ATTENTION_ORDER[0][1](list(order))
    for (_, put), value in zip(_ATTENTION_BACKENDS, values, strict=True):
        put(value)


def backend_flags() -> tuple[Any, ...]:
    """What else chooses kernels: roundings and sums of cuBLAS and cuDNN, which algorithms. Cost: 0.3 microseconds."""
    try:
        return tuple(map(call, _READ_FLAGS))
    except RuntimeError:  # One was set through the newer interface; the older one then refuses to answer.
        cudnn: Any = torch.backends.cudnn
        rounding = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
        return (rounding, *[get() for get, _ in _BACKEND_FLAGS])


def readers(attention: Sequence[Any], flags: Sequence[Any]) -> list[tuple[Callable[[], Any], Any]] | None:
    """For these values of both: what reads each switch, and its value. ``None`` if they cannot be read one by one."""
    num_backends = len(_READ_ATTENTION)
    if len(attention) != num_backends + bool(_ATTENTION_ORDER) or any(isinstance(flag, tuple) for flag in flags[:1]):
        return None
    found: list[tuple[Callable[[], Any], Any]] = list(zip(_READ_ATTENTION, attention, strict=False))
    found += [(_ATTENTION_ORDER[0][0], list(attention[num_backends]))] if _ATTENTION_ORDER else []
    return found + list(zip(_READ_FLAGS, flags, strict=True))


def set_backend_flags(values: Sequence[Any]) -> None:
    """Put them back to what :func:`backend_flags` has told."""
    if _CUDNN_ROUNDING:
        rounding, *values = values
        if isinstance(rounding, tuple):
            cudnn: Any = torch.backends.cudnn
            cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = rounding
        elif backend_flags()[0] != rounding:
            _CUDNN_ROUNDING[0][1](rounding)
    for (get, put), value in zip(_BACKEND_FLAGS, values, strict=True):
        if get() != value:
            put(*value) if isinstance(value, tuple) else put(value)
