"""Checkpoints of training, loaded for inference."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tests.inference.generation import build_engine, reference

from graphstep.config import from_argv
from graphstep.errors import CheckpointError
from graphstep.inference.load import load_model
from graphstep.inference.requests import SamplingParams
from graphstep.training.loop import Trainer

_SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 2 "
    "--eval-iters 0 --device cpu --mock-data"
)
_KINDS = {
    "gpt": "",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "norms of queries and keys": "--qk-layernorm",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1] --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid",
    "hybrid": "--hybrid-layer-pattern M*-M --mamba-num-groups 1 --mamba-state-dim 16 --mamba-head-dim 16",
    "bf16": "--bf16",
}


def train(kind: str, folder: Path) -> Trainer:
    """Train two steps and save."""
    words = shlex.split(f"{_SIZES} {_KINDS[kind]}")
    if kind == "hybrid":
        del words[:2]  # the pattern gives the number of layers
    config = from_argv([*words, "--save", str(folder)], {}, for_training=True)
    with Trainer(config, console=Console(quiet=True)) as trainer:
        trainer.train()
        return trainer


@pytest.mark.parametrize("kind", _KINDS)
def test_the_model_is_the_one_that_was_trained(kind: str, tmp_path: Path) -> None:
    trained = train(kind, tmp_path).model.eval()
    loaded = load_model(tmp_path)
    assert loaded.folder == tmp_path / "iter_0000002"
    assert loaded.tokenizer is None
    assert not loaded.model.training
    expected = trained.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype is expected[name].dtype
    x = torch.randint(0, 257, (2, 12))
    with torch.no_grad():
        assert torch.equal(loaded.model(x), trained(x))


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
@pytest.mark.parametrize("kind", ["gpt", "norms of queries and keys", "experts", "hybrid"])
def test_generation_equals_the_training_forward(kind: str, scope: str, tmp_path: Path) -> None:
    train(kind, tmp_path)
    model = load_model(tmp_path).model
    prompt, sampling = [10, 20, 30], SamplingParams(max_new_tokens=8, temperature=0.8, seed=3)
    with build_engine(model, scope) as engine:
        [request] = engine.generate([prompt], sampling)
    assert request.output_tokens == reference(model, prompt, sampling)


def test_a_folder_of_one_checkpoint(tmp_path: Path) -> None:
    train("gpt", tmp_path)
    assert load_model(tmp_path / "iter_0000002").folder == tmp_path / "iter_0000002"


def test_another_type(tmp_path: Path) -> None:
    train("bf16", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32).model
    saved = load_file(tmp_path / "iter_0000002" / "model.safetensors")
    assert torch.equal(model.embedding.weight, saved["embedding.weight"].float())


def rewritten(folder: Path, **changes: Any) -> None:
    path = folder / "iter_0000002" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": 7}, "expected format 1, found format 7"),
        ({"config": {}}, "configuration of the run is missing"),
        ({"config": {"model": {"num_layers": 2, "new_option": 1}}}, "new_option"),
        ({"config": {"model": {"num_layers": -2}}}, "num-layers"),
        ({"config": {"model": {}, "moe": []}}, "no object"),
        ({"config": {"model": {"num_layers": 1}}}, "hidden_size|expected"),
        ({"config": {"model": {}, "moe": {"moe_router_load_balancing_type": None}}}, "no such value"),
        ({"config": {"model": {"num_layers": 2**31}}}, "2147483648 layers in the configuration"),
    ],
)
def test_a_damaged_state(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    train("gpt", tmp_path)
    rewritten(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=what):
        load_model(tmp_path)


def test_weights_of_another_type(tmp_path: Path) -> None:
    train("gpt", tmp_path)
    path = tmp_path / "iter_0000002" / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = next(name for name in weights if name.endswith("norm.weight"))
    save_file({**weights, name: torch.ones(weights[name].shape, dtype=torch.int32)}, path)
    with pytest.raises(CheckpointError, match=f"{name}: its type"):
        load_model(tmp_path)


def test_weights_of_another_model(tmp_path: Path) -> None:
    train("gpt", tmp_path / "a")
    train("llama", tmp_path / "b")
    name = "iter_0000002/model.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(CheckpointError, match="expected") as caught:
        load_model(tmp_path / "a")
    assert len(caught.value.problems) == 6
    assert caught.value.problems[-1].what.endswith("more")
