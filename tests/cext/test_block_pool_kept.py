"""Finished requests that are kept: the least recently used is evicted first, as a whole."""

from array import array

import pytest

from cext.block_pool_setting import HASH_KEY, Kernel, PoolDriver
from fairlead._cext.blockpool import OutOfBlocks


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


def test_retiring_a_key_again_replaces_its_kept_request(setting):
    setting.run_and_retire(1, [1, 2, 3, 4])
    setting.run_and_retire(1, [5, 6])
    assert setting.pool.statistics().cached_requests == 1
    assert setting.counts() == (7, 1, 0)
    assert setting.match([1, 2]) == []
    assert setting.pool.evict(1)
    assert setting.counts() == (8, 0, 0)


def test_retiring_a_key_without_full_blocks_keeps_its_earlier_request(setting):
    blocks = setting.run_and_retire(1, [1, 2])
    setting.run_and_retire(1, [9])
    assert blocks == setting.match([1, 2])


def test_request_covered_by_a_longer_one_is_dropped(setting):
    setting.run_and_retire(1, [1, 2])
    longer = setting.match([1, 2])
    setting.pool.touch(longer)
    longer += setting.pool.get_new_blocks(1)
    setting.pool.cache_full_blocks(longer, array("i", [1, 2, 3, 4]), 0, 2, setting.hashes([1, 2, 3, 4]))
    setting.pool.retire(2, longer)
    assert setting.pool.statistics().cached_requests == 1
    assert not setting.pool.evict(1)
    assert longer == setting.match([1, 2, 3, 4])


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


def test_hit_makes_a_request_the_most_recently_used(setting):
    setting.run_and_retire(1, [1, 2, 3, 4])
    setting.run_and_retire(2, [5, 6, 7, 8])
    found = setting.match([1, 2])
    setting.pool.touch(found)
    setting.pool.free_blocks(found)
    setting.pool.get_new_blocks(5)
    assert len(setting.match([1, 2, 3, 4])) == 2
    assert setting.match([5, 6, 7, 8]) == []


def test_eviction_keeps_blocks_that_another_request_shares(setting):
    first = setting.run_and_retire(1, [1, 2, 3, 4])
    setting.pool.touch(first[:1])
    second = [first[0], *setting.pool.get_new_blocks(1)]
    setting.pool.cache_full_blocks(second, array("i", [1, 2, 9, 9]), 0, 2, setting.hashes([1, 2, 9, 9]))
    setting.pool.retire(2, second)
    assert setting.pool.statistics().cached_tokens == 6
    assert setting.pool.evict(1)
    assert second == setting.match([1, 2, 9, 9])
    assert first[:1] == setting.match([1, 2, 3, 4])


def test_longer_request_without_the_first_block_covers_no_other(setting):
    """With a window, a block that slid out of one request is still useful to the other."""
    first = setting.run_and_retire(1, [1, 2, 3, 4])
    setting.pool.touch(first)
    setting.pool.free_blocks(first[:1])
    second = [-1, first[1], *setting.pool.get_new_blocks(1)]
    tokens = [1, 2, 3, 4, 5, 6]
    setting.pool.cache_full_blocks(second, array("i", tokens), 2, 3, setting.hashes(tokens))
    setting.pool.retire(2, second)
    assert setting.pool.statistics().cached_requests == 2
    assert [*first, second[2]] == setting.match(tokens)


def test_hit_on_blocks_last_held_by_an_evicted_request_refreshes_no_other(setting):
    setting.run_and_retire(1, [1, 2, 3, 4])
    setting.run_and_retire(2, [5, 6, 7, 8])
    shared = setting.match([1, 2])
    setting.pool.touch(shared)
    third = [*shared, *setting.pool.get_new_blocks(1)]
    setting.pool.cache_full_blocks(third, array("i", [1, 2, 9, 9]), 0, 2, setting.hashes([1, 2, 9, 9]))
    setting.pool.retire(3, third)
    setting.pool.evict(3)
    setting.pool.touch(shared)
    setting.pool.free_blocks(shared)
    assert [key for key in (1, 2) if setting.pool.evict(key)] == [1, 2]
    assert setting.counts() == (8, 0, 0)
    for key in (4, 5, 6):
        setting.run_and_retire(key, [key, key, key, key])
    setting.pool.get_new_blocks(6)
    assert [bool(setting.match([key, key])) for key in (4, 5, 6)] == [False, False, True]


