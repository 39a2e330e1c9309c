"""Paged attention against attention written out in float64, one query at a time."""

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.engine.attention import PagedAttention
from fairlead.engine.cache import KVCache
from fairlead.engine.sequence import Chunk, Sequence
from fairlead.job import Sampling
from models.tiny import SHAPE

BLOCK_SIZE = 4
BLOCKS = 120


def oracle(query, keys, values, window):
    """What one query [H, D] finds in its sequence's keys and values [L, K, D], float64."""
    first = 0 if window is None else max(0, len(keys) - window)
    found = []
    for head, vector in enumerate(query.double()):
        of_head = head * SHAPE.kv_heads // SHAPE.heads
        scores = keys[first:, of_head].double() @ vector / math.sqrt(SHAPE.head_dim)
        found.append(scores.softmax(0) @ values[first:, of_head].double())
    return torch.cat(found)


class Past:
    """Sequences whose keys and values are known and, up to `start`, already in a cache."""

    def __init__(self, spans, window, *, seed=0, rubbish=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.window = window
        self.shape = msgspec.structs.replace(SHAPE, windows=(window,) * SHAPE.layers)
        self.cache = KVCache(
            SHAPE, blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu")
        )
        for tensor in (self.cache.keys[0], self.cache.values[0]):
            tensor.fill_(rubbish)
        free = torch.randperm(BLOCKS, generator=generator).tolist()
        size = (SHAPE.kv_heads, SHAPE.head_dim)
        self.chunks, self.keys, self.values = [], [], []
        for start, count in spans:
            sequence = Sequence(0, [0] * (start + count), Sampling(max_tokens=1), seed=0)
            blocks = sequence.block_ids[0]
            blocks += [free.pop() for _ in range(-(-(start + count) // BLOCK_SIZE))]
            key, value = torch.randn(2, start + count, *size, generator=generator)
            self.keys.append(key)
            self.values.append(value)
            self.chunks.append(Chunk(sequence, start, count, samples=True))
            if start:
                before = [Chunk(sequence, 0, start, samples=False)]
                written = PagedAttention(before, self.cache, self.shape)
                written(0, torch.zeros(start, SHAPE.heads, SHAPE.head_dim), key[:start], value[:start])
        tokens = sum(count for _, count in spans)
        self.query = torch.randn(tokens, SHAPE.heads, SHAPE.head_dim, generator=generator)

    def attend(self):
        attention = PagedAttention(self.chunks, self.cache, self.shape)
        pieces = [
            torch.cat([known[chunk.start :] for known, chunk in zip(all_known, self.chunks, strict=True)])
            for all_known in (self.keys, self.values)
        ]
        return attention(0, self.query, *pieces)

    def expected(self):
        queries = iter(self.query)
        return torch.stack(
            [
                oracle(next(queries), key[: position + 1], value[: position + 1], self.window)
                for chunk, key, value in zip(self.chunks, self.keys, self.values, strict=True)
                for position in range(chunk.start, chunk.start + chunk.count)
            ]
        )


decodes = st.tuples(st.integers(0, 40), st.just(1))
prefills = st.tuples(st.integers(0, 20), st.integers(2, 20))


@settings(max_examples=60, deadline=None)
@given(
    spans=st.tuples(st.lists(decodes, max_size=4), st.lists(prefills | decodes, max_size=3))
    .map(lambda halves: [*halves[0], *halves[1]])
    .filter(bool),
    window=st.none() | st.integers(1, 24),
    seed=st.integers(0, 5),
)
def test_any_mixture_of_decodes_and_prefills_finds_what_the_oracle_finds(spans, window, seed):
    past = Past(spans, window, seed=seed)
    torch.testing.assert_close(past.attend().double(), past.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf")])
def test_what_former_owners_left_in_a_block_is_never_seen(window, rubbish):
    past = Past([(0, 1), (7, 1), (8, 1), (33, 1), (0, 6), (5, 6)], window, rubbish=rubbish)
    torch.testing.assert_close(past.attend().double(), past.expected(), rtol=1e-4, atol=1e-5)


def test_a_sequence_of_nan_harms_no_neighbour():
    past = Past([(9, 1), (10, 1), (0, 5), (4, 4)], None)
    past.values[1][:] = float("nan")
    past.cache.values[0][past.chunks[1].sequence.block_ids[0]] = float("nan")
    found, expected = past.attend().double(), past.expected()
    healthy = [0, *range(2, len(found))]
    assert found[1].isnan().all()
    torch.testing.assert_close(found[healthy], expected[healthy], rtol=1e-4, atol=1e-5)


def test_a_decode_finds_the_same_alone_and_among_others_of_all_lengths():
    spans = [(start, 1) for start in (3, 50, 17, 4, 90, 31)]
    together = Past(spans, None)
    found = together.attend()
    for row, chunk in enumerate(together.chunks):
        alone = PagedAttention([chunk], together.cache, together.shape)
        key, value = (known[row][chunk.start :] for known in (together.keys, together.values))
        torch.testing.assert_close(found[row : row + 1], alone(0, together.query[row : row + 1], key, value))
