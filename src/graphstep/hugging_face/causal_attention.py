"""Causal attention without a mask, for whole steps of models of transformers as one graph.

With its own implementations, transformers looks into masks and positions on the host to find out whether a mask is
needed, and makes one in any case while it is captured: the graph then runs other kernels than the eager step, and
slower ones. This implementation is the same scaled dot-product attention, always causal and never with a mask.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from graphstep.errors import ConfigError, InputMismatchError, Problem

NAME: Final = "graphstep_causal"
"""Of the implementation, in the registry of transformers."""


def use_causal_attention(model: Any) -> None:
    """Have a model attend to all that is before, without a mask. ``model.set_attn_implementation("sdpa")`` undoes it.

    For batches without padding, or with padding at the end whose labels are -100, and with one sequence in each row.
    Positions are not looked at to find out whether there are several. A mask of padding is refused where the model
    trains, and elsewhere if it masks something; a mask with four dimensions is used as it is.

    Raises:
        ConfigError: the model has layers with a sliding window, or others that need their mask.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "sliding_window", None) is not None or kinds - {"full_attention"}:
        raise ConfigError(
            Problem(
                "attention-needs-mask",
                f"{type(model).__name__} has layers with a sliding window, or of the kinds {', '.join(sorted(kinds))}, "
                "whose attention is not plainly causal",
                "use_causal_attention",
                "keep its own implementation of attention",
            )
        )
    AttentionInterface.register(NAME, sdpa_attention_forward)
    model.set_attn_implementation(NAME)
    model.register_forward_pre_hook(_refuse_mask, with_kwargs=True)


def _refuse_mask(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    mask = named.get("attention_mask")
    if getattr(getattr(module, "config", None), "_attn_implementation", NAME) != NAME or not torch.is_tensor(mask):
        return
    if mask.dim() == 4 or (not torch.is_grad_enabled() and bool(mask.all())):
        return
    raise InputMismatchError(
        f"a mask of padding, {tuple(mask.shape)}, was given to attention that uses none",
        where="attention_mask",
        fix="leave it out if it masks nothing, or only what is behind the last label; else "
        "model.set_attn_implementation('sdpa')",
    )
