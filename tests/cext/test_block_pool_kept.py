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


# Blocks that slid out of a window --------------------------------------------------------------------


def slid_out(setting, tokens, count=None):
    """Run a sequence whose first `count` blocks slide out of its window; return its blocks."""
    blocks = setting.run(tokens)
    setting.pool.retire_blocks(blocks[:count])
    return blocks


def test_blocks_that_slid_out_are_kept_but_their_sequence_does_not_count_as_a_request(setting):
    blocks = slid_out(setting, [1, 2, 3, 4, 5, 6], 2)
    assert setting.counts() == (5, 2, 1)
    statistics = setting.pool.statistics()
    assert (statistics.cached_requests, statistics.cached_tokens) == (0, 4)
    assert blocks == setting.match([1, 2, 3, 4, 5, 6])
    assert [-1, blocks[1]] == setting.match([1, 2, 3, 4], window=1)


def test_block_that_is_not_full_or_has_slid_out_already_is_not_kept(setting):
    blocks = setting.run([1, 2, 3])
    setting.pool.retire_blocks([-1, *blocks])
    assert setting.counts() == (7, 1, 0)
    with pytest.raises(ValueError):
        setting.pool.retire_blocks(blocks[:1])


def test_blocks_that_slid_out_are_evicted_one_by_one_in_their_order(setting):
    blocks = slid_out(setting, [1, 2, 3, 4, 5, 6])
    setting.pool.get_new_blocks(6)
    assert setting.match([1, 2, 3, 4, 5, 6]) == []
    assert [-1, *blocks[1:]] == setting.match([1, 2, 3, 4, 5, 6], window=2)
    assert setting.counts() == (0, 2, 6)
    assert setting.pool.statistics().evicted_requests == 0


@pytest.mark.parametrize("first_in_first_out", [False, True])
def test_hit_makes_blocks_that_slid_out_the_most_recently_used(kind, first_in_first_out):
    setting = PoolDriver(kind, first_in_first_out=first_in_first_out)
    tokens = [1, 2, 3, 4, 5, 6]
    blocks = slid_out(setting, tokens)
    found = setting.match(tokens[:4], window=1)
    setting.pool.touch(found)
    setting.pool.free_blocks(found)
    setting.pool.get_new_blocks(7)
    kept = [setting.match(tokens[: 2 * i + 2], window=1)[i:] == [block] for i, block in enumerate(blocks)]
    assert kept == [False, not first_in_first_out, first_in_first_out]


def test_block_that_slid_out_outlives_the_request_that_ended_with_it(setting):
    """A preempted sequence is kept, goes on after its prefix, and is kept again under the same key."""
    first = setting.run_and_retire(1, [1, 2])
    setting.pool.touch(first)
    blocks = [*first, *setting.pool.get_new_blocks(1)]
    setting.pool.cache_full_blocks(blocks, array("i", [1, 2, 3, 4]), 1, 2, setting.hashes([1, 2, 3, 4]))
    setting.pool.retire_blocks(blocks[:1])
    setting.pool.retire(1, [-1, blocks[1]])
    assert blocks == setting.match([1, 2, 3, 4])
    assert setting.counts() == (6, 2, 0)


def test_request_that_lacks_its_first_blocks_does_not_replace_one_that_has_them(setting):
    blocks = setting.run_and_retire(1, [1, 2, 3, 4])
    setting.pool.touch(blocks)
    setting.pool.free_blocks(blocks[:1])
    setting.run_and_retire(2, [5, 6])
    setting.pool.retire(2, [-1, blocks[1]])
    assert blocks == setting.match([1, 2, 3, 4])
    assert setting.match([5, 6]) == [], "what was kept under the second key is gone"
    assert [setting.pool.evict(key) for key in (2, 1)] == [False, True]


def test_request_takes_the_place_of_its_blocks_that_slid_out_of_another(setting):
    slid = slid_out(setting, [1, 2, 3, 4])
    setting.pool.touch(slid)
    setting.pool.retire(1, slid)
    assert setting.pool.evict(1)
    assert setting.counts() == (8, 0, 0)


def test_duplicate_that_slid_out_is_freed_and_the_indexed_block_is_kept(setting):
    first, second = setting.run([1, 2]), setting.run([1, 2])
    setting.pool.retire_blocks(second)
    setting.pool.free_blocks(first)
    assert setting.counts() == (7, 1, 0)
    assert first == setting.match([1, 2])


def test_blocks_that_slid_out_of_a_failed_sequence_are_forgotten_but_not_what_it_reused(setting):
    tokens = [1, 2, 3, 4, 5, 6]
    blocks = slid_out(setting, tokens)
    setting.pool.forget_blocks(setting.hashes(tokens), 1, 9)
    assert blocks[:1] == setting.match(tokens)
    assert setting.counts() == (7, 1, 0)


def test_blocks_of_a_request_with_a_key_are_not_forgotten(setting):
    blocks = setting.run_and_retire(1, [1, 2, 3, 4])
    setting.pool.forget_blocks(setting.hashes([1, 2, 3, 4]), 0, 9)
    assert blocks == setting.match([1, 2, 3, 4])


def test_trim_evicts_blocks_that_slid_out_and_returns_no_keys_of_them(kind):
    setting = PoolDriver(kind, blocks=10, threshold=0.5)
    slid_out(setting, [1, 2, 3, 4, 5, 6])
    setting.run_and_retire(7, [7, 8, 9, 10, 11, 12])
    assert setting.pool.trim() == []
    assert setting.counts() == (5, 5, 0)
    setting.pool.get_new_blocks(3)
    assert setting.pool.trim() == [7]


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
