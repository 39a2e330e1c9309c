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


def test_contents_of_freed_blocks_are_forgotten(setting):
    blocks = setting.run([1, 2, 3, 4])
    setting.pool.free_blocks(blocks)
    assert setting.match([1, 2, 3, 4]) == []


def test_duplicate_block_is_not_indexed(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    assert first == setting.match([1, 2])
    setting.pool.free_blocks(second)
    assert first == setting.match([1, 2])


def test_indexed_block_is_kept_instead_of_its_duplicate(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    setting.pool.retire(2, second)
    assert setting.counts() == (7, 0, 1)
    setting.pool.free_blocks(first)
    assert setting.counts() == (7, 1, 0)
    assert first == setting.match([1, 2])


def test_duplicate_is_indexed_when_kept_after_the_first_is_freed(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    setting.pool.free_blocks(first)
    assert setting.match([1, 2]) == []
    setting.pool.retire(2, second)
    assert second == setting.match([1, 2])


def test_duplicate_is_indexed_when_cached_again_after_the_first_is_freed(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    setting.pool.free_blocks(first)
    setting.pool.cache_full_blocks(second, array("i", [1, 2]), 0, 1, setting.hashes([1, 2]))
    assert second == setting.match([1, 2])


def test_window_requires_only_the_end_of_a_prefix(setting):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    blocks = setting.run(tokens)
    setting.pool.free_blocks(blocks[:2])
    setting.pool.retire(1, [-1, -1, *blocks[2:]])
    assert setting.match(tokens) == []
    assert setting.match(tokens, window=2) == [-1, -1, *blocks[2:]]
    assert setting.match(tokens, window=1) == [-1, -1, -1, blocks[3]]
    assert setting.match(tokens, window=0) == [-1] * 4
    assert setting.match(tokens, window=3) == []
    assert setting.match([*tokens[:6], 0, 0], window=1) == [-1, -1, blocks[2]]


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
