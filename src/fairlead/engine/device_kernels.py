"""Triton kernels for the parts of a step on a GPU other than matrix products and attention.

Each saves passes over memory, and launches. They own nothing and check nothing. T tokens, C hidden size, V
vocabulary; arithmetic is in float32.
"""

# ruff: noqa: ANN001, ANN201, N803, N806  a kernel's arguments are pointers and compile-time constants
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["padded_tokens", "padded_rows", "vocabulary"])
def unpack(
    arena,  # a step as `inputbatch` writes it: int32 words, the header first
    latest,  # [S] tokens chosen by the previous step
    token_ids,  # [padded_tokens]
    positions,  # [padded_tokens]
    cache_slots,  # [GROUPS, cache_slots_stride]
    cache_slots_stride,
    starts,  # [padded_rows + 1]
    lengths,  # [padded_rows]
    table_rows,  # [padded_rows]
    tables,  # [GROUPS, slots, columns]
    slots,
    columns,
    padded_tokens,
    padded_rows,
    vocabulary,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    WRITERS: tl.constexpr,
):
    """Unpack a step into memory at fixed addresses, and update the block tables.

    A token that was still unknown is replaced by what the previous step chose; an id outside the vocabulary
    runs as 0. Padding rows follow the step's own, up to the padded numbers. The first WRITERS programs share
    the table's changes, each a header of 4 words (group, slot, column, count) and block ids.
    """
    program = tl.program_id(0)
    if program < WRITERS:
        at = tl.load(arena + 15)
        number = tl.load(arena + 5)
        for write in range(number):
            count = tl.load(arena + at + 3)
            if write % WRITERS == program:
                group = tl.load(arena + at).to(tl.int64)
                table_row = group * slots + tl.load(arena + at + 1)
                to = tables + table_row * columns + tl.load(arena + at + 2)
                for done in range(0, count, TILE):
                    i = done + tl.arange(0, TILE)
                    tl.store(to + i, tl.load(arena + at + 4 + i, mask=i < count), mask=i < count)
            at += 4 + count
        return

    i = (program - WRITERS) * TILE + tl.arange(0, TILE)
    tokens = tl.load(arena)
    rows = tl.load(arena + 1)
    is_token = i < tokens
    token_id = tl.load(arena + tl.load(arena + 7) + i, mask=is_token, other=0)
    late = is_token & (token_id < 0)
    token_id = tl.where(late, tl.load(latest + (-1 - token_id), mask=late, other=0).to(tl.int32), token_id)
    token_id = tl.where((token_id >= 0) & (token_id < vocabulary), token_id, 0)
    tl.store(token_ids + i, token_id, mask=i < padded_tokens)
    position = tl.load(arena + tl.load(arena + 8) + i, mask=is_token, other=0)
    tl.store(positions + i, position, mask=i < padded_tokens)
    mapping = tl.load(arena + 9)
    for group in tl.static_range(GROUPS):
        slot = tl.load(arena + mapping + group * tokens + i, mask=is_token, other=-1)
        tl.store(cache_slots + group * cache_slots_stride + i, slot, mask=i < padded_tokens)
    start = tl.load(arena + tl.load(arena + 10) + i, mask=i <= rows, other=0)
    tl.store(starts + i, tl.where(i <= rows, start, tokens), mask=i <= padded_rows)
    length = tl.load(arena + tl.load(arena + 11) + i, mask=i < rows, other=0)
    tl.store(lengths + i, length, mask=i < padded_rows)
    table_row = tl.load(arena + tl.load(arena + 12) + i, mask=i < rows, other=0)
    tl.store(table_rows + i, table_row, mask=i < padded_rows)


