"""Configurations in files: the same checks as for command lines, with lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.config import from_argv
from graphstep.config.files import from_file, values_from_file
from graphstep.errors import ConfigError, Problem

YAML = """\
# a run
lr: 1e-4
model:
  num_layers: 2
  swiglu: yes
training: {train_iters: 20, save: out}
graphs:
  impl: local          # short name of the section
  cuda_graph_modules: attn, mlp
data:
  data_path: [a.txt, b.txt]
bf16: true
load: null
"""

TOML = """\
# a run
lr = 1e-4
bf16 = true
training.train_iters = 20
training.save = "out"

[model]
num_layers = 2
swiglu = true

[graphs]
impl = "local"
cuda_graph_modules = ["attn", "mlp"]

[data]
data_path = ["a.txt", "b.txt"]
"""

ARGV = (
    "--lr 1e-4 --num-layers 2 --swiglu --train-iters 20 --save out --cuda-graph-impl local "
    "--cuda-graph-modules attn mlp --data-path a.txt b.txt --bf16"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.yaml", "data_path: [0.3, a, 1, ./7]\n"), ("run.toml", 'data_path = [0.3, "a", 1, "./7"]\n')],
)
def test_weights_of_data_are_numbers(name: str, text: str, tmp_path: Path) -> None:
    config = from_file(write(tmp_path, text, name), {})
    assert config.data.data_path == ("0.3", "a", "1", "./7")
    assert from_argv(config.to_argv(), {}) == config


def test_words_of_messages_are_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        from_file(write(tmp_path, "data_path: [0.3, null, true]\nseed: abc\n"), {})
    assert [problem.code for problem in caught.value.problems] == ["data-path-type", "seed-type"]
    assert [problem.fix for problem in caught.value.problems] == [
        "give --data-path such a value",
        "give --seed such a value",
    ]


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(folder: Path, text: str, name: str = "run.yaml") -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        from_file(write(folder, text, name), {})
    return caught.value.problems


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.yml", YAML), ("run.toml", TOML)])
def test_a_file_says_what_a_command_line_says(name: str, text: str, tmp_path: Path) -> None:
    config = from_file(write(tmp_path, text, name), {})
    assert config == from_argv(ARGV.split(), {})
    assert config.origins["lr"] == "file"
    assert config.origins["cuda_graph_impl"] == "file"
    assert "load" not in config.origins
    assert [notice.code for notice in config.notices] == [n.code for n in from_argv(ARGV.split(), {}).notices]


@pytest.mark.parametrize("name", ["run.yaml", "run.toml"])
def test_an_empty_file_is_the_default(name: str, tmp_path: Path) -> None:
    assert from_file(write(tmp_path, "# nothing\n", name), {}) == from_argv([], {})


def test_everything_wrong_is_said_at_once_with_its_line(tmp_path: Path) -> None:
    text = (
        "num_layer: 2\nmodel:\n  hidden_size: wide\n  num-layers: 3\n  more: {x: 1}\n"
        "gaphs:\n  impl: local\ngraphs:\n  cuda_graph_modules: [atn]\n  impl: local\nlr: -1\nlr: 2\n"
    )
    found = {(p.code, p.where.split("run.yaml", 1)[1].split(": ")[0]): p.fix for p in problems(tmp_path, text)}
    assert found.keys() == {
        ("unknown-key", ":1"),
        ("hidden-size-type", ":3"),
        ("unknown-key", ":4"),
        ("unknown-section", ":5"),
        ("unknown-section", ":6"),
        ("cuda-graph-modules-choice", ":9"),
        ("lr-range", ":11"),
        ("given-twice", ":12"),
    }
    assert found["unknown-key", ":1"] == "did you mean num_layers?"
    assert found["unknown-key", ":4"] == "did you mean num_layers?"
    assert found["unknown-section", ":6"] == "did you mean graphs?"
    assert found["cuda-graph-modules-choice", ":9"] == "did you mean attn?"


@pytest.mark.parametrize("key", ["check_for_nan_in_loss_and_grad: false", "no_check_for_nan_in_loss_and_grad: true"])
def test_a_switch_has_the_name_that_turns_it_off_too(key: str, tmp_path: Path) -> None:
    config = from_file(write(tmp_path, f"{key}\ngraphs: {{impl: full_iteration}}\ndisable_bias_linear: true\n"), env={})
    assert not config.training.check_for_nan_in_loss_and_grad
    assert not config.model.add_bias_linear
    both = "no_check_for_nan_in_loss_and_grad: false\ncheck_for_nan_in_loss_and_grad: true\n"
    assert [p.code for p in problems(tmp_path, both)] == ["given-twice"]
    assert [p.code for p in problems(tmp_path, "disable_bias_linear: 3\n")] == ["add-bias-linear-type"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "graphs: {impl: local, policy: off}\n"),
        ("run.yaml", "cuda_graph_impl: local\ncuda_graph_policy: 'off'\n"),
        ("run.toml", "[graphs]\nimpl = 'local'\npolicy = 'off'\n"),
    ],
)
def test_the_word_off_is_no_false(name: str, text: str, tmp_path: Path) -> None:
    config = from_file(write(tmp_path, text, name), {})
    assert config == from_argv(["--cuda-graph-impl", "local", "--cuda-graph-policy", "off"], {})


def test_false_is_no_word_of_another_option(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "graphs: {impl: local, on_mismatch: off}\n")
    assert problem.code == "cuda-graph-on-mismatch-choice"


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    for name, text in (("run.yaml", "lr: 0.5"), ("run.toml", "lr = 0.5")):
        assert from_file(write(tmp_path, f"\ufeff{text}\r\n", name), env={}).training.lr == 0.5


def test_rules_about_several_options_have_the_line_of_the_first(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "lr: 1\ngraphs:\n  impl: full_iteration\n")
    assert problem.code == "full-iteration-nan-check"
    assert "run.yaml:3: --cuda-graph-impl, " in problem.where


def test_toml_has_lines_too(tmp_path: Path) -> None:
    text = "\nnum_layer = 2\n[modle]\nx = 1\n[graphs]\nimpl = 'lokal'\nwarmup_steps = 1.5\n[graphs.x]\n"
    found = {p.code: p.where.rsplit("run.toml", 1)[1] for p in problems(tmp_path, text, "run.toml")}
    assert found["unknown-key"] == ":2"
    assert found["cuda-graph-impl-choice"] == ":6"
    assert found["cuda-graph-warmup-steps-type"] == ":7"
    assert [p.code for p in problems(tmp_path, text, "run.toml")].count("unknown-section") == 2


@pytest.mark.parametrize(
    ("name", "text", "code", "where"),
    [
        ("run.yaml", "a: [1", "yaml-syntax", ":1"),
        ("run.yaml", "- lr\n", "file-shape", ""),
        ("run.yaml", "lr: 1\n---\nlr: 2\n", "file-shape", ""),
        ("run.yaml", "\nlr: !!python/name:os.system x\n", "yaml-value", ":2"),
        ("run.yaml", "lr: 2001-99-99\n", "yaml-value", ":1"),
        ("run.toml", "a = 1\nb = [", "toml-syntax", ""),
        ("run.toml", "[a\n", "toml-syntax", ":1"),
        ("run.toml", "a = " + "[" * 100_000, "toml-syntax", ""),
        ("run.yaml", "\n[lr]: 1\n", "file-shape", ":2"),
        ("run.yaml", "lr: 1\ngraphs: local\n", "section-value", ":2"),
        ("run.toml", "graphs = 'local'\n", "section-value", ":1"),
        ("run.json", "{}", "file-kind", ""),
        ("run", "", "file-kind", ""),
    ],
)
def test_files_that_cannot_be_read(name: str, text: str, code: str, where: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, text, name)
    assert problem.code == code
    assert problem.where.startswith(f"{tmp_path / name}{where}")
    assert problem.fix


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path / "none.yaml", {})
    assert caught.value.problems[0].code == "file-unreadable"


def test_merged_mappings_count(tmp_path: Path) -> None:
    text = "model: &m\n  num_layers: 2\ntraining:\n  train_iters: 3\ngraphs:\n  <<: {impl: local}\n"
    config = from_file(write(tmp_path, text), {})
    assert (config.model.num_layers, config.graphs.impl) == (2, "local")


def test_old_options_in_a_file_are_migrated(tmp_path: Path) -> None:
    config = from_file(write(tmp_path, "enable_cuda_graph: true\ncuda_graph_scope: full_iteration_inference\n"), {})
    assert (config.graphs.impl, config.graphs.modules, config.graphs.inference_scope) == ("local", (), "block")
    assert config.origins["cuda_graph_impl"] == "migrated"
    assert [notice.code for notice in config.notices if notice.code.startswith("old-")] == [
        "old-enable-cuda-graph",
        "old-cuda-graph-scope",
        "old-module-full-iteration-inference",
    ]


def test_a_command_line_wins_over_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, "lr: 1e-4\nnum_layers: 2\ngraphs: {impl: local, cuda_graph_modules: [attn]}\n")
    config = from_argv(["--num-layers", "3", "--config", path], {})
    assert (config.training.lr, config.model.num_layers, config.graphs.impl) == (1e-4, 3, "local")
    assert [config.origins.get(name) for name in ("lr", "num_layers", "seed")] == ["file", "option", None]
    assert config == from_argv([f"--config={path}", "--num-layers", "3"], {})
    assert "config" not in config.origins
    assert from_argv(config.to_argv(), {}) == config


@pytest.mark.parametrize(
    ("file", "line", "impl", "modules", "scope"),
    [
        ("cuda_graph_impl: local", "--external-cuda-graph", "transformer_engine", (), "none"),
        ("enable_cuda_graph: true", "--cuda-graph-impl transformer_engine", "transformer_engine", (), "none"),
        ("cuda_graph_impl: local\ncuda_graph_scope: attn", "--cuda-graph-modules mlp", "local", ("mlp",), "layer"),
        ("cuda_graph_scope: full_iteration_inference", "--enable-cuda-graph", "local", (), "block"),
        ("cuda_graph_impl: local", "--cuda-graph-scope full_iteration_inference", "local", (), "block"),
        (
            "external_cuda_graph: true\ncuda_graph_scope: attn",
            "--cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad",
            "full_iteration",
            (),
            "none",
        ),
    ],
)
def test_an_option_wins_whatever_its_form(
    file: str, line: str, impl: str, modules: tuple[str, ...], scope: str, tmp_path: Path
) -> None:
    graphs = from_argv(["--config", write(tmp_path, file), *line.split()], {}).graphs
    assert (graphs.impl, graphs.modules, graphs.inference_scope) == (impl, modules, scope)


def test_problems_of_file_and_command_line_are_said_together(tmp_path: Path) -> None:
    path = write(tmp_path, "num_layer: 2\nlr: -1\nseed: x\n")
    with pytest.raises(ConfigError) as caught:
        from_argv(["--config", path, "--num-layers", "x", "--seed", "1"], {})
    assert [(p.code, p.where) for p in caught.value.problems] == [
        ("malformed-value", "--num-layers"),
        ("unknown-key", f"{path}:1"),
        ("seed-type", f"{path}:3"),
        ("lr-range", f"{path}:2: --lr"),
    ]


def test_the_option_needs_a_file_and_a_file_names_no_other(tmp_path: Path) -> None:
    for argv, code in ((["--config"], "missing-value"), (["--config", "none.toml"], "file-unreadable")):
        with pytest.raises(ConfigError) as caught:
            from_argv(argv, {})
        assert [problem.code for problem in caught.value.problems] == [code]
    assert [problem.code for problem in problems(tmp_path, "config: other.yaml\n")] == ["unknown-key"]


def test_old_forms_that_contradict_each_other_have_a_line(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "lr: 1\nenable_cuda_graph: true\nexternal_cuda_graph: true\n")
    assert problem.code == "old-two-implementations"
    assert "run.yaml:2" in problem.where


KEYS = st.sampled_from(
    ["lr", "model", "graphs", "impl", "num_layers", "cuda_graph_modules", "bf16", "split", "x", "<<"]
)
VALUES = st.sampled_from(
    ["1", "1e-4", "-", "true", "null", "[attn]", "[1, [2]]", "{a: 1}", "'x'", "2001-01-01", ".nan", "&a", "*a"]
)


@given(st.lists(st.tuples(st.sampled_from(["", "  ", "- "]), KEYS, VALUES), max_size=6))
def test_any_file_is_a_configuration_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, str, str]]
) -> None:
    path = write(tmp_path_factory.getbasetemp(), "".join(f"{a}{key}: {value}\n" for a, key, value in lines))
    try:
        config = from_file(path, {})
    except ConfigError as error:
        good = all(problem.code and problem.what for problem in error.problems)
        config = from_argv([], {}) if good else None
    assert config is not None
    assert from_argv(config.to_argv(), {}) == config


def test_reading_alone_never_raises(tmp_path: Path) -> None:
    reading = values_from_file(write(tmp_path, "lr: x\nnum_layers: 2\n"))
    assert (reading.values, reading.wrong, reading.lines) == ({"num_layers": 2}, {"lr"}, {"lr": 1, "num_layers": 2})
