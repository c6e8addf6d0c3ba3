"""The orders of schedules: one stage, one forward and one backward in turn (1F1B), interleaved.

See :mod:`graphstep.strategies.order_steps` for what an order is.

Sources: one forward, one backward in turn (1F1B), Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training"
(arXiv 2006.09503), section 3.2; the interleaved schedule, Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters" (arXiv 2104.04473), section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphstep.errors import Problem
from graphstep.strategies.order_problems import is_size, is_whole, raise_if_any, size_problems
from graphstep.strategies.order_steps import steps_of


def schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size: int
) -> tuple[tuple[int, int], ...]:
    """(microbatch, chunk) of each forward of an interleaved schedule, both from 0, in the order in which they run.

    A group of microbatches goes through chunk after chunk before the next group begins. The last group may be shorter.

    Raises:
        ConfigError: a size is not a whole number of at least 1.
    """
    sizes = {
        "num_microbatches": num_microbatches,
        "num_model_chunks": num_model_chunks,
        "microbatch_group_size": microbatch_group_size,
    }
    raise_if_any(size_problems(sizes))
    return tuple(
        (microbatch, chunk)
        for first in range(0, num_microbatches, microbatch_group_size)
        for chunk in range(num_model_chunks)
        for microbatch in range(first, min(first + microbatch_group_size, num_microbatches))
    )


def num_warmup_forwards(
    pipeline_size: int,
    pipeline_rank: int,
    num_microbatches: int,
    num_model_chunks: int = 1,
    microbatch_group_size: int | None = None,
) -> int:
    """How many forwards a rank runs before forward and backward begin to take turns, forward first.

    With one chunk (1F1B), as many as there are stages after this one: 0 for one stage. With more (interleaved), twice
    as many and a group for each chunk but the last, also for one stage: the first backward is one of the last chunk,
    whose forward comes only then. Never more than there are forwards.

    Args:
        pipeline_size: stages of the pipeline.
        pipeline_rank: this stage, from 0.
        num_microbatches: of a step.
        num_model_chunks: of each stage.
        microbatch_group_size: microbatches that go through a chunk before the next chunk's turn; the pipeline size
            if None. Nothing depends on it with one chunk.

    Raises:
        ConfigError: what `pipeline_order` refuses.

    Source: arXiv 2104.04473, section 2.2, and its implementation in Megatron-LM. The first microbatch reaches the last
    chunk of the rank after the groups of the other chunks, and is back from the last stage after going through the
    later stages twice; forwards fill that time. 1F1B waits instead, and keeps fewer microbatches in flight.
    """
    raise_if_any(
        _schedule_problems(pipeline_size, pipeline_rank, num_microbatches, num_model_chunks, microbatch_group_size)
    )
    num_later_stages = pipeline_size - pipeline_rank - 1
    num_warmup = num_later_stages
    if num_model_chunks > 1:
        num_warmup += num_later_stages + (num_model_chunks - 1) * (microbatch_group_size or pipeline_size)
    return min(num_warmup, num_microbatches * num_model_chunks)


def order_of(table: Sequence[tuple[int, int]], num_warmup: int, num_model_chunks: int) -> tuple[int, ...]:
    """The order that follows from a table of forwards: warmup forwards, forward and backward in turn, what is left.

    The backwards follow the same table with the chunks mirrored, the last one first.

    Args:
        table: (microbatch, chunk) of each forward, as `schedule_table` has it.
        num_warmup: forwards before the alternation, 0 to the length of the table.
        num_model_chunks: chunks of the rank.

    Raises:
        ConfigError: a chunk or ``num_warmup`` is out of range, or the order is not one that can run (see `steps_of`):
            too few warmup forwards, or chunks with different numbers of microbatches.
    """
    problems = size_problems({"num_model_chunks": num_model_chunks})
    if not is_whole(num_warmup) or not 0 <= num_warmup <= len(table):
        problems.append(
            Problem(
                code="pipeline-warmup",
                what=f"num_warmup is between 0 and the {len(table)} forwards of the table, got {num_warmup!r}",
                where="argument num_warmup",
                fix="use num_warmup_forwards",
            )
        )
    problems += [
        Problem(
            code="pipeline-table",
            what=f"chunks of the table are from 0 and below num_model_chunks={num_model_chunks}, got {chunk!r}",
            where=f"table[{position}]",
            fix="use schedule_table with the same number of chunks",
        )
        for position, (_, chunk) in enumerate(table)
        if not is_whole(chunk) or chunk < 0 or (is_size(num_model_chunks) and chunk >= num_model_chunks)
    ]
    raise_if_any(problems)

    forwards = [chunk + 1 for _, chunk in table]
    backwards = [chunk - num_model_chunks for _, chunk in table]
    num_pairs = len(table) - num_warmup
    order = forwards[:num_warmup]
    for pair in zip(forwards[num_warmup:], backwards[:num_pairs], strict=True):
        order += pair
    order += backwards[num_pairs:]
    steps_of(order, num_chunks=num_model_chunks, names=f"order_of(num_warmup={num_warmup})")
    return tuple(order)


def pipeline_order(
    num_microbatches: int,
    *,
    pipeline_size: int = 1,
    pipeline_rank: int = 0,
    num_model_chunks: int = 1,
    microbatch_group_size: int | None = None,
) -> tuple[int, ...]:
    """The order of one rank: ``1 -1 1 -1 ...`` without a pipeline, 1F1B, or interleaved with several chunks.

    Args:
        num_microbatches: of a step.
        pipeline_size: stages of the pipeline.
        pipeline_rank: this stage, from 0.
        num_model_chunks: of each stage; more than 1: the interleaved schedule.
        microbatch_group_size: see `num_warmup_forwards`.

    Raises:
        ConfigError: a size is below 1 or the rank outside the pipeline; or, with several chunks, a group is smaller
            than the pipeline, or the last of several groups is. Such ranks can wait for each other forever: a stage
            goes on to the next chunk before its first microbatch has come round the pipeline.
    """
    num_warmup = num_warmup_forwards(
        pipeline_size, pipeline_rank, num_microbatches, num_model_chunks, microbatch_group_size
    )
    table = schedule_table(num_microbatches, num_model_chunks, microbatch_group_size or pipeline_size)
    return order_of(table, num_warmup, num_model_chunks)


def _schedule_problems(
    pipeline_size: int, pipeline_rank: int, num_microbatches: int, num_model_chunks: int, group_size: int | None
) -> list[Problem]:
    sizes = {
        "pipeline_size": pipeline_size,
        "num_microbatches": num_microbatches,
        "num_model_chunks": num_model_chunks,
    }
    if group_size is None:
        group_size = pipeline_size
    else:
        sizes["microbatch_group_size"] = group_size
    problems = size_problems(sizes)
    num_ranks = pipeline_size if is_size(pipeline_size) else math.inf
    if not is_whole(pipeline_rank) or not 0 <= pipeline_rank < num_ranks:
        problems.append(
            Problem(
                code="pipeline-rank",
                what=f"a rank is from 0 and below pipeline_size={pipeline_size!r}, got {pipeline_rank!r}",
                where="argument pipeline_rank",
                fix="give the rank in the group of the pipeline, not that of the process",
            )
        )
    if not all(map(is_size, sizes.values())) or num_model_chunks == 1:
        return problems
    num_left = num_microbatches % group_size
    if group_size < pipeline_size:
        problems.append(
            Problem(
                code="pipeline-group-size",
                what=f"a group has at least one microbatch for each of {pipeline_size} stages, got {group_size}",
                where="argument microbatch_group_size",
                fix=f"use {pipeline_size} or more",
            )
        )
    elif num_microbatches > group_size and 0 < num_left < pipeline_size:
        problems.append(
            Problem(
                code="pipeline-microbatches",
                what=f"what groups of {group_size} leave of the microbatches is none, or at least one for each of "
                f"{pipeline_size} stages, got {num_left} of {num_microbatches}",
                where="argument num_microbatches",
                fix=f"use {num_microbatches - num_left} or {num_microbatches - num_left + pipeline_size} microbatches",
            )
        )
    return problems
