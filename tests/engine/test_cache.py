"""The KV cache's memory: its size, and what goes where."""

import pytest
import torch

from fairlead.engine.cache import KVCache, bytes_per_token
from models.tiny import SHAPE

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_a_token_costs_a_key_and_a_value_a_layer_and_head(dtype, itemsize):
    expected = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * itemsize
    assert expected == bytes_per_token(SHAPE, dtype)
    cache = KVCache(SHAPE, blocks=5, block_size=8, dtype=dtype, device=CPU)
    assert 5 * 8 * expected == cache.nbytes


def test_what_is_written_to_slots_is_read_from_blocks():
    cache = KVCache(SHAPE, blocks=4, block_size=2, dtype=torch.float32, device=CPU)
    key, value = torch.randn(2, 3, SHAPE.kv_heads, SHAPE.head_dim)
    cache.write(1, torch.tensor([7, 2, 3]), key, value)
    read_key, read_value = cache.read(1, torch.tensor([1, 3]))
    nothing = torch.zeros(1, SHAPE.kv_heads, SHAPE.head_dim)
    assert torch.equal(torch.cat((key[1:], nothing, key[:1])), read_key)
    assert torch.equal(torch.cat((value[1:], nothing, value[:1])), read_value)
    assert not cache.keys[0].any()


def test_a_cleared_block_is_zero_whatever_was_in_it():
    cache = KVCache(SHAPE, blocks=3, block_size=2, dtype=torch.float32, device=CPU)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.fill_(float("nan"))
    cache.clear(0, torch.tensor([1]))
    for tensor in (cache.keys[0], cache.values[0]):
        assert [True, False, True] == tensor.isnan().flatten(1).all(1).tolist()
        assert not tensor[1].any()
