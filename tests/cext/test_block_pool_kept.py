"""Finished requests that are kept: the least recently used is evicted first, as a whole."""

import pytest

from cext.block_pool_setting import HASH_KEY, Kernel, PoolDriver


def test_finished_request_is_kept_without_its_partial_block(setting):
    blocks = setting.run_and_retire(1, [1, 2, 3, 4, 5])
    assert setting.counts() == (6, 2, 0)
    statistics = setting.pool.statistics()
    assert (statistics.cached_requests, statistics.cached_tokens) == (1, 4)
    assert blocks[:2] == setting.match([1, 2, 3, 4, 5])


def test_request_with_no_full_block_is_not_kept(setting):
    setting.run_and_retire(1, [1])
    setting.pool.retire(2, [])
    assert setting.counts() == (8, 0, 0)
    assert setting.pool.statistics().cached_requests == 0
    assert not setting.pool.evict(1)


def test_same_prompt_a_thousand_times_is_kept_once(setting):
    for key in range(1000):
        setting.run_and_retire(key, [1, 2, 3, 4])
    assert setting.pool.statistics().cached_requests == 1
    assert setting.counts() == (6, 2, 0)


def test_least_recently_used_request_is_evicted_first_and_completely(setting):
    setting.run_and_retire(1, [1, 2, 3, 4])
    setting.run_and_retire(2, [5, 6, 7, 8])
    setting.pool.get_new_blocks(5)
    assert setting.match([1, 2, 3, 4]) == []
    assert len(setting.match([5, 6, 7, 8])) == 2
    assert setting.counts() == (1, 2, 5)


def test_request_can_be_evicted_only_once(setting):
    setting.run_and_retire(1, [1, 2])
    assert setting.pool.evict(1)
    assert not setting.pool.evict(1)
    assert not setting.pool.evict(2**70)
    assert setting.pool.statistics().evicted_requests == 1


@pytest.mark.parametrize("wrong", ["1", 1.5, None])
def test_key_that_is_not_an_integer_raises(setting, wrong):
    blocks = setting.run([1, 2])
    with pytest.raises(TypeError):
        setting.pool.retire(wrong, blocks)
    assert setting.counts() == (7, 0, 1)


# Blocks that slid out of a window --------------------------------------------------------------------


def test_blocks_that_slid_out_are_kept_but_their_sequence_does_not_count_as_a_request(setting):
    blocks = setting.run([1, 2, 3, 4, 5, 6])
    setting.pool.retire_blocks(blocks[:2])
    assert setting.counts() == (5, 2, 1)
    statistics = setting.pool.statistics()
    assert (statistics.cached_requests, statistics.cached_tokens) == (0, 4)
    assert blocks == setting.match([1, 2, 3, 4, 5, 6])
    assert [-1, blocks[1]] == setting.match([1, 2, 3, 4], window=1)


# Thresholds ----------------------------------------------------------------------------------------


def test_trim_evicts_the_oldest_until_memory_is_below_the_threshold(kind):
    setting = PoolDriver(kind, blocks=10, threshold=0.8)
    for key in range(5):
        setting.run_and_retire(key, [10 * key, 1, 2, 3])
    assert setting.pool.free == 0
    assert setting.pool.trim() == [0]
    assert setting.pool.free == 2
    assert setting.pool.trim() == []


def test_free_ids_are_the_blocks_that_hold_nothing(kind):
    setting = PoolDriver(kind, blocks=6)
    kept, running = setting.run_and_retire(1, [1, 2, 3, 4]), setting.run([5, 6])
    assert setting.pool.free_ids() == sorted(set(range(6)) - {*kept, *running})
    setting.pool.evict(1)
    assert setting.pool.free_ids() == sorted(set(range(6)) - set(running))


def test_limits_of_seed_002_fit(kind):
    pool = kind.pool(262_144 if kind is Kernel else 64, 16, hash_key=HASH_KEY, max_entries=4 * 1024 * 1024)
    assert pool.trim() == []
    assert pool.blocks_for(128) == 8
    assert pool.blocks_for(2048) == 128
