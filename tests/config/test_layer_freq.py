"""Lists of layers with experts, as Megatron-LM's users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.config.layer_freq import moe_layers, print_layer_freq, read_layer_freq


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("[0,1]", (0, 1)),
        ("(0, 1)", (0, 1)),
        ("[0]*3+[1]*2", (0, 0, 0, 1, 1)),
        ("([0]*1 + [1]*1)*2", (0, 1, 0, 1)),
        ("2*[1]", (1, 1)),
    ],
)
def test_texts_that_can_be_read(text: str, value: int | tuple[int, ...]) -> None:
    assert read_layer_freq(text) == value
    assert read_layer_freq(print_layer_freq(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "[",
        "1.5",
        "-1",
        "True",
        "[[0]]",
        "[0]+1",
        "1+1",
        "__import__('os')",
        "[0]*10**9",
        "[1]*100001",
        "9" * 50,
    ],
)
def test_texts_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="a whole number, or a list"):
        read_layer_freq(text)


@given(st.text(alphabet="[](),+*0123 -ab", max_size=20))
def test_any_text(text: str) -> None:
    try:
        value = read_layer_freq(text)
    except ValueError:
        return
    assert read_layer_freq(print_layer_freq(value)) == value


def test_layers() -> None:
    assert moe_layers(2, 5) == (True, False, True, False, True)
    assert moe_layers((0, 1), 2) == (False, True)
