"""Models of transformers give the same logits and the same greedy tokens here, through the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.inference.generation import build_engine
from tests.inference.hugging_face import MODELS, POSITIONS, VOCABULARY, build, save
from torch import Tensor

from graphstep.errors import CheckpointError, ConfigError
from graphstep.inference.load import load_model
from graphstep.inference.requests import SamplingParams

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2]]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def assert_equal_logits(theirs: Any, folder: Path) -> None:
    loaded = load_model(folder)
    x = tokens()
    torch.testing.assert_close(loaded.model(x), theirs(x).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = build(kind)
    assert_equal_logits(theirs, save(theirs, tmp_path))


@pytest.mark.parametrize(
    ("kind", "scope"),
    [*((kind, "block") for kind in MODELS), ("qwen3", "none"), ("qwen3", "layer"), ("mixtral", "none")],
)
def test_greedy_tokens_equal_those_of_transformers(kind: str, scope: str, tmp_path: Path) -> None:
    theirs = build(kind)
    loaded = load_model(save(theirs, tmp_path))
    with build_engine(loaded.model, scope) as engine:
        requests = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0))
    for prompt, request in zip(PROMPTS, requests, strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert request.output_tokens == out[0, len(prompt) :].tolist()


def test_shards_with_an_index(tmp_path: Path) -> None:
    theirs = build("qwen3")
    save(theirs, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (tmp_path / "stray.safetensors").write_bytes(b"not in the index")
    assert_equal_logits(theirs, tmp_path)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3 experts"])
def test_experts_of_a_layer_in_one_tensor(kind: str, tmp_path: Path) -> None:
    theirs = build(kind)
    save(theirs, tmp_path)
    fused = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    save_file(fused, tmp_path / "model.safetensors")
    assert_equal_logits(theirs, tmp_path)


def test_the_type_of_the_files_or_another_one(tmp_path: Path) -> None:
    save(build("llama").bfloat16(), tmp_path)
    assert load_model(tmp_path).model.embedding.weight.dtype is torch.bfloat16
    model = load_model(tmp_path, dtype=torch.float32).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.rotary is not None
    assert model.rotary.table.dtype is torch.float32


def test_nothing_is_drawn(tmp_path: Path) -> None:
    save(build("qwen3 experts"), tmp_path)
    before = torch.get_rng_state()
    first, second = load_model(tmp_path).model, load_model(tmp_path).model
    assert torch.equal(torch.get_rng_state(), before)
    assert not first.training
    for (name, one), two in zip(first.named_buffers(), second.buffers(), strict=True):
        assert torch.equal(one, two), name
        assert one.isfinite().all()


def test_fewer_positions(tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    assert load_model(tmp_path).model.config.max_position_embeddings == POSITIONS
    model = load_model(tmp_path, max_positions=9).model
    assert model.rotary is not None
    assert model.rotary.table.shape[1] == 9
    assert load_model(tmp_path, max_positions=9000).model.config.max_position_embeddings == POSITIONS


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_model(tmp_path).stop_tokens == (9, 7)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(tmp_path).stop_tokens == (7,)


def changed(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "left out"}))
    return folder


def test_everything_that_is_not_supported_is_in_one_error(tmp_path: Path) -> None:
    save(build("mistral"), tmp_path)
    changed(
        tmp_path,
        sliding_window=16,
        rope_parameters={"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4},
        hidden_act="gelu",
        quantization_config={"bits": 4},
        attention_bias=True,
    )
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert all(word in text for word in ("window of 16", "longrope", "gelu", "quantised", "attention_bias"))
    assert {problem.where for problem in caught.value.problems} == {str(tmp_path / "config.json")}


def test_a_sliding_window_that_is_never_left(tmp_path: Path) -> None:
    theirs = build("mistral", sliding_window=16)
    save(theirs, tmp_path)
    with pytest.raises(ConfigError, match=r"a sliding window of 16 tokens") as caught:
        load_model(tmp_path, limit_option="--limit")
    assert "--limit 16" in caught.value.problems[0].fix
    loaded = load_model(tmp_path, max_positions=16)
    x = tokens()[:, :16]
    torch.testing.assert_close(loaded.model(x), theirs(x).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "left out"}, "None"),
        ({"hidden_size": "wide", "vocab_size": 0}, "vocab_size, hidden_size"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each type of layer"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of the channels"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 3}, "cannot share 3 query groups"),
        ({"rms_norm_eps": "small", "rope_parameters": {"rope_theta": []}}, "rms_norm_eps, rope_theta"),
        ({"sliding_window": "wide", "layer_types": 3}, "layer_types, sliding_window"),
    ],
)
def test_a_config_that_does_not_fit(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_model(changed(tmp_path, **changes))
    assert what in str(caught.value)
    assert str(tmp_path / "config.json") in caught.value.problems[0].where


def test_sizes_that_transformers_would_guess(tmp_path: Path) -> None:
    save(build("qwen3"), tmp_path)
    with pytest.raises(ConfigError, match="num_key_value_heads, head_dim"):
        load_model(changed(tmp_path, head_dim="left out", num_key_value_heads="left out"))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_numbers_that_are_left_out(kind: str, tmp_path: Path) -> None:
    import transformers

    save(build(kind), tmp_path)
    changed(tmp_path, rope_parameters="left out", rms_norm_eps="left out", hidden_act="left out")
    assert_equal_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tmp_path)


def test_the_base_of_old_configs(tmp_path: Path) -> None:
    theirs = build("llama")
    save(theirs, tmp_path)
    assert_equal_logits(theirs, changed(tmp_path, rope_parameters="left out", rope_theta=500.0))


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(8, 32)
    del weights["model.layers.1.mlp.down_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    save_file({name: tensor.clone() for name, tensor in weights.items()}, path)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert [problem.what for problem in caught.value.problems] == [
        "model.layers.0.self_attn.q_proj.weight: expected [32, 32], found [8, 32]",
        "model.layers.1.mlp.down_proj.weight: expected [32, 48], found nothing",
        "model.layers.0.self_attn.q_proj.bias: not known in this architecture",
    ]


def test_damaged_files(tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_model(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(CheckpointError, match="weight_map"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load_model(tmp_path)


def test_a_folder_with_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert "config.json" in caught.value.problems[0].fix
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(tmp_path / "nowhere")
