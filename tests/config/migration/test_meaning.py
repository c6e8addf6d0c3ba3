"""A migrated command line means what the old one means: the parser, which knows the old forms too, says so."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from graphstep.config import CudaGraphConfig, from_argv
from graphstep.config.migration import migrate_argv, migrate_yaml
from graphstep.config.migration.occurrences import MODULE_WORDS
from graphstep.config.migrations import OLD_NAMES
from graphstep.errors import ConfigError

BASE = ["--num-experts", "4", "--no-check-for-nan-in-loss-and-grad"]
MODULES = st.lists(st.sampled_from(sorted(MODULE_WORDS)), min_size=1, max_size=2)
LISTS = st.sampled_from(["--cuda-graph-scope", "--cuda-graph-modules"])
OPTIONS = st.one_of(
    st.sampled_from([["--enable-cuda-graph"], ["--external-cuda-graph"]]),
    st.tuples(LISTS, MODULES).map(lambda pair: [pair[0], *pair[1]]),
    st.tuples(LISTS, MODULES).map(lambda pair: [f"{pair[0]}={','.join(pair[1])}"]),
    st.sampled_from(["none", "local", "transformer_engine", "full_iteration"]).map(lambda w: ["--cuda-graph-impl", w]),
    st.sampled_from(["none", "layer", "block"]).map(lambda word: [f"--inference-cuda-graph-scope={word}"]),
)


def meaning(argv: list[str]) -> CudaGraphConfig | None:
    """What is captured; None if the line is refused."""
    try:
        return from_argv([*BASE, *argv], {}).graphs
    except ConfigError:
        return None


def migrated(argv: list[str]) -> list[str] | None:
    try:
        words, rewrite = migrate_argv(argv)
    except ConfigError:
        return None
    assert rewrite.left == ()
    return words


@given(st.lists(OPTIONS, max_size=4))
@example([["--enable-cuda-graph"], ["--cuda-graph-impl", "none"]])
@example([["--cuda-graph-scope", "full"], ["--cuda-graph-scope", "attn"]])
@example([["--cuda-graph-impl", "local"], ["--cuda-graph-scope", "full_iteration"], ["--cuda-graph-impl", "none"]])
def test_a_migrated_line_means_the_same(options: list[list[str]]) -> None:
    argv = [word for option in options for word in option]
    new = migrated(argv)
    if new is None:
        assert meaning(argv) is None
        return
    assert meaning(new) == meaning(argv)
    assert not any(word.split("=")[0] in OLD_NAMES for word in new)


SWITCHES = st.sampled_from(["enable_cuda_graph: true", "external_cuda_graph: yes", "enable_cuda_graph: false", ""])
ENTRIES = st.sampled_from(["cuda_graph_scope", "cuda_graph_modules"])
IMPLS = st.sampled_from(["", "cuda_graph_impl: none", "cuda_graph_impl: local", "cuda_graph_impl: full_iteration"])


@given(SWITCHES, ENTRIES, MODULES, IMPLS)
def test_a_migrated_mapping_means_the_same(switch: str, name: str, modules: list[str], impl: str) -> None:
    text = "\n".join(filter(None, (switch, f"{name}: [{', '.join(modules)}]", impl)))
    options = {"enable_cuda_graph: true": "--enable-cuda-graph", "external_cuda_graph: yes": "--external-cuda-graph"}
    argv = [options[switch]] if switch in options else []
    argv += [f"--{name.replace('_', '-')}", *modules, *impl.replace("cuda_graph_impl: ", "--cuda-graph-impl ").split()]
    try:
        rewrite = migrate_yaml(text)
    except ConfigError:
        assert meaning(argv) is None
        return
    if rewrite.left:
        return
    pairs = dict(line.split(": ") for line in rewrite.after.splitlines())
    new = []
    for key, value in pairs.items():
        words = value.strip("[]").replace(",", " ").split()
        new += [f"--{key.replace('_', '-')}", *words] if words else []
    assert meaning(new) == meaning(argv)
