"""For any list of words: a configuration whose printed form parses to itself, or a ``ConfigError``."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from graphstep.config import CudaGraphModule, RunConfig, from_argv, from_options
from graphstep.config.environment import VARIABLES
from graphstep.config.keywords import ALIASES
from graphstep.config.migrations import NEW_NAMES, OLD_MODULES, OLD_NAMES, migrate
from graphstep.config.options import OPTIONS, Option
from graphstep.errors import ConfigError

SPELLINGS = [spelling for option in OPTIONS for spelling in option.spellings]
NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from((0, 1, 2**62, 2**63 - 1, 2**63, 10**400)), st.floats(), st.floats(0, 1)
)
WORDS = st.one_of(
    st.sampled_from(SPELLINGS),
    st.sampled_from([choice for option in OPTIONS for choice in option.choices]),
    NUMBERS.map(str),
    st.text(max_size=6),
    st.builds("{}={}".format, st.sampled_from(SPELLINGS), NUMBERS),
    st.sampled_from(("-", "--", "-x", "--=", "969,30,1", "1e400", "\ud800", "\0")),
)


def _good_words(option: Option) -> st.SearchStrategy[list[str]]:
    """Words that this option can be given, most of them sensible."""
    spelling = st.sampled_from(option.spellings)
    if option.nargs == 0:
        return spelling.map(lambda word: [word])
    if option.choices:
        value = st.sampled_from(option.choices)
    elif option.type.__name__ in ("integer", "positive"):
        value = st.integers(0, 8).map(str)
    elif option.type.__name__ == "number":
        value = st.floats(0, 1).map(str)
    elif option.dest == "moe_layer_freq":
        value = st.sampled_from(("1", "2", "[0,1]", "([0]*1+[1]*3)", "[0]", "3*[1]"))
    elif option.dest == "hybrid_layer_pattern":
        value = st.sampled_from(("M*-M", "M*-E|ME*-", "*-*-/*-", "-"))
    elif option.dest == "split":
        value = st.sampled_from(("8,1,1", "1/1/1", "3,2"))
    else:
        value = st.text(min_size=1, max_size=4)
    values = st.lists(value, min_size=1, max_size=3) if option.nargs == "+" else value.map(lambda word: [word])
    attached = st.tuples(spelling, value).map(lambda pair: ["=".join(pair)])
    return st.one_of(st.tuples(spelling, values).map(lambda pair: [pair[0], *pair[1]]), attached)


GOOD = st.lists(st.sampled_from(OPTIONS), max_size=4, unique=True).flatmap(
    lambda chosen: st.tuples(*(_good_words(option) for option in chosen)).map(
        lambda parts: [word for part in parts for word in part]
    )
)


GRAPHS = st.lists(
    st.sampled_from([option for option in OPTIONS if option.group in ("CUDA graphs", "old options")]),
    max_size=4,
    unique=True,
).flatmap(
    lambda chosen: st.tuples(*(_good_words(option) for option in chosen)).map(
        lambda parts: [word for part in parts for word in part]
    )
)
ENVIRONMENTS = st.dictionaries(
    st.sampled_from([*VARIABLES.values(), "PYTORCH_ALLOC_CONF", "HOME"]),
    st.sampled_from(("", "0", "1", "2", "3", "8", "x", "-1", "9" * 12, "expandable_segments:True", "\u0663")),
    max_size=4,
)


def outcome(
    argv: list[str], env: Mapping[str, str] | None = None, *, for_training: bool = False
) -> RunConfig | ConfigError:
    try:
        return from_argv(argv, {} if env is None else env, for_training=for_training)
    except ConfigError as error:
        return error


def check(argv: list[str], env: Mapping[str, str] | None = None) -> None:
    env = {} if env is None else env
    config = outcome(argv, env)
    if isinstance(config, ConfigError):
        assert config.problems
        assert all(problem.code and problem.what and problem.fix for problem in config.problems)
        assert pickle.loads(pickle.dumps(config)).problems == config.problems
        assert isinstance(outcome(argv, env, for_training=True), ConfigError)
        return
    again = from_argv(config.to_argv(), env)
    assert again == config
    assert again.to_argv() == config.to_argv()
    assert again.to_json() == config.to_json()
    assert not [notice for notice in again.notices if notice.code.startswith("old-")]
    assert dataclasses.replace(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


@given(st.lists(WORDS, max_size=8))
@example(["--vocab-size", str(2**63 - 1)])
@example(["--hidden-size", str(2**62), "--num-attention-heads", "1"])
@example(["--lr-warmup-fraction", "0.9999999999999999", "--train-iters", str(2**62)])
@example(["--lr", "1e308", "--min-lr", "1e-308"])
@example(["--position-embedding-type", "rope", "--kv-channels", str(2**63 - 1)])
@example(["--split", "1e308,1e308,1e308"])
@example(["--split", "5e-324,1e308"])
def test_any_words(argv: list[str]) -> None:
    check(argv)


@given(GOOD)
def test_sensible_words(argv: list[str]) -> None:
    check(argv)


@given(GRAPHS)
@example(["--cuda-graph-scope", "full_iteration_inference", "--enable-cuda-graph"])
@example(["--cuda-graph-modules", "full", "--cuda-graph-scope", ","])
def test_old_and_new_switches(argv: list[str]) -> None:
    check(argv)


@given(GOOD, ENVIRONMENTS)
def test_any_environment(argv: list[str], env: dict[str, str]) -> None:
    check(argv, env)


NAMES = st.sampled_from([*(option.dest for option in OPTIONS), *ALIASES, "cpu_offloading", "no_such_option"])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(max_size=6),
    st.sampled_from([choice for option in OPTIONS for choice in option.choices]),
    st.lists(st.one_of(st.sampled_from((*CudaGraphModule, *OLD_MODULES)), st.integers(0, 2)), max_size=3),
    st.just({"a": 1}),
    st.just(object),
)


@given(st.dictionaries(NAMES, VALUES, max_size=5), ENVIRONMENTS)
def test_any_keywords(options: dict[str, Any], env: dict[str, str]) -> None:
    try:
        config: RunConfig | ConfigError = from_options(options, env=env)
    except ConfigError as error:
        config = error
    if isinstance(config, ConfigError):
        assert all(problem.code and problem.what and problem.fix for problem in config.problems)
    else:
        assert from_argv(config.to_argv(), env) == config


MODULE_LISTS = st.lists(st.sampled_from((*CudaGraphModule, *OLD_MODULES)), max_size=3).map(tuple)
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        name: MODULE_LISTS
        if name in ("cuda_graph_modules", "cuda_graph_scope")
        else st.booleans()
        if name.startswith(("enable", "external", "moe"))
        else st.sampled_from(("none", "local", "full_iteration", "layer", "block", "M*"))
        for name in (*OLD_NAMES.values(), *NEW_NAMES.values())
    },
)


@given(GIVEN)
def test_migrating_twice_equals_migrating_once(given_values: dict[str, Any]) -> None:
    once = migrate(given_values)
    if once.problems:
        assert once.values == given_values
        assert once.applied == ()
        return
    twice = migrate(once.values)
    assert twice.values == once.values
    assert twice.applied == ()
    assert twice.problems == ()
    assert not set(once.values) & set(OLD_NAMES.values())
    assert not set(once.values.get("cuda_graph_modules", ())) & set(OLD_MODULES)
