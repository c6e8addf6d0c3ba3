"""The modes around a call that change what it computes: compared at each call, and entered for a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from graphstep.engine import kernel_switches
from graphstep.errors import CaptureError

_PRECISIONS: Final = ("highest", "high", "medium")
_OF_THE_PROCESS: Final = (
    "deterministic",
    "matmul_precision",
    "default_dtype",
    "attention_backends",
    "backend_flags",
)


@dataclass(frozen=True, slots=True)
class AmbientState:
    """Modes that change what the same call computes."""

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[bool, torch.dtype, bool]
    """Enabled, dtype, weight cache."""
    deterministic: bool
    matmul_precision: str
    default_dtype: torch.dtype
    attention_backends: tuple[Any, ...] = ()
    """Which kernels ``scaled_dot_product_attention`` may use, and in which order they are tried."""
    backend_flags: tuple[Any, ...] = ()
    """Switches of cuBLAS and cuDNN: see :func:`kernel_switches.backend_flags`."""

    @classmethod
    def now(cls, device_type: str) -> AmbientState:
        """The modes of this thread at this moment."""
        grad, inference, enabled, dtype, cache, *others = ambient_key(device_type)
        return cls(grad, inference, (enabled, dtype, cache), *others)

    @property
    def key(self) -> tuple[Any, ...]:
        """The same as :func:`ambient_key` gave at that moment."""
        return (
            self.grad_enabled,
            self.inference_mode,
            *self.autocast,
            self.deterministic,
            self.matmul_precision,
            self.default_dtype,
            self.attention_backends,
            self.backend_flags,
        )

    @contextmanager
    def entered(self, device_type: str) -> Iterator[None]:
        """Run the body under these modes, all but inference mode.

        Raises:
            CaptureError: a switch of a library cannot be set back to what it was.
        """
        enabled, dtype, cache = self.autocast
        differs = self.of_the_process() != AmbientState.now(device_type).of_the_process()
        with (
            self._switched(device_type) if differs else nullcontext(),
            torch.set_grad_enabled(self.grad_enabled),
            torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache),
        ):
            yield

    def of_the_process(self) -> dict[str, Any]:
        """Switches that are not this thread's alone."""
        return {name: getattr(self, name) for name in _OF_THE_PROCESS}

    @contextmanager
    def _switched(self, device_type: str) -> Iterator[None]:
        before = AmbientState.now(device_type)
        try:
            self._switch()
            now, wanted = AmbientState.now(device_type).of_the_process(), self.of_the_process()
            wrong = [f"{name} was {value}, is {now[name]}" for name, value in wanted.items() if now[name] != value]
            if wrong:
                raise CaptureError(
                    f"switches cannot be set to what they were in the observed call: {'; '.join(wrong)}",
                    fix="set them once, before the first step",
                )
            yield
        finally:
            before._switch()

    def _switch(self) -> None:
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(self.deterministic, warn_only=only_warns)
        if _matmul_precision() != self.matmul_precision:
            if self.matmul_precision in _PRECISIONS:
                torch.set_float32_matmul_precision(self.matmul_precision)
            else:
                torch.backends.cuda.matmul.fp32_precision = self.matmul_precision
        torch.set_default_dtype(self.default_dtype)
        kernel_switches.set_attention_backends(self.attention_backends)
        kernel_switches.set_backend_flags(self.backend_flags)


def ambient_key(device_type: str) -> tuple[Any, ...]:
    """The modes of this thread at this moment, to be compared. Cost: about 1.5 microseconds."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        _matmul_precision(),
        torch.get_default_dtype(),
        kernel_switches.attention_backends(),
        kernel_switches.backend_flags(),
    )


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # Set through the newer interface; the older one then refuses to answer.
        return str(torch.backends.cuda.matmul.fp32_precision)
