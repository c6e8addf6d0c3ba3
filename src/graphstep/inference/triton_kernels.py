"""Kernels for a GPU: rotation and writing into pages, attention of decode steps, attention of mixed steps.

Everything that changes from step to step is read on the device, at fixed addresses; grids follow from the bucket. What
lies beyond a request's context is never loaded, so that it may be anything, NaN included.

Imported only where there is a GPU: Triton comes with CUDA builds of PyTorch. Parameters carry no types, because the
compiler of these functions reads annotations itself.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

# ruff: noqa: PLR0917

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_and_write_kernel(
    qkv,
    cos,
    sin,
    slots,
    queries,
    pages,
    qkv_stride,
    table_stride,
    slot_stride,
    value_offset,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program for ROWS of a token's query, key and value heads. HALF: half of the channels that rotate, or 0."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    is_there = (row < HEADS + 2 * GROUPS)[:, None] & (channel < CHANNELS)[None, :]
    offsets = row[:, None] * CHANNELS + channel[None, :]
    x = tl.load(qkv + token * qkv_stride + offsets, mask=is_there, other=0.0)
    if HALF > 0:
        is_rotated = is_there & (row < HEADS + GROUPS)[:, None] & (channel < 2 * HALF)[None, :]
        partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
        other = tl.load(
            qkv + token * qkv_stride + row[:, None] * CHANNELS + partner[None, :], mask=is_rotated, other=0.0
        )
        c = tl.load(cos + token * table_stride + channel, mask=channel < 2 * HALF, other=1.0)
        s = tl.load(sin + token * table_stride + channel, mask=channel < 2 * HALF, other=0.0)
        # Rounded where the operations of the training forward round.
        product = (x.to(tl.float32) * c.to(tl.float32)[None, :]).to(x.dtype).to(tl.float32)
        turned = other.to(tl.float32) * s.to(tl.float32)[None, :]
        rotated = tl.where((channel < HALF)[None, :], product - turned, product + turned)
        x = tl.where(is_rotated, rotated.to(x.dtype), x)
    is_query = is_there & (row < HEADS)[:, None]
    tl.store(queries + token * (HEADS * CHANNELS) + offsets, x, mask=is_query)
    slot = tl.load(slots + token)
    group = row - HEADS
    is_value = group >= GROUPS
    group = tl.where(is_value, group - GROUPS, group)
    place = slot * slot_stride + tl.where(is_value, value_offset, 0)[:, None] + group[:, None] * CHANNELS
    tl.store(pages + place + channel[None, :], x, mask=is_there & (row >= HEADS)[:, None])


@triton.jit
def _attend_to_tile(
    query,
    best,
    total,
    sums,
    visible,
    in_range,
    keys,
    pages,
    table,
    group,
    block_stride,
    slot_stride,
    value_offset,
    scale,
    PAGE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One more tile of keys for the running softmax. Exponents are of two; ``scale`` contains log2(e)."""
    channel = tl.arange(0, WIDTH)
    is_channel = channel < CHANNELS
    block = tl.load(table + keys // PAGE, mask=in_range, other=0).to(tl.int64)
    place = block * block_stride + (keys % PAGE) * slot_stride + group * CHANNELS
    k = tl.load(pages + place[None, :] + channel[:, None], mask=in_range[None, :] & is_channel[:, None], other=0.0)
    scores = tl.dot(query, k, input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    left = tl.exp2(best - new_best)
    v = tl.load(
        pages + value_offset + place[:, None] + channel[None, :],
        mask=in_range[:, None] & is_channel[None, :],
        other=0.0,
    )
    sums = sums * left[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_best, total * left + tl.sum(weights, 1), sums


@triton.jit
def decode_kernel(
    queries,
    pages,
    tables,
    contexts,
    partial,
    weights,
    out,
    table_stride,
    block_stride,
    slot_stride,
    value_offset,
    scale,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    PAGE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program for a request, a key head and a part of the context; token i is that of request i.

    With one part it writes the result, otherwise its sums, and the logarithm of their weight; -inf for an empty part.
    """
    request, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + request)
    tiles_each = tl.cdiv(tl.cdiv(context, KEYS), SPLITS)
    begin = part * tiles_each * KEYS
    end = tl.minimum(context, begin + tiles_each * KEYS)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    head = group * REPEATS + row
    is_there = (row < REPEATS)[:, None] & (channel < CHANNELS)[None, :]
    token = request.to(tl.int64)
    offsets = (token * HEADS + head)[:, None] * CHANNELS + channel[None, :]
    query = tl.load(queries + offsets, mask=is_there, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        in_range = keys < end
        best, total, sums = _attend_to_tile(
            query,
            best,
            total,
            sums,
            in_range[None, :],
            in_range,
            keys,
            pages,
            tables + token * table_stride,
            group,
            block_stride,
            slot_stride,
            value_offset,
            scale,
            PAGE,
            CHANNELS,
            WIDTH,
        )
    # Without a key the sums are zero, and so is the result.
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_there)
    else:
        place = (token * HEADS + head) * SPLITS + part
        tl.store(partial + place[:, None] * CHANNELS + channel[None, :], result, mask=is_there)
        weight = tl.where(total == 0.0, float("-inf"), best + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(weights + place, weight, mask=row < REPEATS)


@triton.jit
def join_parts_kernel(partial, weights, out, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """One program for a request and a query head: the parts of its context, weighted."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    channel = tl.arange(0, WIDTH)
    weight = tl.load(weights + row * SPLITS + part)
    is_there = weight != float("-inf")
    best = tl.max(weight, 0)
    share = tl.where(is_there, tl.exp2(weight - best), 0.0)
    total = tl.sum(share, 0)
    values = tl.load(
        partial + (row * SPLITS + part)[:, None] * CHANNELS + channel[None, :],
        mask=is_there[:, None] & (channel < CHANNELS)[None, :],
        other=0.0,
    )
    result = tl.sum(values * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * CHANNELS + channel, result.to(out.dtype.element_ty), mask=channel < CHANNELS)


@triton.jit(do_not_specialize=["num_requests", "num_search_steps"])
def mixed_kernel(
    queries,
    pages,
    tables,
    query_starts,
    contexts,
    out,
    num_requests,
    num_search_steps,
    table_stride,
    block_stride,
    slot_stride,
    value_offset,
    scale,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    REPEATS_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program for QUERIES tokens of one request, with all query heads of a key head.

    Request r has its tiles from number ``query_starts[r] // QUERIES + r`` on, which is at least as many as it needs;
    the others have nothing to do. The numbers of requests are no constants: steps without a graph have many, and each
    would be compiled.
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    low = tile * 0
    high = low + num_requests
    for _ in range(num_search_steps):  # the last request that starts at this tile or before
        middle = (low + high) // 2
        is_before = tl.load(query_starts + middle) // QUERIES + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    request = low
    start = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - start
    first = (tile - start // QUERIES - request) * QUERIES
    context = tl.load(contexts + request)
    row = tl.arange(0, QUERIES * REPEATS_PADDED)
    query_number = first + row // REPEATS_PADDED
    repeat = row % REPEATS_PADDED
    position = context - length + query_number
    is_row = (query_number < length) & (repeat < REPEATS)
    end = tl.where(first < length, tl.minimum(context, context - length + first + QUERIES), 0)
    channel = tl.arange(0, WIDTH)
    is_there = is_row[:, None] & (channel < CHANNELS)[None, :]
    token = (start + query_number).to(tl.int64)
    offsets = (token * HEADS + group * REPEATS + repeat)[:, None] * CHANNELS + channel[None, :]
    query = tl.load(queries + offsets, mask=is_there, other=0.0)
    best = tl.full([QUERIES * REPEATS_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * REPEATS_PADDED], tl.float32)
    sums = tl.zeros([QUERIES * REPEATS_PADDED, WIDTH], tl.float32)
    for begin in range(0, end, KEYS):
        keys = begin + tl.arange(0, KEYS)
        in_range = keys < end
        # Every row sees the key at position 0, so that no row of the first tile is empty.
        visible = in_range[None, :] & (keys[None, :] <= position[:, None])
        best, total, sums = _attend_to_tile(
            query,
            best,
            total,
            sums,
            visible,
            in_range,
            keys,
            pages,
            tables + request.to(tl.int64) * table_stride,
            group,
            block_stride,
            slot_stride,
            value_offset,
            scale,
            PAGE,
            CHANNELS,
            WIDTH,
        )
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_there)
