"""Sizes of pipelines, and short ways to write what is expected of their orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from graphstep.errors import ConfigError
from graphstep.strategies.order_steps import OrderStep, steps_of
from graphstep.strategies.pipeline_order import pipeline_order


class Pipeline(NamedTuple):
    """Sizes that `pipeline_order` accepts."""

    size: int
    num_chunks: int
    group_size: int
    num_microbatches: int

    def order(self, rank: int, num_microbatches: int | None = None) -> tuple[int, ...]:
        return pipeline_order(
            num_microbatches or self.num_microbatches,
            pipeline_size=self.size,
            pipeline_rank=rank,
            num_model_chunks=self.num_chunks,
            microbatch_group_size=self.group_size,
        )

    def steps(self, rank: int, num_microbatches: int | None = None) -> tuple[OrderStep, ...]:
        return steps_of(self.order(rank, num_microbatches), num_chunks=self.num_chunks)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    size = draw(st.sampled_from([1, 2, 4, 8]))
    num_chunks = draw(st.sampled_from([1, 2, 4]))
    group_size = draw(st.integers(size, 2 * size + 1))
    num_left = draw(st.sampled_from([0, *range(size, group_size)]))
    num_groups = draw(st.integers(0 if num_left else 1, 4))
    return Pipeline(size, num_chunks, group_size, num_groups * group_size + num_left)


def codes(call: Callable[..., object], *args: Any, **kwargs: Any) -> list[str]:
    """The codes of what is refused, in order."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return [problem.code for problem in caught.value.problems]


def entries(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())
