"""For any list of words: a configuration whose printed form parses to itself, or a ``ConfigError``."""

from __future__ import annotations

import dataclasses
import pickle

from hypothesis import example, given
from hypothesis import strategies as st

from graphstep.config import RunConfig, from_argv
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


def outcome(argv: list[str], *, for_training: bool = False) -> RunConfig | ConfigError:
    try:
        return from_argv(argv, for_training=for_training)
    except ConfigError as error:
        return error


def check(argv: list[str]) -> None:
    config = outcome(argv)
    if isinstance(config, ConfigError):
        assert config.problems
        assert all(problem.code and problem.what and problem.fix for problem in config.problems)
        assert pickle.loads(pickle.dumps(config)).problems == config.problems
        assert isinstance(outcome(argv, for_training=True), ConfigError)
        return
    assert from_argv(config.to_argv()) == config
    assert from_argv(config.to_argv()).to_argv() == config.to_argv()
    assert dataclasses.replace(config) == config
    assert config.to_json() == from_argv(config.to_argv()).to_json()


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
