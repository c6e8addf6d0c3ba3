"""The order of layers in which a backward runs side by side with the next forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest

from graphstep.capture.plan import Phase
from graphstep.errors import Problem
from graphstep.strategies.order_problems import raise_if_any, size_problems
from graphstep.strategies.order_steps import OrderStep, read_order


def order_of_layers(
    order: Sequence[float], layers_per_chunk: Sequence[int], *, delays_weight_gradients: bool = False
) -> tuple[float, ...]:
    """The order of layers when a backward overlaps the next forward, to hide the exchange of tokens between experts.

    Every layer gets an id of its own: the layers of the first chunk, then those of the second, from 1. Read the result
    with ``steps_of(result, num_chunks=sum(layers_per_chunk))``.

    - A backward that is directly followed by a forward runs together with it: the first layer of the forward, the last
      layer of the backward, the second of the forward, and so on; what one has more of follows. Each forward after the
      warmup forwards is such a one, except the first. The first layers of a chunk may have one more microbatch in
      flight for it.
    - Any other forward runs its layers in turn, any other backward in reverse.
    - With ``delays_weight_gradients``, those of a layer come behind the backward of the next layer of the pair, which
      other ranks may wait for, and those of the last one at the end of the pair. Of a backward that runs alone, each
      layer's come directly after it: nothing can hide them any more.

    Args:
        order: of whole chunks, without entries for weight gradients, as `pipeline_order` makes it. What are warmup
            forwards follows from it.
        layers_per_chunk: may be 0 for a chunk with nothing to capture, but not for all.
        delays_weight_gradients: weight gradients have entries of their own.

    Raises:
        ConfigError: as `steps_of`, or no layers, or the order has weight gradients already.
    """
    sizes = {f"layers_per_chunk[{chunk}]": num for chunk, num in enumerate(layers_per_chunk)}
    problems = size_problems(sizes, at_least=0)
    if not any(layers_per_chunk):
        problems.append(
            Problem(
                code="order-no-layers",
                what=f"at least one chunk has layers, got layers_per_chunk={list(layers_per_chunk)}",
                where="argument layers_per_chunk",
                fix="capture nothing on a rank that has nothing to capture",
            )
        )
    steps: tuple[OrderStep, ...] = ()
    if layers_per_chunk:
        steps, order_problems = read_order(order, len(layers_per_chunk), "order")
        problems += order_problems
    if any(step.phase is Phase.WEIGHT_GRADIENT for step in steps):
        problems.append(
            Problem(
                code="order-weight-gradients-twice",
                what="the order of whole chunks has no entries for weight gradients, got some",
                where="order",
                fix="leave such entries out, and say delays_weight_gradients=True",
            )
        )
    raise_if_any(problems)

    ends = accumulate(layers_per_chunk)
    ids = [range(end - num + 1, end + 1) for end, num in zip(ends, layers_per_chunk, strict=True)]
    return tuple(_entries_of_layers(steps, ids, delays_weight_gradients))


def _entries_of_layers(
    steps: Sequence[OrderStep], ids: Sequence[range], delays_weight_gradients: bool
) -> Iterator[float]:
    overlapped: OrderStep | None = None
    for step, following in zip_longest(steps, steps[1:]):
        if step.phase is Phase.FORWARD:
            backward = ids[overlapped.chunk][::-1] if overlapped else range(0)
            yield from _side_by_side(ids[step.chunk], backward, delays_weight_gradients)
            overlapped = None
        elif following is not None and following.phase is Phase.FORWARD:
            overlapped = step
        else:
            for layer in reversed(ids[step.chunk]):
                yield -layer
                if delays_weight_gradients:
                    yield -layer - 0.5


def _side_by_side(forward: range, backward: range, delays_weight_gradients: bool) -> Iterator[float]:
    waiting: int | None = None
    for forward_layer, backward_layer in zip_longest(forward, backward):
        if forward_layer is not None:
            yield forward_layer
        if backward_layer is not None:
            yield -backward_layer
            if delays_weight_gradients:
                if waiting is not None:
                    yield -waiting - 0.5
                waiting = backward_layer
    if waiting is not None:
        yield -waiting - 0.5
