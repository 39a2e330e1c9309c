"""What a block pool promises, but for contents and kept requests; then what only the kernel has."""

import sys
import tracemalloc
from array import array

import pytest

from cext.block_pool_setting import HASH_KEY, Kernel, Setting
from fairlead._cext.blockpool import BlockPool, OutOfBlocks

# References ----------------------------------------------------------------------------------------


def test_blocks_are_given_out_from_zero_and_the_first_given_back_is_the_next(setting):
    assert [0, 1, 2] == setting.pool.get_new_blocks(3)
    setting.pool.free_blocks([1, 0])
    assert [1, 0, 3] == setting.pool.get_new_blocks(3)


def test_more_blocks_than_can_be_had_are_refused_and_nothing_is_evicted(setting):
    setting.live(1, [1, 2, 3, 4])
    setting.pool.get_new_blocks(5)
    with pytest.raises(OutOfBlocks):
        setting.pool.get_new_blocks(4)
    assert (1, 2, 5) == setting.counts()
    assert 0 == setting.pool.statistics().evicted_requests
    assert 3 == len(setting.pool.get_new_blocks(3))


def test_no_blocks_are_given_out_for_nothing(setting):
    assert [] == setting.pool.get_new_blocks(0)
    with pytest.raises(ValueError):
        setting.pool.get_new_blocks(-1)
    with pytest.raises(OutOfBlocks):
        setting.pool.get_new_blocks(2**70)


def test_a_block_read_by_two_is_free_when_both_have_left(setting):
    blocks = setting.run([1, 2])
    setting.pool.touch(blocks)
    assert 2 == setting.pool.reference_count(blocks[0])
    setting.pool.free_blocks(blocks)
    assert 7 == setting.pool.free
    setting.pool.free_blocks(blocks)
    assert 8 == setting.pool.free


@pytest.mark.parametrize("method", ["free_blocks", "touch"])
@pytest.mark.parametrize("wrong", [8, -2, 2**70, 5])
def test_an_impossible_block_among_good_ones_changes_nothing(setting, method, wrong):
    blocks = setting.pool.get_new_blocks(3)  # so 5 is free
    for ids in ([*blocks, wrong], [wrong, *blocks], (*blocks, wrong)):
        with pytest.raises(ValueError):
            getattr(setting.pool, method)(ids)
        assert [1, 1, 1] == [setting.pool.reference_count(block) for block in blocks]
        assert (5, 0, 3) == setting.counts()


def test_a_block_given_back_twice_at_once_is_refused(setting):
    blocks = setting.pool.get_new_blocks(2)
    for give_back in (setting.pool.free_blocks, lambda ids: setting.pool.retire(1, ids)):
        with pytest.raises(ValueError):
            give_back([*blocks, blocks[0]])
        assert (6, 0, 2) == setting.counts()


def test_an_evictable_block_cannot_be_given_back(setting):
    blocks = setting.live(1, [1, 2])
    with pytest.raises(ValueError):
        setting.pool.free_blocks(blocks)
    assert (7, 1, 0) == setting.counts()


def test_what_has_slid_out_of_a_window_is_skipped(setting):
    blocks = setting.run([1, 2, 3, 4, 5, 6])
    setting.pool.free_blocks(blocks[:1])
    slid = [-1, *blocks[1:]]
    setting.pool.touch(slid)
    setting.pool.free_blocks(slid)
    setting.pool.retire(1, slid)
    assert (6, 2, 0) == setting.counts()


@pytest.mark.parametrize("wrong", ["1", 1.5, None])
def test_what_is_no_number_is_no_block(setting, wrong):
    for call in (setting.pool.touch, setting.pool.free_blocks, lambda ids: setting.pool.retire(1, ids)):
        with pytest.raises(TypeError):
            call([wrong])


def test_blocks_can_be_named_by_a_buffer(setting):
    blocks = array("i", setting.pool.get_new_blocks(3))
    setting.pool.touch(memoryview(blocks))
    setting.pool.free_blocks(blocks)
    assert [1, 1, 1] == [setting.pool.reference_count(block) for block in blocks]
    with pytest.raises(ValueError):
        setting.pool.touch(array("i", [0, 8]))
    assert 1 == setting.pool.reference_count(0)


