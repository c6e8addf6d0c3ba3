"""From options to parts: everything that can be wrong is found here, before a run creates or changes anything."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphstep.checkpoint_folders import TRACKER, find_checkpoint, latest_iteration
from graphstep.config import Notice, RunConfig, TrainingConfig
from graphstep.config.captured import layers_with
from graphstep.config.layer_freq import print_layer_freq
from graphstep.errors import ConfigError, Problem, UserInputError
from graphstep.models import GPTModel
from graphstep.training.data import check_names
from graphstep.training.determinism import DETERMINISTIC_WORKSPACES, WORKSPACE_VARIABLE
from graphstep.training.files import unwritable_reason
from graphstep.training.logging import tensorboard_problem

_FREE_TO_CHANGE = ("seq_length", "attention_dropout", "hidden_dropout", "init_method_std")
_OF_EXPERTS = (
    "num_experts",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
"""What else belongs to the architecture of layers with experts; losses and capacities may change."""


def preflight(config: TrainingConfig, environment: Mapping[str, str] = os.environ) -> tuple[torch.device, Path | None]:
    """Check device, folders and files that the options name. Leaves nothing behind.

    Returns:
        The device, and the checkpoint folder to resume from, if any.

    Raises:
        UserInputError: with all problems.
    """
    problems: list[Problem] = []
    device = _device(config, problems)
    if config.deterministic_mode and device.type == "cuda":
        value = environment.get(WORKSPACE_VARIABLE)
        if value not in DETERMINISTIC_WORKSPACES:
            problems.append(
                Problem(
                    "deterministic-workspace",
                    f"cuBLAS is deterministic only with {WORKSPACE_VARIABLE} set, found {value!r}",
                    where="--deterministic-mode",
                    fix=f"export {WORKSPACE_VARIABLE}={DETERMINISTIC_WORKSPACES[0]}",
                )
            )
    outputs = (
        ("--save", config.save, True),
        ("--tensorboard-dir", config.tensorboard_dir, True),
        ("--log-jsonl", config.log_jsonl, False),
        ("--cuda-graph-report", config.cuda_graph_report, False),
        ("--cuda-graph-trace", config.cuda_graph_trace, False),
    )
    for option, value, is_folder in outputs:
        reason = None if value is None else unwritable_reason(Path(value), is_folder=is_folder)
        if reason is not None:
            kind = "folder" if is_folder else "file"
            problems.append(Problem("output-path", reason, where=option, fix=f"name a {kind} that can be written to"))
    if config.tensorboard_dir is not None and (missing := tensorboard_problem()) is not None:
        problems.append(missing)
    checkpoint: Path | None = None
    if config.load is not None:
        try:
            checkpoint = find_checkpoint(Path(config.load))
        except UserInputError as error:
            if not problems:
                raise
            problems += error.problems
    if problems:
        raise UserInputError(problems)
    return device, checkpoint


def preflight_with_data(
    config: RunConfig, environment: Mapping[str, str] = os.environ
) -> tuple[torch.device, Path | None]:
    """Do what :func:`preflight` does; when it fails, say what is wrong with the names of the data as well.

    Raises:
        UserInputError: with all problems.
    """
    try:
        return preflight(config.training, environment)
    except UserInputError as error:
        try:
            check_names(config.data)
        except UserInputError as other:
            raise UserInputError((*error.problems, *other.problems)) from error
        raise


def pointer_notice(config: TrainingConfig, iteration: int) -> str | None:
    """Return what to know before checkpoints go where a run that is further on has its own, or None.

    Args:
        config: names the folder.
        iteration: completed steps at the start.
    """
    if config.save is None or iteration >= config.train_iters:
        return None
    latest = latest_iteration(Path(config.save))
    if latest is None or latest <= iteration:
        return None
    return (
        f"--save {config.save} holds a run that is at iteration {latest}, and this one starts at {iteration}: from its "
        f"first checkpoint on, {TRACKER} points to this run (to go on with the other, add --load {config.save}; to "
        "keep it apart, name another folder)"
    )


def idle_options_notice(config: TrainingConfig, device: torch.device) -> str | None:
    """Return which options do nothing on a device, or None."""
    given = {"--compile": config.compile, "--parallel-weight-gradients": config.parallel_weight_gradients}
    idle = [option for option, is_given in given.items() if is_given and device.type != "cuda"]
    return f"{' and '.join(idle)} need a GPU and change nothing on this device" if idle else None


def finished_notice(config: TrainingConfig, iteration: int) -> Notice | None:
    """Return what to know about a checkpoint that has all the steps asked for, so that nothing is trained, or None.

    Args:
        config: says how many steps.
        iteration: completed steps of the checkpoint.
    """
    if iteration < config.train_iters:
        return None
    return Notice(
        "nothing-to-train",
        f"the checkpoint is at iteration {iteration} and --train-iters is {config.train_iters}: no step is left to "
        "train",
        "--load, --train-iters",
        f"steps count from the first one of all: to go on, use --train-iters {iteration + 1} or more",
    )


def architecture(config: RunConfig) -> dict[str, Any]:
    """Return what two runs must share to exchange weights: shapes alone do not show the number of heads, for one.

    What a model does not have is left out, so that checkpoints of before it could be had still fit.
    """
    model, moe, pattern = config.model, config.moe, config.layers.hybrid_layer_pattern
    found = {key: value for key, value in dataclasses.asdict(model).items() if key not in _FREE_TO_CHANGE}
    if not model.qk_layernorm:
        del found["qk_layernorm"]
    if pattern is not None:
        found["hybrid_layer_pattern"] = pattern
    if layers_with(config, "mamba"):
        found |= dataclasses.asdict(config.mamba) | {"mamba_num_heads": config.mamba.num_heads(model.hidden_size)}
    if moe.num_experts is not None and layers_with(config, "moe"):
        found |= {name: getattr(moe, name) for name in _OF_EXPERTS}
        found["moe_ffn_hidden_size"] = moe.moe_ffn_hidden_size or model.ffn_hidden_size
        if pattern is None:
            found["moe_layer_freq"] = print_layer_freq(moe.moe_layer_freq)
    return found


def with_vocabulary(config: RunConfig, tokenizer_size: int) -> RunConfig:
    """Return the configuration with the vocabulary of the model filled in.

    Args:
        config: ``model.vocab_size`` may be 0: then it becomes the padded size of the tokenizer.
        tokenizer_size: number of tokens that can occur.

    Raises:
        ConfigError: the model was told a smaller vocabulary.
    """
    size = config.model.vocab_size or config.data.padded_vocab_size(tokenizer_size)
    if size < tokenizer_size:
        raise ConfigError(
            Problem(
                "vocab-size",
                f"the tokenizer has {tokenizer_size} tokens, and the model only {size}: --vocab-size rounded up to a "
                f"multiple of {config.data.make_vocab_size_divisible_by}",
                where="--vocab-size",
                fix="leave it out to take the vocabulary of the tokenizer",
            )
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def build_model(config: RunConfig, *, device: torch.device) -> GPTModel:
    """Return a model whose initial weights depend on the seed only, in training mode.

    Args:
        config: with the vocabulary size filled in. Default generators are not touched: the seed is that of a generator
            of its own; bf16 parameters are rounded from those of fp32.
        device: where the parameters live.
    """
    return GPTModel(
        config.model,
        moe=config.moe,
        layers=config.layers,
        mamba=config.mamba,
        generator=torch.Generator().manual_seed(config.training.seed),
        device=device,
        dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
    )


def _device(config: TrainingConfig, problems: list[Problem]) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        problems.append(
            Problem(
                "device-missing",
                "PyTorch sees no CUDA device",
                where="--device cuda",
                fix="leave --device out to train on the CPU, or install a CUDA build of PyTorch",
            )
        )
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
