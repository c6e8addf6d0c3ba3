"""Small configurations, models and batches for the tests of the reference GPT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphstep.config.model import ModelConfig
from graphstep.models import GPTModel

TINY = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=48,
    seq_length=12,
    max_position_embeddings=16,
    vocab_size=40,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)

GPT2 = TINY
LLAMA = replace(
    TINY,
    num_query_groups=2,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_model(config: ModelConfig = TINY, *, seed: int = 7, **options: Any) -> GPTModel:
    return GPTModel(config, generator=seeded(seed), **options)


def tiny_batch(config: ModelConfig = TINY, *, seed: int = 11, batch: int = 2) -> dict[str, Tensor]:
    drawn = torch.randint(config.vocab_size, (batch, config.seq_length + 1), generator=seeded(seed))
    return {"tokens_BS": drawn[:, :-1].contiguous(), "labels_BS": drawn[:, 1:].contiguous()}


def gradients(model: torch.nn.Module) -> Mapping[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = not (func.is_view or func.overloadpacket._qualified_op_name in _WITHOUT_KERNEL)
        if kernel:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


_WITHOUT_KERNEL = frozenset(
    f"aten::{name}" for name in ("detach", "empty", "empty_like", "new_empty", "_unsafe_view", "lift_fresh")
)


@contextmanager
def logged_kernels() -> Iterator[list[str]]:
    """Names of the ATen operations that work on data, views and allocations left out, in order."""
    with _Log() as log:
        yield log.names
