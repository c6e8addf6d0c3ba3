"""Which layers have experts: a number, or a list written as Megatron-LM's users write it."""

from __future__ import annotations

import ast

from graphstep.errors import ConfigError, Problem

MAX_LAYERS = 100_000
LAYER_FREQ = "int | tuple[int, ...]"
"""The annotation of the field."""
_FIX = "write a number such as 2, or a list such as [0,1] or ([0]*3+[1]*9)"


def read_layer_freq(text: str) -> int | tuple[int, ...]:
    """Return what ``--moe-layer-freq`` says.

    Args:
        text: a whole number, or a list of 0 and 1 put together with ``+`` and ``*``. Nothing is executed.

    Raises:
        ValueError: something else.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError("a whole number, or a list such as [0,1] or ([0]*3+[1]*9)") from error
    return value if isinstance(value, int) else tuple(value)


def _value(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool) and 0 <= number <= MAX_LAYERS:
            return number
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            items = [_value(element) for element in elements]
            if all(isinstance(item, int) for item in items):
                return [item for item in items if isinstance(item, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list):
                return _limited(first + second)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int) and len(first) * second <= MAX_LAYERS:
                return first * second
    raise ValueError("not a list of numbers")


def _limited(items: list[int]) -> list[int]:
    if len(items) > MAX_LAYERS:
        raise ValueError("too many layers")
    return items


def as_layer_freq(value: object) -> int | tuple[int, ...]:
    """Return a number or a sequence of numbers in the form that a configuration holds.

    Raises:
        ConfigError: something else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return read_layer_freq(value)
        except ValueError:
            value = None
    if isinstance(value, list | tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return tuple(value)
    what = f"moe_layer_freq: expected a whole number or a list of 0 and 1, got {value!r}"
    raise ConfigError(Problem("moe-layer-freq-type", what, "--moe-layer-freq", _FIX))


def print_layer_freq(freq: int | tuple[int, ...]) -> str:
    """Return what :func:`read_layer_freq` reads back."""
    return str(freq) if isinstance(freq, int) else "[" + ",".join(str(entry) for entry in freq) + "]"


def moe_layers(freq: int | tuple[int, ...], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: of every n-th layer, the first one."""
    if isinstance(freq, int):
        step = max(freq, 1)
        return tuple(layer % step == 0 for layer in range(min(num_layers, MAX_LAYERS)))
    return tuple(entry == 1 for entry in freq[: max(num_layers, 0)])