@triton.jit
def add_and_normalize(
    stream,  # [T, C] float32
    output,  # [T, C] added to the stream
    output_weight,  # [C], of the norm applied to `output` first
    weight,  # [C]
    normal,  # [T, C]
    epsilon,
    SIZE: tl.constexpr,  # C
    TILE: tl.constexpr,  # C rounded up to a power of two
    ADDS: tl.constexpr,
    OUTPUT_NORM: tl.constexpr,
):
    """Program t: add to token t's stream in place, and normalize the sum: x / rms(x) · weight."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    inside = i < SIZE
    x = tl.load(stream + token * SIZE + i, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(output + token * SIZE + i, mask=inside, other=0.0).to(tl.float32)
        if OUTPUT_NORM:
            added *= tl.rsqrt(tl.sum(added * added, 0) / SIZE + epsilon)
            added *= tl.load(output_weight + i, mask=inside, other=0.0).to(tl.float32)
        x += added
        tl.store(stream + token * SIZE + i, x, mask=inside)
    x *= tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    x *= tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(normal + token * SIZE + i, x.to(normal.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_store(
    qkv,  # [T, HEADS + 2 · KV_HEADS, HEAD_DIM]
    cosines,  # [T, HEAD_DIM]
    sines,  # [T, HEAD_DIM], signed
    weight,  # [HEADS + KV_HEADS, HEAD_DIM]
    cache_slots,  # [T], negative: not written
    query,  # [T, HEADS, HEAD_DIM]
    keys,
    values,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    NORM: tl.constexpr,
):
    """Program (t, h): normalize and rotate a head; write queries to `query`, keys and values to the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, CHANNELS)
    inside = i < HEAD_DIM
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    x = tl.load(source + i, mask=inside, other=0.0)
    slot = tl.load(cache_slots + token).to(tl.int64)
    if head >= HEADS + KV_HEADS:
        if slot >= 0:
            to = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * HEAD_DIM
            tl.store(to + i, x, mask=inside)
        return
    HALF: tl.constexpr = HEAD_DIM // 2
    j = tl.where(i < HALF, i + HALF, i - HALF)
    x = x.to(tl.float32)
    y = tl.load(source + j, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        shrink = tl.rsqrt(tl.sum(x * x, 0) / HEAD_DIM + epsilon)
        x *= shrink * tl.load(weight + head * HEAD_DIM + i, mask=inside, other=0.0).to(tl.float32)
        y *= shrink * tl.load(weight + head * HEAD_DIM + j, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + token * HEAD_DIM + i, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + token * HEAD_DIM + i, mask=inside, other=0.0).to(tl.float32)
    rotated = (x * cosine + y * sine).to(query.dtype.element_ty)
    if head < HEADS:
        tl.store(query + (token * HEADS + head) * HEAD_DIM + i, rotated, mask=inside)
    elif slot >= 0:
        tl.store(keys + (slot * KV_HEADS + head - HEADS) * HEAD_DIM + i, rotated, mask=inside)


@triton.jit
def activate_gate(
    gate_up,  # [T, 2 · SIZE]
    activated,  # [T, SIZE]
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    GELU: tl.constexpr,  # GELU by tanh, else SiLU
):
    """Program (t, i): compute tile i of activation(gate) · up of token t."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < SIZE
    gate = tl.load(gate_up + token * (2 * SIZE) + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * SIZE) + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    # GELU by tanh is x · sigmoid(2 · √(2/π) · (x + 0.044715 x³)).
    exponent = gate
    if GELU:
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(activated + token * SIZE + i, result.to(activated.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["words", "vocabulary"])
def apply_token_masks(
    logits,  # [S, V] float32
    bits,  # [M, words] int32
    words,
    mask_of,  # [S]
    allowed,  # [S, V]
    vocabulary,  # V
    TILE: tl.constexpr,
):
    """Program (s, p): copy tile p of row s, with −inf for each token without a bit in the row's mask."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < vocabulary
    x = tl.load(logits + row * vocabulary + i, mask=inside, other=0.0)
    mask = tl.load(mask_of + row).to(tl.int64)
    word = tl.load(bits + tl.maximum(mask, 0) * words + i // 32, mask=inside, other=0)
    x = tl.where((mask < 0) | (((word >> (i % 32)) & 1) == 1), x, float("-inf"))
    tl.store(allowed + row * vocabulary + i, x, mask=inside)


@triton.jit
def find_thresholds(
    scores,  # [R, V] float32, none above 0
    stride,
    least,  # [R] float32: lower scores are excluded already
    top_k,  # [R] int64, 0: off
    top_p,  # [R] float64, 1 or more: off
    thresholds,  # [R] float32
    vocabulary,
    TILE: tl.constexpr,
):
    """Program r: find the least score that row r accepts, by bisection over the bits of its magnitude.

    Read as an integer, these bits are ordered like the magnitude of a score not above 0. So 31 halvings find
    the largest threshold that enough scores reach: for top_k, k of them; for top_p, those that together weigh
    the share of what top_k and `least` leave. NaN is never accepted.
    """
    row = tl.program_id(0).to(tl.int64)
    line = scores + row * stride
    accepted = tl.load(least + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    if k > 0:
        # The least magnitude, as bits, within which there are k scores.
        low = tl.full([], -1, tl.int32)
        high = tl.full([], 0x7F800000, tl.int32)
        while high - low > 1:
            middle = low + (high - low) // 2
            number = tl.zeros([TILE], tl.int64)
            for at in range(0, vocabulary, TILE):
                i = at + tl.arange(0, TILE)
                score = tl.load(line + i, mask=i < vocabulary, other=float("-inf"))
                bits = tl.abs(score).to(tl.int32, bitcast=True)
                number += ((bits <= middle) & (i < vocabulary)).to(tl.int64)
            enough = tl.sum(number, 0) >= k
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle)
        accepted = tl.maximum(accepted, -high.to(tl.float32, bitcast=True))
    if p < 1.0:
        sums = tl.zeros([TILE], tl.float64)
        for at in range(0, vocabulary, TILE):
            i = at + tl.arange(0, TILE)
            score = tl.load(line + i, mask=i < vocabulary, other=float("-inf"))
            sums += tl.where(score >= accepted, tl.exp(score), 0.0).to(tl.float64)
        required = tl.sum(sums, 0) * p
        low = tl.full([], -1, tl.int32)
        high = tl.abs(accepted).to(tl.int32, bitcast=True)
        while high - low > 1:
            middle = low + (high - low) // 2
            sums = tl.zeros([TILE], tl.float64)
            for at in range(0, vocabulary, TILE):
                i = at + tl.arange(0, TILE)
                score = tl.load(line + i, mask=i < vocabulary, other=float("-inf"))
                bits = tl.abs(score).to(tl.int32, bitcast=True)
                weight = tl.where((score >= accepted) & (bits <= middle), tl.exp(score), 0.0)
                sums += weight.to(tl.float64)
            enough = tl.sum(sums, 0) >= required
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle)
        accepted = tl.maximum(accepted, -high.to(tl.float32, bitcast=True))
    tl.store(thresholds + row, accepted)
