"""Attention over the paged cache, and writing to it, as Triton kernels. They own nothing and check nothing.

A cache tensor is [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM], contiguous. A program works on one KV head and the
G query heads that share it. These are rows of one tile, so that a key is read once for all of them. Tokens
that no query of a tile may see are never loaded: a previous owner may have left NaN there. Table entries of
blocks that slid out of a window are not read either.

Softmax uses powers of two, as the hardware does: `scale` and `cap` already include log₂ e. `WIDE` is for
Triton's interpreter, which multiplies bfloat16 as if its bits were integers.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, SIM102  a kernel's arguments are pointers and compile-time constants
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def write_cache(
    key,  # [T, KV_HEADS, HEAD_DIM], the last dimension contiguous
    value,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_slots,  # [T], negative: not written
    keys,
    values,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUMBERS: tl.constexpr,  # KV_HEADS · HEAD_DIM, rounded up to a power of two
):
    """Program t: write token t's key and value to the cache."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(cache_slots + token).to(tl.int64)
    if slot < 0:
        return
    number = tl.arange(0, NUMBERS)
    head, channel = number // HEAD_DIM, number % HEAD_DIM
    inside = number < KV_HEADS * HEAD_DIM
    to = slot * (KV_HEADS * HEAD_DIM) + number
    copied = tl.load(key + token * key_token_stride + head * key_head_stride + channel, mask=inside)
    tl.store(keys + to, copied, mask=inside)
    copied = tl.load(value + token * value_token_stride + head * value_head_stride + channel, mask=inside)
    tl.store(values + to, copied, mask=inside)