# Options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 0},
        {"blocks": 2**28 + 1},
        {"block_size": 0},
        {"block_size": 2**20},
        {"hash_key": b"short"},
        {"max_entries": 0},
        {"threshold": 0.0},
        {"threshold": 1.1},
        {"threshold": float("nan")},
    ],
)
def test_impossible_options_are_refused(kind, options):
    with pytest.raises(ValueError):
        kind.pool(**{"blocks": 4, "block_size": 2, "hash_key": HASH_KEY} | options)


def test_a_count_of_tokens_must_not_be_negative(setting):
    with pytest.raises(ValueError):
        setting.pool.blocks_for(-1)
    assert [0, 1, 1, 2] == [setting.pool.blocks_for(tokens) for tokens in range(4)]


def test_there_is_no_count_for_a_block_that_is_none(setting):
    for block in (-1, 8, 2**70):
        with pytest.raises(ValueError):
            setting.pool.reference_count(block)


# The kernel alone ----------------------------------------------------------------------------------


def test_a_large_pool_finds_all_it_keeps_through_much_coming_and_going():
    """So large that places in the index collide and are moved back."""
    setting = Setting(Kernel, blocks=4_096)
    kept = {}
    for key in range(6_000):
        tokens = [key, key, key, 1, key, 2]
        kept[key] = setting.live(key, tokens)
        setting.pool.evict(key - 1_300 if key % 3 else key - 7)
    statistics = setting.pool.statistics()
    found = {key: setting.match([key, key, key, 1, key, 2]) for key in kept}
    assert {len(blocks) for blocks in found.values()} == {0, 3}
    assert statistics.cached_requests == sum(len(blocks) == 3 for blocks in found.values()) > 800
    assert all(found[key] in ([], blocks) for key, blocks in kept.items())
    assert 3 * statistics.cached_requests == statistics.evictable


def test_how_often_kept_requests_hold_blocks_is_bounded():
    """Hundreds of requests with a long prefix in common: what each remembers is memory, too."""
    setting = Setting(Kernel, blocks=1_500)
    beginning = [5] * 1_400
    prefix = setting.live(0, beginning)
    for key in range(1, 600):
        setting.pool.touch(prefix)
        blocks = [*prefix, *setting.pool.get_new_blocks(1)]
        tokens = [*beginning, key, key]
        setting.pool.cache_full_blocks(blocks, array("i", tokens), 700, 701, setting.hashes(tokens))
        setting.pool.retire(key, blocks)
    most = 256 * 1_500 // 701
    assert (most, 599 - most) == (
        setting.pool.statistics().cached_requests,
        setting.pool.statistics().evicted_requests,
    )
    assert 701 == len(setting.match([*beginning, 599, 599], limit=999))
    assert 700 == len(setting.match([*beginning, 1, 1], limit=999))


def test_nothing_leaks():
    setting = Setting(Kernel, blocks=64)

    def churn():
        for key in range(500):
            setting.live(key, [key] * 9)
            setting.match([key] * 9)
            setting.pool.trim()
        for key in range(500):
            setting.pool.evict(key)

    churn()
    tracemalloc.start()
    churn()
    ours = [tracemalloc.Filter(True, "*/cext/*")]  # other threads may be given some meanwhile
    before = tracemalloc.take_snapshot().filter_traces(ours)
    churn()
    after = tracemalloc.take_snapshot().filter_traces(ours)
    tracemalloc.stop()
    grown = sum(entry.size_diff for entry in after.compare_to(before, "filename"))
    assert grown < 20_000
    assert (64, 0, 0) == setting.counts()


def test_its_size_is_that_of_its_blocks():
    assert 10_000 * 100 <= sys.getsizeof(BlockPool(10_000, 16, hash_key=HASH_KEY)) <= 10_000 * 180


def test_hashes_must_be_hashes():
    pool = BlockPool(4, 2, hash_key=HASH_KEY)
    for wrong in (None, [], "x"):
        with pytest.raises(TypeError):
            pool.match_prefix(wrong, 1)
        with pytest.raises(TypeError):
            pool.cache_full_blocks([], array("i"), 0, 0, wrong)
