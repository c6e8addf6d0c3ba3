"""The switches that say what is captured and how: Megatron-LM's names and values.

Source of names and meaning: Megatron-LM's options ``--cuda-graph-impl``, ``--cuda-graph-modules`` and
``--inference-cuda-graph-scope``. Those of policies, signatures, merging and
debugging are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from graphstep.config.derived import complete_modules
from graphstep.config.validation import module_words, settle, to_member


class CudaGraphImpl(StrEnum):
    """How a training iteration is captured."""

    none = "none"
    """Eager: nothing is captured."""
    local = "local"
    """One pair of graphs a layer or module; the order of capture is observed during the first real step."""
    transformer_engine = "transformer_engine"
    """One pair of graphs a layer or module and microbatch; the order is computed from the pipeline schedule."""
    full_iteration = "full_iteration"
    """One graph for forward and backward of all microbatches, another one for validation."""


class CudaGraphModule(StrEnum):
    """A part of a layer that can be captured by name. None named means: whole layers."""

    attn = "attn"
    mlp = "mlp"
    moe = "moe"
    moe_router = "moe_router"
    moe_preprocess = "moe_preprocess"
    mamba = "mamba"


class InferenceCudaGraphScope(StrEnum):
    """What one inference graph covers."""

    none = "none"
    """No inference graphs."""
    layer = "layer"
    """One graph a layer."""
    block = "block"
    """One graph for the whole model."""


class CapturePolicy(StrEnum):
    """Whether regions are captured, and what becomes of one that cannot be."""

    off = "off"
    """Nothing is captured."""
    auto = "auto"
    """What cannot be captured runs eagerly, with a warning and the reason in the report."""
    required = "required"
    """What cannot be captured is an error."""


class MismatchPolicy(StrEnum):
    """What happens when a region is called with inputs that none of its graphs was captured for."""

    error = "error"
    """An error with all differences."""
    eager = "eager"
    """The call runs eagerly, and is counted in the report."""
    recapture = "recapture"
    """The call runs eagerly, and inputs like these are captured as well once enough steps have had them."""


GRAPH_OPTION_NAMES: Mapping[str, str] = {
    "impl": "cuda_graph_impl",
    "modules": "cuda_graph_modules",
    "inference_scope": "inference_cuda_graph_scope",
    "warmup_steps": "cuda_graph_warmup_steps",
    "use_single_mempool": "cuda_graph_use_single_mempool",
    "retain_backward_graph": "cuda_graph_retain_backward_graph",
    "optimizer": "optimizer_cuda_graph",
    "policy": "cuda_graph_policy",
    "on_mismatch": "cuda_graph_on_mismatch",
    "capture_after": "cuda_graph_capture_after",
    "max_signatures": "cuda_graph_max_signatures",
    "merge_layers": "cuda_graph_merge_layers",
    "debug": "cuda_graph_debug",
}
"""Field of ``CudaGraphConfig`` -> name of its option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaGraphConfig:
    """What is captured, and how. Plain strings are accepted for the enums.

    Raises:
        ConfigError: an unknown word, or values out of range (all of these at once).
    """

    impl: CudaGraphImpl = CudaGraphImpl.none
    """The strategy."""
    modules: tuple[CudaGraphModule, ...] = ()
    """Parts of a layer to capture, without repeats; empty: whole layers. Always empty for ``full_iteration``; ``local``
    completes ``moe_router`` and ``moe_preprocess`` with each other."""
    inference_scope: InferenceCudaGraphScope | None = None
    """What an inference graph covers, never ``None`` once built: ``layer`` for ``local``, which can have ``block``;
    ``none`` for every other implementation."""
    warmup_steps: int = 3
    """Eager steps before the capture, >= 0; with ``local``, eager runs of each part just before its capture. With 0 the
    libraries set themselves up inside the capture: discouraged."""
    use_single_mempool: bool = True
    """Training and validation graph of ``full_iteration`` and the optimizer graph share one memory pool."""
    retain_backward_graph: bool = False
    """Keep the autograd graph alive while a backward is captured (``local``, ``transformer_engine``), for modules that
    run a second backward."""
    optimizer: bool = False
    """Capture the optimizer step as well."""
    policy: CapturePolicy = CapturePolicy.required
    """What becomes of a region that cannot be captured. Used by ``local``, ``full_iteration`` and the optimizer graph;
    ``transformer_engine`` takes ``auto`` for ``required``."""
    on_mismatch: MismatchPolicy = MismatchPolicy.recapture
    """What is done with inputs of another signature than those captured. A signature is the shapes, types and devices
    of the tensors, the other arguments, and the modes: training, gradients, autocast. ``transformer_engine``, which
    captures once, takes ``recapture`` for ``eager``."""
    capture_after: int = 2
    """Steps in which ``local`` must see a further signature before it captures it, >= 1; with ``recapture`` only. The
    signatures of the observed first step need no second one."""
    max_signatures: int = 8
    """Signatures that a region keeps graphs for, >= 1; beyond them the least used one is evicted by ``local``, and
    further ones run eagerly with ``transformer_engine``. Of ``full_iteration``: graphs in all, and 2 if it is 1, as
    training and validation have one each."""
    merge_layers: int = 1
    """Neighbouring captured layers that ``local`` and ``transformer_engine`` launch as one graph, >= 0; 0: as many as
    can be."""
    debug: bool = False
    """Let ``local`` and ``transformer_engine`` poison static memory at its planned death and check addresses before
    every replay: slow, for finding reads of tensors that are no longer valid."""

    def __post_init__(self) -> None:
        impl = to_member(CudaGraphImpl, self.impl, "cuda_graph_impl")
        scope = self.inference_scope
        if scope is not None:
            scope = to_member(InferenceCudaGraphScope, scope, "inference_cuda_graph_scope")
        words = complete_modules(impl, module_words(self.modules))
        modules = tuple(to_member(CudaGraphModule, word, "cuda_graph_modules") for word in words)
        policy = to_member(CapturePolicy, self.policy, "cuda_graph_policy")
        on_mismatch = to_member(MismatchPolicy, self.on_mismatch, "cuda_graph_on_mismatch")
        object.__setattr__(self, "impl", impl)
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "on_mismatch", on_mismatch)
        object.__setattr__(self, "modules", modules)
        object.__setattr__(self, "inference_scope", default_inference_scope(impl) if scope is None else scope)
        settle(self, GRAPH_OPTION_NAMES)

    @property
    def captures_training(self) -> bool:
        """Is anything of training to be captured: layers, steps or the optimizer?"""
        is_asked = self.impl is not CudaGraphImpl.none or self.optimizer
        return is_asked and self.policy is not CapturePolicy.off

    def options(self) -> Mapping[str, Any]:
        """Return the values under the names of their options, as the rules know them."""
        return {option: getattr(self, name) for name, option in GRAPH_OPTION_NAMES.items()}


def default_inference_scope(impl: str) -> InferenceCudaGraphScope:
    """Return what inference graphs cover when nothing is said: a layer for ``local``, nothing for the others."""
    return InferenceCudaGraphScope.layer if impl == "local" else InferenceCudaGraphScope.none
