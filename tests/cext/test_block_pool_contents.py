"""What lies in the blocks of a pool: a prefix is found as far as it is full and the same."""

from array import array

import pytest

from cext.block_pool_setting import HASH_KEY, Setting


def test_a_prefix_is_found_as_far_as_it_is_full_and_the_same(setting):
    blocks = setting.run([1, 2, 3, 4, 5])
    assert blocks[:2] == setting.match([1, 2, 3, 4, 5, 6])
    assert blocks[:1] == setting.match([1, 2, 3, 9])
    assert blocks[:1] == setting.match([1, 2, 3, 4], limit=1)
    assert [] == setting.match([1])
    assert [] == setting.match([9, 2, 3, 4])


def test_the_same_tokens_behind_another_prefix_are_other_contents(setting):
    setting.run([1, 2, 7, 7])
    assert [] == setting.match([7, 7])
    assert [] == setting.match([3, 4, 7, 7])


def test_tenants_with_salts_of_their_own_share_nothing(setting):
    setting.run([1, 2])
    assert 1 == len(setting.pool.match_prefix(setting.hashes([1, 2]), 9))
    assert [] == setting.pool.match_prefix(setting.hashes([1, 2], b"ann"), 9)


def test_what_nobody_needs_is_forgotten(setting):
    blocks = setting.run([1, 2, 3, 4])
    setting.pool.free_blocks(blocks)
    assert [] == setting.match([1, 2, 3, 4])


def test_a_second_block_of_the_same_content_stays_out_of_the_index(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    assert first == setting.match([1, 2])
    setting.pool.free_blocks(second)
    assert first == setting.match([1, 2])


def test_of_two_blocks_of_the_same_content_the_indexed_one_is_kept(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    setting.pool.retire(2, second)
    assert (7, 0, 1) == setting.counts()
    setting.pool.free_blocks(first)
    assert (7, 1, 0) == setting.counts()
    assert first == setting.match([1, 2])


def test_a_second_block_is_indexed_when_it_is_kept_and_the_first_is_gone(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    setting.pool.free_blocks(first)
    assert [] == setting.match([1, 2])
    setting.pool.retire(2, second)
    assert second == setting.match([1, 2])


def test_a_second_block_is_indexed_when_it_is_said_again_that_it_is_full(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    setting.pool.free_blocks(first)
    setting.pool.cache_full_blocks(second, array("i", [1, 2]), 0, 1, setting.hashes([1, 2]))
    assert second == setting.match([1, 2])


def test_with_a_window_only_the_end_of_a_prefix_must_be_there(setting):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    blocks = setting.run(tokens)
    setting.pool.free_blocks(blocks[:2])
    setting.pool.retire(1, [-1, -1, *blocks[2:]])
    assert [] == setting.match(tokens)
    assert [-1, -1, *blocks[2:]] == setting.match(tokens, window=2)
    assert [-1, -1, -1, blocks[3]] == setting.match(tokens, window=1)
    assert [-1] * 4 == setting.match(tokens, window=0)
    assert [] == setting.match(tokens, window=3)
    assert [-1, -1, blocks[2]] == setting.match([*tokens[:6], 0, 0], window=1)


def test_a_block_of_a_sequence_that_grows_is_cached_when_it_is_full(setting):
    chain = setting.kind.hashes(HASH_KEY, 2)
    blocks = setting.pool.get_new_blocks(2)
    setting.pool.cache_full_blocks(blocks, array("i", [1, 2, 3]), 0, 1, chain)
    assert blocks[:1] == setting.match([1, 2, 3, 4])
    setting.pool.cache_full_blocks(blocks, array("i", [1, 2, 3, 4]), 1, 2, chain)
    assert blocks == setting.match([1, 2, 3, 4])


def test_two_groups_share_one_chain(kind):
    full, sliding = Setting(kind), Setting(kind)
    chain = kind.hashes(HASH_KEY, 2)
    tokens = array("i", [1, 2, 3, 4])
    for setting in (full, sliding):
        setting.pool.cache_full_blocks(setting.pool.get_new_blocks(2), tokens, 0, 2, chain)
    assert 2 == len(chain)
    assert [0, 1] == full.match([1, 2, 3, 4]) == sliding.match([1, 2, 3, 4])


def test_what_is_not_full_cannot_be_cached(setting):
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
        assert [] == setting.match([1, 2])


def test_the_content_of_a_full_block_does_not_change(setting):
    blocks = setting.run([1, 2])
    with pytest.raises(ValueError):
        setting.pool.cache_full_blocks(blocks, array("i", [3, 4]), 0, 1, setting.hashes([3, 4]))
    assert blocks == setting.match([1, 2])
    assert [] == setting.match([3, 4])


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
    assert (6 + 2, 4 + 2) == (statistics.queries, statistics.hits)
