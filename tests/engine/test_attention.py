"""Paged attention, compared with plain attention in float64, one query at a time."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models.tiny import SHAPE
from fairlead.engine.attention import PagedAttention
from fairlead.engine.cache import KVCache
from fairlead.engine.inputs import Inputs

BLOCK_SIZE = 4
BLOCKS = 120
COLUMNS = 30
CPU = torch.device("cpu")


def oracle(query, keys, values, window, cap=None):
    """Return the attention of one query [H, D] over its sequence's keys and values [L, K, D], in float64."""
    first = 0 if window is None else max(0, len(keys) - window)
    found = []
    for head, vector in enumerate(query.double()):
        of_head = head * SHAPE.kv_heads // SHAPE.heads
        scores = keys[first:, of_head].double() @ vector / math.sqrt(SHAPE.head_dim)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        found.append(scores.softmax(0) @ values[first:, of_head].double())
    return torch.cat(found)


def inputs_of(rows, tables):
    """Return the step that computes `rows` of (slot, start, count) with these block tables, one per group."""
    starts = np.cumsum([0] + [count for _, _, count in rows]).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
    owners = np.repeat([slot for slot, _, _ in rows], [count for _, _, count in rows])
    decodes = next((row for row, (_, _, count) in enumerate(rows) if count > 1), len(rows))
    mappings = [
        table[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE for table in tables
    ]
    return Inputs(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=torch.from_numpy(positions.astype(np.int32)),
        slot_mapping=tuple(torch.from_numpy(mapping.astype(np.int32)) for mapping in mappings),
        query_starts=starts,
        sequence_lengths=np.array([start + count for _, start, count in rows], dtype=np.int32),
        slots=np.array([slot for slot, _, _ in rows], dtype=np.int32),
        sample_tokens=starts[1:] - 1,
        tables=tuple(tables),
        decodes=decodes,
    )


class Past:
    """Sequences with known keys and values, of which those before `start` are in a cache already."""

    def __init__(self, spans, window, *, seed=0, rubbish=0.0, cap=None):
        generator = torch.Generator().manual_seed(seed)
        self.window, self.cap = window, cap
        self.shape = msgspec.structs.replace(
            SHAPE, windows=(window,) * SHAPE.layers, attention_cap=cap, attention_scale=SHAPE.head_dim**-0.5
        )
        self.cache = KVCache(
            self.shape, blocks=(BLOCKS,), block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
        )
        for tensor in (self.cache.keys[0], self.cache.values[0]):
            tensor.fill_(rubbish)
        free = torch.randperm(BLOCKS, generator=generator).tolist()
        size = (SHAPE.kv_heads, SHAPE.head_dim)
        self.table = np.full((len(spans), COLUMNS), -1, dtype=np.int32)
        self.rows = [(slot, start, count) for slot, (start, count) in enumerate(spans)]
        self.keys, self.values = [], []
        for slot, start, count in self.rows:
            blocks = -(-(start + count) // BLOCK_SIZE)
            self.table[slot, :blocks] = [free.pop() for _ in range(blocks)]
            key, value = torch.randn(2, start + count, *size, generator=generator)
            self.keys.append(key)
            self.values.append(value)
            if start:
                written = self.paged([(slot, 0, start)])
                written(0, torch.zeros(start, SHAPE.heads, SHAPE.head_dim), key[:start], value[:start])
            if window is not None:  # blocks that no token from `start` on can see are gone
                self.table[slot, : max(0, start - window + 1) // BLOCK_SIZE] = -1
        tokens = sum(count for _, count in spans)
        self.query = torch.randn(tokens, SHAPE.heads, SHAPE.head_dim, generator=generator)

    def paged(self, rows):
        return PagedAttention(inputs_of(rows, [self.table]), self.cache, self.shape)

    def attend(self):
        pieces = [
            torch.cat([known[start:] for known, (_, start, _) in zip(all_known, self.rows, strict=True)])
            for all_known in (self.keys, self.values)
        ]
        return self.paged(self.rows)(0, self.query, *pieces)

    def expected(self):
        queries = iter(self.query)
        return torch.stack(
            [
                oracle(next(queries), key[: position + 1], value[: position + 1], self.window, self.cap)
                for (_, start, count), key, value in zip(self.rows, self.keys, self.values, strict=True)
                for position in range(start, start + count)
            ]
        )


decodes = st.tuples(st.integers(0, 40), st.just(1))
prefills = st.tuples(st.integers(0, 20), st.integers(2, 20))


@given(
    spans=st.tuples(st.lists(decodes, max_size=4), st.lists(prefills | decodes, max_size=3))
    .map(lambda halves: [*halves[0], *halves[1]])
    .filter(bool),
    window=st.none() | st.integers(1, 24),
    cap=st.none() | st.floats(0.5, 5),
    seed=st.integers(0, 5),
)
def test_any_mixture_of_decodes_and_prefills_matches_the_oracle(spans, window, cap, seed):
    past = Past(spans, window, seed=seed, cap=cap)
    torch.testing.assert_close(past.attend().double(), past.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf")])
def test_contents_left_in_a_reused_block_have_no_effect(window, rubbish):
    past = Past([(0, 1), (7, 1), (8, 1), (33, 1), (0, 6), (5, 6)], window, rubbish=rubbish)
    torch.testing.assert_close(past.attend().double(), past.expected(), rtol=1e-4, atol=1e-5)


def test_nan_in_one_sequence_does_not_reach_others():
    past = Past([(9, 1), (10, 1), (0, 5), (4, 4)], None)
    past.values[1][:] = float("nan")
    past.cache.values[0][past.table[1, :3].tolist()] = float("nan")
    found, expected = past.attend().double(), past.expected()
    healthy = [0, *range(2, len(found))]
    assert found[1].isnan().all()
    torch.testing.assert_close(found[healthy], expected[healthy], rtol=1e-4, atol=1e-5)


def test_decode_is_the_same_alone_and_beside_others_of_any_length():
    spans = [(start, 1) for start in (3, 50, 17, 4, 90, 31)]
    together = Past(spans, None)
    found = together.attend()
    for row, one in enumerate(together.rows):
        alone = together.paged([one])
        key, value = (known[row][one[1] :] for known in (together.keys, together.values))
        torch.testing.assert_close(found[row : row + 1], alone(0, together.query[row : row + 1], key, value))


def test_layers_of_different_windows_use_the_blocks_of_their_own_group():
    shape = msgspec.structs.replace(SHAPE, windows=(6, None, 6))
    cache = KVCache(shape, blocks=(12, 5), block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    full = np.arange(11, -1, -1, dtype=np.int32)[None]
    sliding = np.full((1, 12), -1, dtype=np.int32)
    sliding[0, :4] = [4, 0, 3, 1]
    size = (SHAPE.kv_heads, SHAPE.head_dim)
    query = torch.randn(41, SHAPE.heads, SHAPE.head_dim)
    key, value = torch.randn(2, 41, *size)
    found = {layer: [] for layer in range(3)}
    for start, count in [(0, 13), (13, 2), *((position, 1) for position in range(15, 41))]:
        end = start + count
        column = (end - 1) // BLOCK_SIZE
        if sliding[0, column] < 0:  # reuse the block that slid out of the window
            sliding[0, column], sliding[0, column - 3] = sliding[0, column - 3], -1
        attention = PagedAttention(inputs_of([(0, start, count)], [full, sliding]), cache, shape)
        for layer, pieces in found.items():
            pieces.append(attention(layer, query[start:end], key[start:end], value[start:end]))
    for layer, window in enumerate(shape.windows):
        expected = [oracle(query[p], key[: p + 1], value[: p + 1], window) for p in range(41)]
        torch.testing.assert_close(
            torch.cat(found[layer]).double(), torch.stack(expected), rtol=1e-4, atol=1e-5
        )
