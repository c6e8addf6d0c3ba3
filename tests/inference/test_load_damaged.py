"""Folders that are damaged, or whose files do not fit each other: a reason, before any memory is taken for a model."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.inference.hugging_face import VOCABULARY, build, save
from tests.inference.test_load import assert_equal_logits, changed
from torch import Tensor

from graphstep.errors import CheckpointError, ConfigError
from graphstep.inference.load import load_model
from graphstep.models import GPTModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HUGE = 2**31 - 1
CopyOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save(build(kind), tmp_path_factory.mktemp(kind)) for kind in ("llama", "qwen2", "mixtral")}


@pytest.fixture
def copy_of(saved: dict[str, Path], tmp_path: Path) -> CopyOf:
    return lambda kind: Path(shutil.copytree(saved[kind], tmp_path / kind))


@pytest.fixture
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was taken before everything was checked")

    monkeypatch.setattr(GPTModel, "to_empty", refuse)


def with_weights(folder: Path, **changes: Tensor | None) -> Path:
    """Replace tensors; dots are written as double underscores. ``None`` removes one."""
    weights = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    for name, tensor in changes.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / WEIGHTS)
    return folder


@pytest.mark.usefixtures("nothing_is_allocated")
class TestFiles:
    @pytest.mark.parametrize("size", [0, 7, 8, 1000, -1])
    def test_truncated_weights(self, size: int, copy_of: CopyOf) -> None:
        path = copy_of("llama") / WEIGHTS
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match="truncated or damaged") as caught:
            load_model(path.parent)
        assert caught.value.problems[0].where == str(path)

    @pytest.mark.parametrize(
        "content", [struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 5) + b"hello", b"PK\x03\x04" * 9]
    )
    def test_weights_that_are_something_else(self, content: bytes, copy_of: CopyOf) -> None:
        folder = copy_of("llama")
        (folder / WEIGHTS).write_bytes(content)
        with pytest.raises(CheckpointError, match="truncated or damaged"):
            load_model(folder)

    @pytest.mark.parametrize(
        "index", [{}, [WEIGHTS], *({"a": name} for name in ("/etc/passwd", "..", ".", "", "a\0b", "a/b", 3, [WEIGHTS]))]
    )
    def test_an_index_that_leads_elsewhere(self, index: Any, copy_of: CopyOf) -> None:
        folder = copy_of("llama")
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
        with pytest.raises(CheckpointError, match="names to files of this folder"):
            load_model(folder)

    def test_a_shard_that_is_missing_and_one_that_is_cut_are_said_at_once(self, copy_of: CopyOf) -> None:
        folder = copy_of("llama")
        (folder / "a.safetensors").write_bytes(b"")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
        with pytest.raises(CheckpointError) as caught:
            load_model(folder)
        assert [Path(problem.where).name for problem in caught.value.problems] == ["a.safetensors", "b.safetensors"]

    def test_a_weight_in_two_files(self, copy_of: CopyOf) -> None:
        folder = copy_of("llama")
        save_file({"model.norm.weight": torch.ones(32)}, folder / "z.safetensors")
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in another file, too"):
            load_model(folder)

    @pytest.mark.parametrize("name", ["model__norm__weight", "model__embed_tokens__weight"])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
    def test_weights_of_a_type_that_none_has(self, dtype: torch.dtype, name: str, copy_of: CopyOf) -> None:
        shape = (32,) if "norm" in name else (VOCABULARY, 32)
        with pytest.raises(CheckpointError, match="type"):
            load_model(with_weights(copy_of("llama"), **{name: torch.ones(shape).to(dtype)}))

    def test_a_model_without_its_head(self, copy_of: CopyOf) -> None:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected \[61, 32\], found nothing"):
            load_model(with_weights(copy_of("llama"), lm_head__weight=None))


@pytest.mark.usefixtures("nothing_is_allocated")
class TestConfigurations:
    @pytest.mark.parametrize(
        ("kind", "name", "value", "what"),
        [
            ("llama", "num_hidden_layers", 9999, "9999 layers in the configuration"),
            ("llama", "num_hidden_layers", 3, r"the weights have no model\.layers\.2"),
            ("llama", "num_hidden_layers", 1, r"model\.layers\.1\..*not known"),
            ("llama", "vocab_size", HUGE, rf"embed_tokens\.weight: expected \[{HUGE}, 32\]"),
            ("llama", "hidden_size", 2**30, r"expected \[61, 1073741824\]"),
            ("llama", "intermediate_size", HUGE, r"gate_proj\.weight: expected"),
            ("llama", "num_key_value_heads", None, r"k_proj\.weight: expected \[32, 32\], found \[16, 32\]"),
            ("mixtral", "num_local_experts", HUGE, rf"gate\.weight: expected \[{HUGE}, 32\], found \[4, 32\]"),
            ("mixtral", "num_local_experts", 3, r"gate\.weight: expected \[3, 32\], found \[4, 32\]"),
        ],
    )
    def test_sizes_that_are_not_those_of_the_weights(
        self, kind: str, name: str, value: Any, what: str, copy_of: CopyOf
    ) -> None:
        with pytest.raises(CheckpointError, match=what):
            load_model(changed(copy_of(kind), **{name: value}))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *((name, 10**30) for name in ("vocab_size", "hidden_size", "max_position_embeddings", "head_dim")),
            ("num_hidden_layers", HUGE),
            ("hidden_size", True),
            ("sliding_window", 0),
            ("rms_norm_eps", float("inf")),
            ("rope_parameters", {"rope_theta": 1, "rope_type": "yarn", "factor": 2.0}),
            ("tie_word_embeddings", "false"),
            ("attention_bias", "no"),
            ("mlp_bias", 1),
        ],
    )
    def test_values_that_no_model_has(self, name: str, value: Any, copy_of: CopyOf) -> None:
        wrong = "rope_theta" if name == "rope_parameters" else name
        with pytest.raises(ConfigError, match=f"missing or malformed: .*{wrong}"):
            load_model(changed(copy_of("llama"), **{name: value}))

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b'"llama"'])
    def test_a_configuration_that_is_no_object(self, content: bytes, copy_of: CopyOf) -> None:
        folder = copy_of("llama")
        for name in ("generation_config.json", "config.json"):
            (folder / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=r"damaged|expected a JSON object"):
                load_model(folder)

    def test_arguments(self, saved: dict[str, Path]) -> None:
        with pytest.raises(ConfigError, match=r"torch\.int8"):
            load_model(saved["llama"], dtype=torch.int8)
        with pytest.raises(ConfigError, match="sequences of 0 tokens") as caught:
            load_model(saved["llama"], max_positions=0, limit_option="--limit")
        assert caught.value.problems[0].where == "--limit"


def test_a_head_of_its_own_in_a_model_that_is_said_to_be_tied(
    copy_of: CopyOf, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does it."""
    import transformers

    generator = torch.Generator().manual_seed(2)
    folder = with_weights(copy_of("qwen2"), lm_head__weight=torch.randn(VOCABULARY, 32, generator=generator))
    assert_equal_logits(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), folder)
    assert "tie_word_embeddings is true" in caplog.text


def test_the_embedding_once_more_as_a_head(copy_of: CopyOf, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy_of("qwen2")
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    model = load_model(with_weights(folder, lm_head__weight=embedding.clone())).model
    assert model.head.weight is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_model_that_is_larger_than_memory(copy_of: CopyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(GPTModel, "to_empty", fail)
    with pytest.raises(MemoryError, match="no memory for a model of"):
        load_model(copy_of("llama"))
