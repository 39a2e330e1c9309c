"""The contents of a pool's blocks: a prefix matches as far as its blocks are full and equal."""

from array import array

import pytest

from cext.block_pool_setting import HASH_KEY, PoolDriver


def test_prefix_matches_up_to_its_last_full_equal_block(setting):
    blocks = setting.run([1, 2, 3, 4, 5])
    assert blocks[:2] == setting.match([1, 2, 3, 4, 5, 6])
    assert blocks[:1] == setting.match([1, 2, 3, 9])
    assert blocks[:1] == setting.match([1, 2, 3, 4], limit=1)
    assert setting.match([1]) == []
    assert setting.match([9, 2, 3, 4]) == []


def test_same_tokens_after_another_prefix_do_not_match(setting):
    setting.run([1, 2, 7, 7])
    assert setting.match([7, 7]) == []
    assert setting.match([3, 4, 7, 7]) == []


def test_tenants_with_different_salts_share_nothing(setting):
    setting.run([1, 2])
    assert len(setting.pool.match_prefix(setting.hashes([1, 2]), 9)) == 1
    assert setting.pool.match_prefix(setting.hashes([1, 2], b"ann"), 9) == []


def test_growing_sequence_caches_each_block_when_it_is_full(setting):
    chain = setting.kind.hashes(HASH_KEY, 2)
    blocks = setting.pool.get_new_blocks(2)
    setting.pool.cache_full_blocks(blocks, array("i", [1, 2, 3]), 0, 1, chain)
    assert blocks[:1] == setting.match([1, 2, 3, 4])
    setting.pool.cache_full_blocks(blocks, array("i", [1, 2, 3, 4]), 1, 2, chain)
    assert blocks == setting.match([1, 2, 3, 4])


def test_two_groups_share_one_hash_chain(kind):
    full, sliding = PoolDriver(kind), PoolDriver(kind)
    chain = kind.hashes(HASH_KEY, 2)
    tokens = array("i", [1, 2, 3, 4])
    for setting in (full, sliding):
        setting.pool.cache_full_blocks(setting.pool.get_new_blocks(2), tokens, 0, 2, chain)
    assert len(chain) == 2
    assert [0, 1] == full.match([1, 2, 3, 4]) == sliding.match([1, 2, 3, 4])


def test_caching_partial_or_invalid_blocks_raises(setting):
    blocks = setting.pool.get_new_blocks(2)
    chain = setting.kind.hashes(HASH_KEY, 2)
    for ids, tokens, first, last in [
        (blocks, [1, 2, 3], 0, 2),  # the second is not full
        (blocks, [1, 2, 3, 4, 5, 6], 0, 3),  # there is no third
        (blocks, [1, 2], 1, 0),
        (blocks, [1, 2], -1, 1),
        ([5], [1, 2], 0, 1),  # free
        ([8], [1, 2], 0, 1),
    ]:
        with pytest.raises(ValueError):
            setting.pool.cache_full_blocks(ids, array("i", tokens), first, last, chain)
        assert setting.match([1, 2]) == []


def test_content_of_a_full_block_does_not_change(setting):
    blocks = setting.run([1, 2])
    with pytest.raises(ValueError):
        setting.pool.cache_full_blocks(blocks, array("i", [3, 4]), 0, 1, setting.hashes([3, 4]))
    assert blocks == setting.match([1, 2])
    assert setting.match([3, 4]) == []


def test_hashes_of_another_key_or_block_size_are_refused(setting):
    for chain in (setting.kind.hashes(bytes(16), 2), setting.kind.hashes(HASH_KEY, 4)):
        with pytest.raises(ValueError):
            setting.pool.match_prefix(chain, 1)
        with pytest.raises(ValueError):
            setting.pool.cache_full_blocks([], array("i"), 0, 0, chain)


def test_queries_and_hits_are_counted_in_tokens(setting):
    setting.run([1, 2, 3, 4])
    setting.match([1, 2, 3, 4, 5, 6, 7])
    setting.match([1, 2, 9, 9], limit=1)
    statistics = setting.pool.statistics()
    assert (statistics.queries, statistics.hits) == (6 + 2, 4 + 2)
