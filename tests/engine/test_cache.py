"""The KV cache's memory: its size, its layout, and its division among groups."""

import mmap
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.models.tiny import SHAPE
from fairlead.engine.cache import KVCache, bytes_per_token
from fairlead.engine.device_memory import split_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_token_costs_a_key_and_a_value_a_layer_and_head(dtype, itemsize):
    expected = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * itemsize
    assert (expected,) == bytes_per_token(SHAPE, dtype)
    cache = KVCache(SHAPE, blocks=(5,), block_size=8, dtype=dtype, device=CPU)
    assert 5 * 8 * expected == cache.nbytes


def test_values_written_to_slots_are_read_from_their_blocks():
    cache = KVCache(SHAPE, blocks=(4,), block_size=2, dtype=torch.float32, device=CPU)
    key, value = torch.randn(2, 3, SHAPE.kv_heads, SHAPE.head_dim)
    cache.write(1, torch.tensor([7, 2, 3]), key, value)
    read_key, read_value = cache.read(1, torch.tensor([1, 3]))
    nothing = torch.zeros(1, SHAPE.kv_heads, SHAPE.head_dim)
    assert torch.equal(torch.cat((key[1:], nothing, key[:1])), read_key)
    assert torch.equal(torch.cat((value[1:], nothing, value[:1])), read_value)
    assert not cache.keys[0].any()


def test_clear_zeroes_a_block_even_of_nan():
    cache = KVCache(SHAPE, blocks=(3,), block_size=2, dtype=torch.float32, device=CPU)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.fill_(float("nan"))
    cache.clear(0, torch.tensor([1]))
    for tensor in (cache.keys[0], cache.values[0]):
        assert tensor.isnan().flatten(1).all(1).tolist() == [True, False, True]
        assert not tensor[1].any()


def test_released_blocks_read_as_zero_in_their_group_only():
    shape = msgspec.structs.replace(SHAPE, layers=2, windows=(None, 8))
    cache = KVCache(shape, blocks=(64, 64), block_size=64, dtype=torch.float32, device=CPU)
    for tensor in cache.keys + cache.values:
        tensor.fill_(1.0)
    block_bytes = cache.keys[0][0].nbytes
    assert block_bytes >= 2 * mmap.PAGESIZE
    assert block_bytes % mmap.PAGESIZE == 0
    cache.release(0, [3, 4, 9])
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        released = {3, 4, 9} if layer == 0 else set()
        for tensor in (keys, values):
            assert {block for block in range(64) if not tensor[block].any()} == released
            assert all(tensor[block].eq(1).all() for block in set(range(64)) - released)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what is resident")
def test_memory_of_released_blocks_is_returned_to_the_system():
    shape = msgspec.structs.replace(SHAPE, layers=1, windows=(None,))
    cache = KVCache(shape, blocks=(16 * 1024,), block_size=16, dtype=torch.float32, device=CPU)
    for tensor in cache.keys + cache.values:
        tensor.fill_(1.0)
    filled = resident_bytes()
    cache.release(0, range(16 * 1024))
    assert filled - resident_bytes() >= 0.9 * cache.nbytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_layers_with_the_same_window_form_a_group_with_its_own_blocks():
    shape = msgspec.structs.replace(SHAPE, layers=4, windows=(8, None, 8, 8))
    assert shape.groups == (None, 8)
    assert shape.layer_groups == (1, 0, 1, 1)
    a_layer = 2 * SHAPE.kv_heads * SHAPE.head_dim * 4
    assert (a_layer, 3 * a_layer) == bytes_per_token(shape, torch.float32)
    cache = KVCache(shape, blocks=(10, 3), block_size=2, dtype=torch.float32, device=CPU)
    assert [len(keys) for keys in cache.keys] == [3, 10, 3, 3]
    assert 2 * (10 * a_layer + 3 * 3 * a_layer) == cache.nbytes


def test_groups_are_sorted_widest_first():
    shape = msgspec.structs.replace(SHAPE, windows=(4, 16, 8))
    assert shape.groups == (16, 8, 4)
    assert shape.layer_groups == (2, 0, 1)


def test_blocks_that_a_window_cannot_use_go_to_the_full_attention_group():
    assert split_blocks(8000, [8], [None]) == (1000,)
    assert split_blocks(8 * 500 + 16 * 100, [8, 16], [None, 100]) == (500, 100)
    assert split_blocks(24 * 50 + 23, [8, 16], [None, 100]) == (50, 50)
    assert split_blocks(23, [8, 16], [None, 100]) == (0, 0)
    assert split_blocks(300 + 7 * 2 + 40 * 3, [1, 2, 3], [None, 7, 40]) == (300, 7, 40)


@example(bytes_total=556, groups=[(4, 19)], size=24)  # the limit of the window, and one block more
@given(
    bytes_total=st.integers(0, 10_000),
    groups=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60)), max_size=3),
    size=st.integers(1, 50),
)
def test_split_fits_and_a_longer_sequence_would_not(bytes_total, groups, size):
    sizes, limits = [size, *(size for size, _ in groups)], [None, *(limit for _, limit in groups)]
    blocks = split_blocks(bytes_total, sizes, limits)

    def of_length(length):
        return [length if limit is None else min(limit, length) for limit in limits]

    def cost(blocks):
        return sum(map(int.__mul__, blocks, sizes))

    assert of_length(blocks[0]) == list(blocks)
    assert cost(blocks) <= bytes_total < cost(of_length(blocks[0] + 1))