@triton.jit
def _attend(
    q,  # [ROWS, CHANNELS]
    keys,
    values,
    line,  # the sequence's row of the block table
    kv_head,
    start,  # of the first tile
    first,  # no row attends to tokens before this one
    end,  # or from this one on
    position,  # [ROWS]
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,  # a row attends to tokens up to its `position`, and to WINDOW of them at most
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend to the tokens of one KV head, a tile at a time.

    Return for each row: the highest score, the sum of its weights, and its weighted values, not yet divided.
    """
    channel = tl.arange(0, CHANNELS)
    is_channel = channel < HEAD_DIM
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for at in range(start, end, TILE):
        token = at + tl.arange(0, TILE)
        seen = (token >= first) & (token < end)
        block = tl.load(line + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        place = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        mask = is_channel[:, None] & seen[None, :]
        key = tl.load(keys + place[None, :] + channel[:, None], mask=mask, other=0.0)
        mask = seen[:, None] & is_channel[None, :]
        value = tl.load(values + place[:, None] + channel[None, :], mask=mask, other=0.0)
        if WIDE:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(q, key, input_precision=PRECISION) * scale
        if CAPPED:
            # tanh(x) = 1 − 2 / (e²ˣ + 1), which reaches its limits where the power overflows.
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))
        visible = seen[None, :]
        if CAUSAL:
            visible = visible & (token[None, :] <= position[:, None])
            if WINDOW:
                visible = visible & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        peak = higher
    return peak, mass, total


@triton.jit
def decode(
    query,  # [B, H, HEAD_DIM]
    query_token_stride,
    query_head_stride,
    keys,
    values,
    table,  # [slots, columns]
    table_stride,
    slots,  # [B]
    lengths,  # [B], 0 for a padding row
    output,  # [B, H · HEAD_DIM]
    sums,  # [B, H, SPLITS, CHANNELS] float32, each split's weighted values, not yet divided
    highest,  # [B, H, SPLITS] float32
    masses,  # [B, H, SPLITS] float32
    scale,
    cap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,  # at least HEADS / KV_HEADS
    TILE: tl.constexpr,  # tokens at a time
    SPLITS: tl.constexpr,
    LEAST_TILES: tl.constexpr,  # per split
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (b, k, s): attend with row b's newest token to split s of what it sees in KV head k.

    A sequence is split evenly over as many programs as its length justifies; the others return at once.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    G: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(lengths + row)
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    origin = first // TILE * TILE
    tiles = tl.maximum(tl.cdiv(tl.cdiv(length - origin, TILE), SPLITS), LEAST_TILES)
    start = origin + split * tiles * TILE
    end = tl.minimum(start + tiles * TILE, length)
    if SPLITS > 1:
        if start >= end:
            return

    line = table + tl.load(slots + row).to(tl.int64) * table_stride
    rank = tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    head = kv_head * G + rank
    is_head = rank < G
    is_channel = channel < HEAD_DIM
    is_output = is_head[:, None] & is_channel[None, :]
    q = tl.load(
        query + row * query_token_stride + head[:, None] * query_head_stride + channel[None, :],
        mask=is_output,
        other=0.0,
    )
    if WIDE:
        q = q.to(tl.float32)
    # fmt: off
    peak, mass, total = _attend(
        q, keys, values, line, kv_head, start, first, end, head, scale, cap,
        KV_HEADS, HEAD_DIM, CHANNELS, BLOCK_SIZE, False, WINDOW, CAPPED, ROWS, TILE, PRECISION, WIDE,
    )
    # fmt: on
    if SPLITS == 1:
        total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        to = output + row * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + channel[None, :]
        tl.store(to, total.to(output.dtype.element_ty), mask=is_output)
    else:
        part = (row * HEADS + head) * SPLITS + split
        tl.store(sums + part[:, None] * CHANNELS + channel[None, :], total, mask=is_head[:, None])
        tl.store(highest + part, peak, mask=is_head)
        tl.store(masses + part, mass, mask=is_head)


@triton.jit
def combine(
    lengths,
    output,
    sums,
    highest,
    masses,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
):
    """Program (b, h): combine the results of row b's splits for head h; zero if there were none."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    span = length - first // TILE * TILE
    tiles = tl.maximum(tl.cdiv(tl.cdiv(span, TILE), SPLITS), LEAST_TILES)
    split = tl.arange(0, SPLITS)
    used = split * tiles * TILE < span
    part = (row * HEADS + head) * SPLITS + split
    peak = tl.load(highest + part, mask=used, other=float("-inf"))
    best = tl.max(peak, 0)
    shrink = tl.exp2(peak - tl.where(best == float("-inf"), 0.0, best))
    mass = tl.sum(tl.load(masses + part, mask=used, other=0.0) * shrink, 0)
    channel = tl.arange(0, CHANNELS)
    total = tl.load(sums + part[:, None] * CHANNELS + channel[None, :], mask=used[:, None], other=0.0)
    total = tl.sum(total * shrink[:, None], 0) / tl.where(mass == 0.0, 1.0, mass)
    to = output + row * (HEADS * HEAD_DIM) + head * HEAD_DIM + channel
    tl.store(to, total.to(output.dtype.element_ty), mask=channel < HEAD_DIM)


@triton.jit
def _row_of_tile(query_starts, tile, origin, first_row, rows, Q: tl.constexpr):
    """Return the row that a tile belongs to, by bisection."""
    low = first_row
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        fits = (tl.load(query_starts + middle) - origin) // Q + middle - first_row <= tile
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@triton.jit(do_not_specialize=["first_row", "rows"])
def prefill(
    query,  # [T, H, HEAD_DIM]
    query_token_stride,
    query_head_stride,
    keys,
    values,
    table,
    table_stride,
    slots,  # [R]
    lengths,  # [R], including this step's tokens
    query_starts,  # [R + 1]
    output,  # [T, H · HEAD_DIM]
    first_row,  # the rows before it are decodes, which `decode` handles
    rows,  # R
    scale,
    cap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile: tokens × query heads of the group
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (i, k): attend with tile i of a step's tokens to all that they see in KV head k.

    Row r begins with tile (start of r) // Q + r, where Q tokens fit a tile. This gives every row enough
    tiles whatever its length; a program finds its row by bisection, so no list is needed.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    G: tl.constexpr = HEADS // KV_HEADS
    Q: tl.constexpr = ROWS // G
    origin = tl.load(query_starts + first_row)
    low = _row_of_tile(query_starts, tile, origin, first_row, rows, Q)
    begin = tl.load(query_starts + low)
    count = tl.load(query_starts + low + 1) - begin
    done = (tile - (begin - origin) // Q - (low - first_row)) * Q
    if done >= count:
        return

    length = tl.load(lengths + low)
    line = table + tl.load(slots + low).to(tl.int64) * table_stride
    start = length - count
    rank = tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    offset = done + rank // G
    head = kv_head * G + rank % G
    is_query = (rank < Q * G) & (offset < count)
    is_channel = channel < HEAD_DIM
    is_output = is_query[:, None] & is_channel[None, :]
    token_of_step = (begin + offset).to(tl.int64)
    q = tl.load(
        query
        + token_of_step[:, None] * query_token_stride
        + head[:, None] * query_head_stride
        + channel[None, :],
        mask=is_output,
        other=0.0,
    )
    if WIDE:
        q = q.to(tl.float32)
    last = start + tl.minimum(done + Q, count) - 1
    first = 0
    if WINDOW:
        first = tl.maximum(start + done - WINDOW + 1, 0)
    # fmt: off
    _, mass, total = _attend(
        q, keys, values, line, kv_head, first // TILE * TILE, first, last + 1, start + offset, scale, cap,
        KV_HEADS, HEAD_DIM, CHANNELS, BLOCK_SIZE, True, WINDOW, CAPPED, ROWS, TILE, PRECISION, WIDE,
    )
    # fmt: on
    total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    to = output + token_of_step[:, None] * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + channel[None, :]
    tl.store(to, total.to(output.dtype.element_ty), mask=is_output)
