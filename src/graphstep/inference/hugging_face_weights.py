"""From the weights of a Hugging Face folder to those of the reference model.

Queries, keys and values lie below each other in one matrix, and so do gate and value of an MLP. Matrices of experts are
transposed. Files hold experts one by one, or all of a layer in one tensor.

Shapes: H hidden, F width inside an MLP or expert, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from graphstep.errors import CheckpointError, Problem
from graphstep.inference.hugging_face import HuggingFaceModel
from graphstep.inference.weight_files import WeightFiles
from graphstep.models import GPTModel

_FIX: Final = "take config.json and weights from the same place; nothing was loaded"


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the files, and the part of one of ours that it fills."""

    name: str
    target: Tensor
    """A view of ours, in the shape that the file's has."""


def check_hugging_face(model: GPTModel, described: HuggingFaceModel, files: WeightFiles, *, where: str) -> None:
    """Do the weights fit? Nothing is read of them but names, types and shapes.

    Args:
        model: built from ``described``; may be on the meta device.
        described: the model of the files.
        files: its weights.
        where: names them in errors.

    Raises:
        CheckpointError: weights that are missing, unknown or of other shapes; the first of them, and how many.
    """
    problems = list(_wrong_routers(described, files))
    if problems:  # The number of experts is wrong: all else would be, too, and it could be any number.
        raise CheckpointError([Problem("weights-mismatch", what, where, _FIX) for what in problems])
    parts = list(_parts(model, described, files))
    problems = [what for part in parts if (what := _misfit(part, files)) is not None]
    expected = {part.name for part in parts}
    unknown = [name for name in files if name not in expected and not _is_needless(name, described)]
    problems += [f"{name}: not known in this architecture" for name in unknown]
    if problems:
        shown = problems[:5] + ([f"... and {len(problems) - 5} more"] if len(problems) > 5 else [])
        raise CheckpointError([Problem("weights-mismatch", what, where, _FIX) for what in shown])


def fill_from_hugging_face(model: GPTModel, described: HuggingFaceModel, files: WeightFiles) -> None:
    """Copy all weights, after `check_hugging_face`."""
    with torch.no_grad():
        for part in _parts(model, described, files):
            part.target.copy_(files.tensor(part.name))


def has_own_head(files: WeightFiles) -> bool:
    """Is there an output matrix that differs from the embedding? Then transformers uses it, tied or not."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    return head in files and embedding in files and not torch.equal(files.tensor(head), files.tensor(embedding))


def _wrong_routers(described: HuggingFaceModel, files: WeightFiles) -> Iterator[str]:
    expected = (described.moe.num_experts, described.model.hidden_size)
    for number, has_experts in enumerate(described.layers_with_experts):
        for block in ("block_sparse_moe", "mlp") if has_experts else ():
            name = f"model.layers.{number}.{block}.gate.weight"
            if name in files and files.shape(name) != expected:
                yield f"{name}: expected {list(expected)}, found {list(files.shape(name))}"


def _misfit(part: _Part, files: WeightFiles) -> str | None:
    shape = tuple(part.target.shape)
    if part.name not in files:
        return f"{part.name}: expected {list(shape)}, found nothing"
    if files.shape(part.name) != shape:
        return f"{part.name}: expected {list(shape)}, found {list(files.shape(part.name))}"
    if files.dtype(part.name) is None:
        return f"{part.name}: its type is none that weights are computed with"
    return None


def _is_needless(name: str, described: HuggingFaceModel) -> bool:
    """Is this no weight, or a copy of one? Old files hold the frequencies of the rotation, and tied weights twice."""
    is_tied = not described.model.untie_embeddings_and_output_weights
    return name.endswith("rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")


def _parts(model: GPTModel, described: HuggingFaceModel, files: WeightFiles) -> Iterator[_Part]:
    yield _Part("model.embed_tokens.weight", model.embedding.weight.detach())
    yield _Part("model.norm.weight", model.get_parameter("head.norm.weight").detach())
    if model.head.weight is not None:
        yield _Part("lm_head.weight", model.head.weight.detach())
    config = described.model
    of_heads = tuple(rows * config.kv_channels for rows in (config.num_attention_heads, *[config.num_query_groups] * 2))
    for number, has_experts in enumerate(described.layers_with_experts):
        ours = {name: tensor.detach() for name, tensor in model.layers[number].named_parameters()}
        theirs = f"model.layers.{number}."
        mlp_norm = "moe_norm" if has_experts else "mlp_norm"
        yield _Part(f"{theirs}input_layernorm.weight", ours["attention_norm.weight"])
        yield _Part(f"{theirs}post_attention_layernorm.weight", ours[f"{mlp_norm}.weight"])
        attention = f"{theirs}self_attn."
        for kind in ("weight", "bias"):
            if f"attention.qkv.{kind}" in ours:
                names = [f"{attention}{letter}_proj.{kind}" for letter in "qkv"]
                yield from _below_each_other(names, ours[f"attention.qkv.{kind}"], of_heads)
            if f"attention.out.{kind}" in ours:
                yield _Part(f"{attention}o_proj.{kind}", ours[f"attention.out.{kind}"])
        if config.qk_layernorm:
            yield _Part(f"{attention}q_norm.weight", ours["attention.query_norm.weight"])
            yield _Part(f"{attention}k_norm.weight", ours["attention.key_norm.weight"])
        if has_experts:
            yield from _experts(theirs, ours, files)
            continue
        for kind in ("weight", "bias"):
            if f"mlp.up.{kind}" in ours:
                names = [f"{theirs}mlp.gate_proj.{kind}", f"{theirs}mlp.up_proj.{kind}"]
                yield from _below_each_other(names, ours[f"mlp.up.{kind}"], (config.ffn_hidden_size,) * 2)
                yield _Part(f"{theirs}mlp.down_proj.{kind}", ours[f"mlp.down.{kind}"])


def _below_each_other(names: Sequence[str], target: Tensor, rows: Sequence[int]) -> Iterator[_Part]:
    for name, (begin, end) in zip(names, pairwise(accumulate(rows, initial=0)), strict=True):
        yield _Part(name, target[begin:end])


def _experts(theirs: str, ours: dict[str, Tensor], files: WeightFiles) -> Iterator[_Part]:
    is_mixtral = f"{theirs}block_sparse_moe.gate.weight" in files
    block = f"{theirs}block_sparse_moe." if is_mixtral else f"{theirs}mlp."
    gate, value, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield _Part(f"{block}gate.weight", ours["moe.router.weight"])
    up_EMH = ours["moe.experts.up"].transpose(1, 2)  # M = 2F: gate, then value
    down_EHF = ours["moe.experts.down"].transpose(1, 2)
    if f"{block}experts.gate_up_proj" in files:
        yield _Part(f"{block}experts.gate_up_proj", up_EMH)
        yield _Part(f"{block}experts.down_proj", down_EHF)
        return
    inner = down_EHF.shape[2]
    for number in range(up_EMH.shape[0]):
        expert = f"{block}experts.{number}."
        yield from _below_each_other(
            [f"{expert}{gate}.weight", f"{expert}{value}.weight"], up_EMH[number], (inner, inner)
        )
        yield _Part(f"{expert}{down}.weight", down_EHF[number])
