"""Scaled rotations give the logits of transformers, and what is not known is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.inference.generation import build_engine
from tests.inference.hugging_face import POSITIONS, build, save
from tests.inference.test_load import assert_equal_logits, changed

from graphstep.errors import ConfigError
from graphstep.inference.load import load_model
from graphstep.inference.requests import SamplingParams

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with all that can be said": {
        **YARN,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn with a factor of attention": {**YARN, "attention_factor": 0.8},
}


@pytest.mark.parametrize("kind", SCALED)
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = build("llama", rope_parameters={"rope_theta": 500.0, **SCALED[kind]}, head_dim=16)
    plain = build("llama", rope_parameters={"rope_theta": 500.0, "rope_type": "default"}, head_dim=16)
    assert_equal_logits(theirs, save(theirs, tmp_path))
    if kind != "dynamic":
        x = torch.arange(20)[None]
        with torch.no_grad():
            assert (theirs(x).logits - plain(x).logits).abs().max() > 0.01, "the rotation has no effect here"


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_the_field_of_older_files(name: str, tmp_path: Path) -> None:
    theirs = build("qwen3", rope_parameters={"rope_theta": 1e4, **YARN})
    save(theirs, tmp_path)
    scaling = {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
    changed(tmp_path, rope_parameters="left out", rope_theta=1e4, rope_scaling=scaling)
    assert_equal_logits(theirs, tmp_path)


def test_the_older_field_counts_where_there_are_both(tmp_path: Path) -> None:
    import transformers

    save(build("llama"), tmp_path)
    changed(tmp_path, rope_scaling={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0})
    assert_equal_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tmp_path)


def test_positions_of_the_first_training_outside_of_the_field(tmp_path: Path) -> None:
    import transformers

    save(build("llama"), tmp_path)
    scaling = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    changed(tmp_path, rope_scaling={**scaling, "rope_theta": 500.0}, original_max_position_embeddings=10)
    assert_equal_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tmp_path)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_greedy_tokens_of_graphs(kind: str, tmp_path: Path) -> None:
    theirs = build("llama", rope_parameters={"rope_theta": 500.0, **SCALED[kind]})
    loaded = load_model(save(theirs, tmp_path), max_positions=POSITIONS - 8)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with build_engine(loaded.model, "block") as engine:
        (request,) = engine.generate([prompt], SamplingParams(max_new_tokens=24, temperature=0))
    ids = torch.tensor([prompt])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert request.output_tokens == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("rope", "what"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'longrope' (rope_scaling.rope_type)"),
        ({"type": 3}, "'3' (rope_scaling.rope_type)"),
        ({"rope_type": "linear"}, "rope_scaling.factor"),
        ({"rope_type": "linear", "factor": -2}, "rope_scaling.factor"),
        ({"rope_type": "llama3", "factor": True}, "rope_scaling.low_freq_factor, rope_scaling.high_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "rope_scaling.low_freq_factor"),
        ({**LLAMA3, "factor": float("inf")}, "rope_scaling.factor"),
        ({**YARN, "beta_fast": "many", "truncate": 1}, "rope_scaling.beta_fast, rope_scaling.truncate"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"rope_type": "yarn"}, "rope_scaling.factor"),
    ],
)
def test_what_is_in_the_way_is_named(rope: dict[str, Any], what: str, tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_model(changed(tmp_path, rope_scaling=rope))
    assert what in str(caught.value)
    assert str(tmp_path / "config.json") in caught.value.problems[0].where


def test_a_factor_that_follows_from_the_positions(tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    named, unnamed = (
        {"rope_type": "yarn", "original_max_position_embeddings": 12, **more} for more in ({"factor": 4.0}, {})
    )
    tables = []
    for rope in (named, unnamed):
        rotary = load_model(changed(tmp_path, rope_scaling=rope)).model.rotary
        assert rotary is not None
        tables.append(rotary.table)
    assert torch.equal(*tables)
    assert json.loads((tmp_path / "config.json").read_text())["rope_scaling"] == unnamed
