"""The buckets: shapes that graphs are captured for, chosen so that each step finds one not much larger than itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphstep.config import InferenceConfig
from graphstep.inference.shapes import BatchLimits, BatchShape


@dataclass(frozen=True, slots=True)
class Ladder:
    """Buckets of one engine. What is captured and what is looked up both come from here."""

    buckets: tuple[BatchShape, ...]
    """Without repetition; most prefill tokens first, then most decode requests."""
    token_counts: tuple[int, ...]
    """The token counts of the buckets, descending."""

    def capture_order(self) -> tuple[BatchShape, ...]:
        """Return the buckets, most tokens first: later graphs then find their memory in the pool of the first."""
        return tuple(sorted(self.buckets, reverse=True))


def build_ladder(options: InferenceConfig, limits: BatchLimits, num_graphs: int | None) -> Ladder:
    """Choose the buckets.

    Args:
        options: distribution, ceiling, and whether steps with prefill have graphs.
        limits: of the engine.
        num_graphs: most token counts; -1 for an automatic number, ``None`` for no graphs at all.

    The step with as many decode requests as there can be always has a bucket, so that every decode step has one. Where
    steps with prefill have graphs, so has a step of as many tokens as the ceiling.
    """
    if num_graphs is None:
        return Ladder((), ())
    shapes = set(_decode_buckets(options, limits, num_graphs))
    if options.use_cuda_graphs_for_non_decode_steps and mixed_prefill_count(options) > 0:
        shapes.update(_mixed_buckets(options, limits, num_graphs))
    allowed = sorted(filter(limits.allows, shapes), key=lambda shape: _size(shape, limits), reverse=True)
    return Ladder(tuple(allowed), tuple(sorted({shape.tokens for shape in allowed}, reverse=True)))


def mixed_prefill_count(options: InferenceConfig) -> int:
    """Return the prefill requests of a mixed bucket, 0 for decode only."""
    return max(0, options.inference_dynamic_batching_cuda_graph_mixed_prefill_count)


def mixed_ceiling(options: InferenceConfig, limits: BatchLimits) -> int:
    """Return the most tokens of a bucket with prefill."""
    wanted = limits.max_tokens if options.inference_cuda_graph_all_prefills else options.inference_cuda_graph_max_tokens
    # More tokens than the longest sequences have together occur in no step.
    longest = limits.padded_tokens(limits.max_requests * limits.max_sequence_length)
    return min(max(wanted, limits.decode_bound), limits.max_tokens, longest)


def token_counts(options: InferenceConfig, limits: BatchLimits, num_graphs: int, ceiling: int) -> tuple[int, ...]:
    """Return the token counts up to a ceiling, descending; the ceiling is one of them, rounded to the limits' multiple.

    Args:
        options: exponential (each about half of the one before) or linear (equally far apart).
        limits: their ``token_multiple`` divides every count.
        num_graphs: most counts; -1 for an automatic number.
        ceiling: the largest count.
    """
    multiple = limits.token_multiple
    top = max(ceiling // multiple * multiple, multiple)
    if options.inference_dynamic_batching_cuda_graph_sizing_distribution == "exponential":
        counts: Iterable[int] = _exponential(num_graphs, ceiling, top, multiple)
    else:
        counts = _linear(num_graphs, ceiling, multiple)
    chosen = {count for count in counts if 0 < count <= top} | {top}
    if limits.batch_invariant:
        chosen = {limits.padded_tokens(count) for count in chosen}
    return tuple(sorted(chosen, reverse=True))


def _exponential(num_graphs: int, ceiling: int, top: int, multiple: int) -> list[int]:
    halvings = ceiling.bit_length() - 1
    if num_graphs == -1:
        num_graphs = max(4, halvings + 2)
    if num_graphs <= 1:
        return [top]
    halves = (_up(max(ceiling >> halving >> 1 << 1, 2), multiple) for halving in range(halvings + 1))
    counts = sorted({top, multiple, *(count for count in halves if count <= top)})
    # The smallest stays, for single requests; of the others those go first that are least far from the next.
    return counts[:1] + counts[1:][max(0, len(counts) - num_graphs) :]


def _linear(num_graphs: int, ceiling: int, multiple: int) -> Iterable[int]:
    if num_graphs == -1:
        counts = (1, 2, 4, *range(8, min(ceiling, 255) + 1, 8), *range(256, ceiling + 1, 16))
        return [_up(count, multiple) for count in counts]
    step = _up(_up(math.ceil(ceiling / max(1, num_graphs)), 2), multiple)
    return range(step, ceiling, step)


def _decode_buckets(options: InferenceConfig, limits: BatchLimits, num_graphs: int) -> Iterator[BatchShape]:
    each = limits.tokens_per_decode
    unit = math.lcm(each, limits.token_multiple)
    sizes = list(token_counts(options, limits, num_graphs, limits.decode_bound))
    if num_graphs == -1:
        sizes += [limits.padded_tokens(unit), limits.padded_tokens(2 * unit)]
    for size in sizes:
        requests = min(size // each, limits.max_requests)
        if limits.batch_invariant:
            yield BatchShape(size, 0, requests)
        else:
            tokens = requests * each // unit * unit
            yield BatchShape(tokens, 0, tokens // each)


def _mixed_buckets(options: InferenceConfig, limits: BatchLimits, num_graphs: int) -> Iterator[BatchShape]:
    for size in token_counts(options, limits, num_graphs, mixed_ceiling(options, limits)):
        if size < 2:
            continue
        counts = list(_prefill_counts(options, limits))
        for prefill in counts:
            decode = min((size - prefill) // limits.tokens_per_decode, limits.max_requests - prefill)
            yield BatchShape(size, prefill, decode)
        # Prompts alone: as many places as it takes to fill this many tokens.
        needed = math.ceil(size / limits.max_sequence_length)
        yield BatchShape(size, min(max(counts[0], needed), size, limits.max_requests), 0)


def _prefill_counts(options: InferenceConfig, limits: BatchLimits) -> Iterator[int]:
    """The numbers of prefill requests in mixed buckets; a number larger than a bucket's tokens gives none."""
    if options.inference_dynamic_batching_cuda_graph_sizing_distribution == "linear":
        yield min(mixed_prefill_count(options), limits.max_requests)
        return
    count = 1
    while count < limits.max_requests:
        yield count
        count *= 2
    yield limits.max_requests


def _size(shape: BatchShape, limits: BatchLimits) -> tuple[int, ...]:
    return (shape.tokens - shape.decode * limits.tokens_per_decode, shape.decode, shape.prefill)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