def test_trim_returns_the_number_of_a_replaced_key(kind):
    setting = PoolDriver(kind, blocks=4, threshold=0.25)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        setting.run_and_retire(int("9" * 15), tokens)  # another object each time
    others = [int("8" * 15) + i for i in range(100)]
    assert [int("9" * 15)] == setting.pool.trim()
    assert len(set(others)) == 100


def test_block_that_is_read_is_never_evicted(setting):
    """Blocks of a running request must never be reused."""
    setting.run_and_retire(1, [1, 2, 3, 4])
    reading = setting.match([1, 2])
    setting.pool.touch(reading)
    assert setting.pool.evict(1)
    assert setting.counts() == (7, 0, 1)
    assert not set(reading) & set(setting.pool.get_new_blocks(7))
    with pytest.raises(OutOfBlocks):
        setting.pool.get_new_blocks(1)
    assert reading == setting.match([1, 2])


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


# Thresholds ----------------------------------------------------------------------------------------


def test_trim_evicts_the_oldest_until_memory_is_below_the_threshold(kind):
    setting = PoolDriver(kind, blocks=10, threshold=0.8)
    for key in range(5):
        setting.run_and_retire(key, [10 * key, 1, 2, 3])
    assert setting.pool.free == 0
    assert setting.pool.trim() == [0]
    assert setting.pool.free == 2
    assert setting.pool.trim() == []


def test_trim_evicts_the_oldest_until_entries_are_below_the_threshold(kind):
    setting = PoolDriver(kind, blocks=100, max_entries=20, threshold=0.8)
    for key in range(5):
        setting.run_and_retire(key, [10 * key, 1, 2, 3])
    assert setting.pool.trim() == [0]
    assert setting.pool.statistics().cached_tokens == 4 * 4


def test_first_in_first_out_ignores_later_use(kind):
    for first_in_first_out, evicted in ((False, 1), (True, 0)):
        setting = PoolDriver(kind, blocks=4, threshold=0.5, first_in_first_out=first_in_first_out)
        for key in range(2):
            setting.run_and_retire(key, [10 * key, 1, 2, 3])
        used = setting.match([0, 1, 2, 3])
        setting.pool.touch(used)
        setting.pool.free_blocks(used)
        assert setting.pool.trim() == [evicted]


def test_free_ids_are_the_blocks_that_hold_nothing(kind):
    setting = PoolDriver(kind, blocks=6)
    kept, running = setting.run_and_retire(1, [1, 2, 3, 4]), setting.run([5, 6])
    assert setting.pool.free_ids() == sorted(set(range(6)) - {*kept, *running})
    setting.pool.evict(1)
    assert setting.pool.free_ids() == sorted(set(range(6)) - set(running))


def test_entries_in_use_count_but_are_not_trimmed(kind):
    setting = PoolDriver(kind, blocks=100, max_entries=20, threshold=0.8)
    running = setting.run([1] * 40)
    setting.run_and_retire(1, [2, 2])
    setting.run_and_retire(2, [3, 3])
    assert setting.pool.trim() == [1, 2]
    assert running == setting.match([1] * 40)
    assert setting.counts() == (80, 0, 20)


def test_trim_keeps_a_request_if_its_eviction_frees_no_block(kind):
    """Evicting a kept request would free nothing while a sequence uses all its blocks."""
    setting = PoolDriver(kind, blocks=2, threshold=0.5)
    blocks = setting.run_and_retire(1, [1, 2, 3, 4])
    setting.pool.touch(blocks)
    assert setting.pool.trim() == []
    setting.pool.free_blocks(blocks)
    assert setting.pool.trim() == [1]


def test_limits_of_seed_002_fit(kind):
    pool = kind.pool(262_144 if kind is Kernel else 64, 16, hash_key=HASH_KEY, max_entries=4 * 1024 * 1024)
    assert pool.trim() == []
    assert pool.blocks_for(128) == 8
    assert pool.blocks_for(2048) == 128
