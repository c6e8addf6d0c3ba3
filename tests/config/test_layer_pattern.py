"""Patterns of layers: what is wrong with one, and what a wrong one does not hide."""

from __future__ import annotations

import pytest

from graphstep.config import from_argv
from graphstep.config.layer_pattern import is_layer_pattern, letters_at, pattern_fault, pattern_layers
from graphstep.errors import ConfigError


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("MX*", "letter 2 is X"),
        ("m*-", "letter 1 is m"),
        ("M, *", "letter 2 is ',', letter 3 is ' '"),
        ("abcdef*", "letter 1 is a, letter 2 is b, letter 3 is c, letter 4 is d and 2 more"),
        ("", "it has no layer"),
        ("|", "it has no layer"),
        ("/M", "it has no layer"),
        ("M//M", "no layer stands behind a /"),
        ("M/", "no layer stands behind a /"),
        ("M/M|M", "a | stands behind a /"),
    ],
)
def test_what_is_wrong_with_a_pattern(pattern: str, fault: str) -> None:
    assert not is_layer_pattern(pattern)
    assert pattern_fault(pattern) == fault


@pytest.mark.parametrize(("pattern", "layers"), [("M*-E", "M*-E"), ("M|*/M-", "M*"), ("GD", "GD")])
def test_patterns_that_can_be_read(pattern: str, layers: str) -> None:
    assert is_layer_pattern(pattern)
    assert pattern_layers(pattern) == layers


def test_letters_and_their_places() -> None:
    assert letters_at("M*G|", "GD|/") == "letter 3 is G, letter 4 is |"
    assert letters_at("M*", "GD") == ""


def problems(words: str, *, for_training: bool = True) -> dict[str, str]:
    """What is refused: code and fix of each problem."""
    with pytest.raises(ConfigError) as caught:
        from_argv(words.split(), {}, for_training=for_training)
    return {problem.code: problem.fix for problem in caught.value.problems}


def test_a_wrong_letter_hides_nothing() -> None:
    """What the other letters ask for is refused with it; what the wrong one may have meant is not."""
    found = problems("--hybrid-layer-pattern MXE --num-experts 8 --cuda-graph-impl local")
    assert set(found) == {
        "hybrid-layer-pattern-range",
        "whole-layers-need-static-experts",
        "mamba-groups-divide-heads",
    }
    found = problems("--hybrid-layer-pattern MX --num-layers 7 --cuda-graph-impl local --cuda-graph-modules attn")
    assert set(found) == {"hybrid-layer-pattern-range", "mamba-groups-divide-heads"}


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--hidden-size 128", "--mamba-num-groups 4"),
        ("--hidden-size 96 --mamba-head-dim 16 --mamba-num-groups 5", "--mamba-num-groups 4"),
        ("--hidden-size 60", "--mamba-head-dim 60 --mamba-num-groups 2"),
        ("--hidden-size 24 --num-attention-heads 2 --mamba-head-dim 7", "--mamba-head-dim 6"),
        ("--hidden-size 16 --num-attention-heads 2", "--mamba-head-dim 32 --mamba-num-groups 1"),
        ("--hidden-size 8 --num-attention-heads 2 --mamba-head-dim 48 --mamba-num-groups 1", "--mamba-head-dim 16"),
        ("--mamba-num-heads 7", "--mamba-num-groups 7"),
    ],
)
def test_sizes_that_are_offered_fit(words: str, sizes: str) -> None:
    argv = f"--hybrid-layer-pattern M* {words}"
    fix = next(iter(problems(argv).values()))
    assert f"use such as {sizes}" in fix
    assert from_argv([*argv.split(), *sizes.split()], {}, for_training=True)
