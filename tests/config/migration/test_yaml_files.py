"""YAML files: keys of old options change by their places; comments and layout stay."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from graphstep.config.migration import migrate_yaml
from graphstep.errors import ConfigError


def migrated(text: str) -> str:
    rewrite = migrate_yaml(text, "run.yaml")
    assert rewrite.left == ()
    again = migrate_yaml(rewrite.after, "run.yaml")
    assert not again.is_changed
    return rewrite.after


TEXT = """\
# A recipe
model:
    num_layers: 2        # small
    enable_cuda_graph: true  # local graphs
    cuda_graph_scope:    # what is captured
        - attn
        - full_iteration_inference
        - mlp

    hidden_size: "64"
train: {external_cuda_graph: yes, cuda_graph_scope: full, iters: 1}
"""

EXPECTED = """\
# A recipe
model:
    num_layers: 2        # small
    cuda_graph_impl: local  # local graphs
    cuda_graph_modules:    # what is captured
        - attn
        - mlp
    inference_cuda_graph_scope: block

    hidden_size: "64"
train: {cuda_graph_impl: transformer_engine, cuda_graph_modules: [], iters: 1}
"""


def test_a_whole_file() -> None:
    assert migrated(TEXT) == EXPECTED
    assert migrated(TEXT.replace("\n", "\r\n")) == EXPECTED.replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("enable_cuda_graph: true\n", "cuda_graph_impl: local\n"),
        ("enable_cuda_graph: false\n", "cuda_graph_impl: none\n"),
        ("enable_cuda_graph: true\ncuda_graph_impl: none\n", "cuda_graph_impl: local\n"),
        ("enable_cuda_graph: true\ncuda_graph_impl:\n", "cuda_graph_impl: local\n"),
        ("external_cuda_graph: true", "cuda_graph_impl: transformer_engine"),
        ("enable_cuda_graph: false\nexternal_cuda_graph: true\n", "cuda_graph_impl: transformer_engine\n"),
        ("enable_cuda_graph: false\nexternal_cuda_graph: false\n", "cuda_graph_impl: none\n"),
        ("- enable_cuda_graph: false\n  external_cuda_graph: on\n", "- cuda_graph_impl: transformer_engine\n"),
        ("cuda_graph_scope: attn\n", "cuda_graph_modules: attn\n"),
        ("'cuda_graph_scope': \"attn,mlp\"\n", "'cuda_graph_modules': \"attn,mlp\"\n"),
        ("cuda_graph_scope: [attn, moe_router]\n", "cuda_graph_modules: [attn, moe_router]\n"),
        ("cuda_graph_scope:\n", "cuda_graph_modules: []\n"),
        ("cuda_graph_scope: null\nx: 1\n", "cuda_graph_modules: []\nx: 1\n"),
        ("cuda_graph_scope: []\n", "cuda_graph_modules: []\n"),
        ("cuda_graph_scope: full\n", "cuda_graph_modules: []\n"),
        ("cuda_graph_modules: [full]  # all\n", "cuda_graph_modules: []  # all\n"),
        ("cuda_graph_scope:\n  - full\nx: 1\n", "cuda_graph_modules: []\nx: 1\n"),
        ("cuda_graph_scope: full_iteration\n", "cuda_graph_impl: full_iteration\n"),
        ("cuda_graph_scope:\n- full_iteration\n", "cuda_graph_impl: full_iteration\n"),
        ("cuda_graph_impl: local\ncuda_graph_scope: full_iteration # x\n", "cuda_graph_impl: full_iteration\n# x\n"),
        ("{cuda_graph_impl: 'local', cuda_graph_scope: full_iteration}\n", "{cuda_graph_impl: 'full_iteration'}\n"),
        (
            "cuda_graph_impl: local\ncuda_graph_scope: full_iteration_inference\n",
            "cuda_graph_impl: local\ninference_cuda_graph_scope: block\n",
        ),
        (
            "cuda_graph_impl: none\ncuda_graph_scope: full_iteration_inference\n",
            "cuda_graph_impl: none\ncuda_graph_modules: []\n",
        ),
        (
            "{cuda_graph_impl: local, cuda_graph_scope: [full_iteration_inference, attn]}",
            "{cuda_graph_impl: local, cuda_graph_modules: [attn], inference_cuda_graph_scope: block}",
        ),
        (
            "cuda_graph_impl: local\ncuda_graph_scope: attn full_iteration_inference",
            "cuda_graph_impl: local\ncuda_graph_modules: attn\ninference_cuda_graph_scope: block",
        ),
        (
            "MODEL_ARGS:\n  --enable-cuda-graph: true\n  --cuda-graph-scope: full\n  --bf16: true\n",
            "MODEL_ARGS:\n  --cuda-graph-impl: local\n  --bf16: true\n",
        ),
        ("cuda-graph-scope: attn\n", "cuda-graph-modules: attn\n"),
        ("cuda_graph_scope: # c\n  - full\n", "cuda_graph_modules: [] # c\n"),
        (
            "cuda_graph_scope: # c\r\n  # d\r\n  - full_iteration # e\r\nx: 1\r\n",
            "cuda_graph_impl: full_iteration # c\r\n  # d # e\r\nx: 1\r\n",
        ),
        (
            "a:\n  cuda_graph_impl: local\n  cuda_graph_scope: # c\n    - full_iteration\n  x: 1\n",
            "a:\n  cuda_graph_impl: full_iteration\n  # c\n  x: 1\n",
        ),
        ("moe_router_padding_for_fp8: true\n", "moe_router_padding_for_quantization: true\n"),
        ("hybrid_override_pattern: 'M*-M'\n", "hybrid_layer_pattern: 'M*-M'\n"),
        ("a: 1\n---\nenable_cuda_graph: true\n", "a: 1\n---\ncuda_graph_impl: local\n"),
        ("a: &x {enable_cuda_graph: true}\nb: *x\n", "a: &x {cuda_graph_impl: local}\nb: *x\n"),
    ],
)
def test_forms(old: str, new: str) -> None:
    assert migrated(old) == new
    assert list(yaml.safe_load_all(new))


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("\ncuda_graph_scope: full_iteration_inference\n", 2, "may stand elsewhere"),
        ("cuda_graph_scope: ${oc.env:SCOPE}\n", 1, "cannot be read"),
        ("enable_cuda_graph: 'true'\n", 1, "cannot be read"),
        ("enable_cuda_graph: true\nenable_cuda_graph: true\n", 1, "given twice"),
        ("cuda_graph_scope: atn\n", 1, "no module atn"),
        ("a: &s [attn]\nb:\n  cuda_graph_scope: *s\n", 3, "cannot be read"),
        ("a: &s\n  x: 1\nb:\n  <<: *s\n  cuda_graph_scope: full_iteration_inference\n", 5, "merged in"),
        ("? enable_cuda_graph\n: true\n", 1, "cannot be read"),
        ("cuda_graph_scope:\n  - full_iteration\n  # c\n  - full_iteration\n", 1, "would be lost"),
        ("run: |\n\n  train --enable-cuda-graph\n", 3, "inside a text"),
        ("args:\n  - --bf16\n  - --enable-cuda-graph\n", 3, "inside a text"),
    ],
)
def test_what_is_not_safe_is_left_alone_with_its_line(text: str, line: int, reason: str) -> None:
    rewrite = migrate_yaml(text, "run.yaml")
    assert not rewrite.is_changed
    assert rewrite.left[0].where == f"run.yaml:{line}"
    assert reason in rewrite.left[0].what
    assert rewrite.left[0].fix


def test_ambiguous_mixes_are_refused_all_at_once_with_their_lines() -> None:
    text = "a:\n  enable_cuda_graph: true\n  external_cuda_graph: true\nb:\n  cuda_graph_scope: full,attn\n"
    with pytest.raises(ConfigError) as caught:
        migrate_yaml(text, "run.yaml")
    assert [problem.where.split(": ")[0] for problem in caught.value.problems] == ["run.yaml:2", "run.yaml:5"]


@pytest.mark.parametrize("text", ["a: [1", "a: b: c\n", "\x01", "%YAML 9", "- " * 3000, "{{ a }}: 1\n- b"])
def test_what_is_no_yaml_is_said(text: str) -> None:
    try:
        assert migrate_yaml(text, "run.yaml").after == text
    except ConfigError as error:
        (problem,) = error.problems
        assert problem.code == "yaml-syntax"
        assert problem.where.startswith("run.yaml")


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def fail(name: str, *more: Any) -> ModuleType:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError) as caught:
        migrate_yaml("a: 1\n", "run.yaml")
    assert "graphstep[yaml]" in caught.value.problems[0].fix


# fmt: off
VALUES = st.sampled_from([
    "true", "false", "null", "", "local", "none", "attn", "full", "[full]", "[attn, mlp]", "full_iteration", "block",
    "x y", "full_iteration_inference", "[attn, full_iteration_inference]", "'attn'", "\n  - full", " # c\n  - full",
    "\n  - attn\n  - full_iteration_inference",
])
KEYS = st.sampled_from([
    "enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope", "cuda_graph_modules", "cuda_graph_impl", "x",
    "inference_cuda_graph_scope", "--cuda-graph-scope", "- enable_cuda_graph", "  external_cuda_graph", "#",
])
# fmt: on


@given(st.lists(st.tuples(KEYS, VALUES, st.sampled_from(["", " # c"])), max_size=6), st.booleans())
def test_migrating_twice_is_migrating_once(entries: list[tuple[str, str, str]], is_flow: bool) -> None:
    if is_flow:
        text = "{" + ", ".join(f"{key}: {value}" for key, value, _ in entries if "-" not in key + value) + "}"
    else:
        text = "\n".join(f"{key}: {value}{comment}" for key, value, comment in entries)
    try:
        once = migrate_yaml(text)
    except ConfigError:
        return
    assert migrate_yaml(once.after).after == once.after
    assert list(yaml.compose_all(once.after)) is not None
