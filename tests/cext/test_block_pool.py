"""The contract of a block pool except contents and kept requests; then what only the kernel has."""

import sys
import tracemalloc
from array import array

import pytest

from cext.block_pool_setting import HASH_KEY, Kernel, PoolDriver
from fairlead._cext.blockpool import BlockPool, OutOfBlocks

# References ----------------------------------------------------------------------------------------


def test_blocks_are_allocated_from_zero_and_the_first_of_a_freed_list_is_next(setting):
    assert setting.pool.get_new_blocks(3) == [0, 1, 2]
    setting.pool.free_blocks([1, 0])
    assert setting.pool.get_new_blocks(3) == [1, 0, 3]


def test_requesting_more_than_available_raises_and_evicts_nothing(setting):
    setting.run_and_retire(1, [1, 2, 3, 4])
    setting.pool.get_new_blocks(5)
    with pytest.raises(OutOfBlocks):
        setting.pool.get_new_blocks(4)
    assert setting.counts() == (1, 2, 5)
    assert setting.pool.statistics().evicted_requests == 0
    assert len(setting.pool.get_new_blocks(3)) == 3


def test_zero_blocks_are_an_empty_list_and_impossible_counts_raise(setting):
    assert setting.pool.get_new_blocks(0) == []
    with pytest.raises(ValueError):
        setting.pool.get_new_blocks(-1)
    with pytest.raises(OutOfBlocks):
        setting.pool.get_new_blocks(2**70)


def test_shared_block_is_free_after_both_references_are_released(setting):
    blocks = setting.run([1, 2])
    setting.pool.touch(blocks)
    assert setting.pool.reference_count(blocks[0]) == 2
    setting.pool.free_blocks(blocks)
    assert setting.pool.free == 7
    setting.pool.free_blocks(blocks)
    assert setting.pool.free == 8


@pytest.mark.parametrize("method", ["free_blocks", "touch"])
@pytest.mark.parametrize("wrong", [8, -2, 2**70, 5])
def test_invalid_block_among_valid_ones_changes_nothing(setting, method, wrong):
    blocks = setting.pool.get_new_blocks(3)  # so 5 is free
    for ids in ([*blocks, wrong], [wrong, *blocks], (*blocks, wrong)):
        with pytest.raises(ValueError):
            getattr(setting.pool, method)(ids)
        assert [setting.pool.reference_count(block) for block in blocks] == [1, 1, 1]
        assert setting.counts() == (5, 0, 3)


def test_blocks_that_slid_out_of_a_window_are_skipped(setting):
    blocks = setting.run([1, 2, 3, 4, 5, 6])
    setting.pool.free_blocks(blocks[:1])
    slid = [-1, *blocks[1:]]
    setting.pool.touch(slid)
    setting.pool.free_blocks(slid)
    setting.pool.retire(1, slid)
    assert setting.counts() == (6, 2, 0)


@pytest.mark.parametrize("wrong", ["1", 1.5, None])
def test_block_id_that_is_not_an_integer_raises(setting, wrong):
    for call in (setting.pool.touch, setting.pool.free_blocks, lambda ids: setting.pool.retire(1, ids)):
        with pytest.raises(TypeError):
            call([wrong])


def test_block_ids_may_be_a_buffer(setting):
    blocks = array("i", setting.pool.get_new_blocks(3))
    setting.pool.touch(memoryview(blocks))
    setting.pool.free_blocks(blocks)
    assert [setting.pool.reference_count(block) for block in blocks] == [1, 1, 1]
    with pytest.raises(ValueError):
        setting.pool.touch(array("i", [0, 8]))
    assert setting.pool.reference_count(0) == 1


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


def test_blocks_for_rounds_up_and_refuses_negative_counts(setting):
    with pytest.raises(ValueError):
        setting.pool.blocks_for(-1)
    assert [setting.pool.blocks_for(tokens) for tokens in range(4)] == [0, 1, 1, 2]


def test_reference_count_of_an_invalid_block_raises(setting):
    for block in (-1, 8, 2**70):
        with pytest.raises(ValueError):
            setting.pool.reference_count(block)


# The kernel alone ----------------------------------------------------------------------------------


def test_large_pool_finds_every_kept_request_after_heavy_churn():
    """Large enough that entries of the hash index collide and are moved back."""
    setting = PoolDriver(Kernel, blocks=4_096)
    kept = {}
    for key in range(6_000):
        tokens = [key, key, key, 1, key, 2]
        kept[key] = setting.run_and_retire(key, tokens)
        setting.pool.evict(key - 1_300 if key % 3 else key - 7)
    statistics = setting.pool.statistics()
    found = {key: setting.match([key, key, key, 1, key, 2]) for key in kept}
    assert {len(blocks) for blocks in found.values()} == {0, 3}
    assert statistics.cached_requests == sum(len(blocks) == 3 for blocks in found.values()) > 800
    assert all(found[key] in ([], blocks) for key, blocks in kept.items())
    assert 3 * statistics.cached_requests == statistics.evictable


def test_total_of_blocks_held_by_kept_requests_is_bounded():
    """Hundreds of requests share a long prefix. The list of blocks that each keeps takes memory, too."""
    setting = PoolDriver(Kernel, blocks=1_500)
    beginning = [5] * 1_400
    prefix = setting.run_and_retire(0, beginning)
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
    assert len(setting.match([*beginning, 599, 599], limit=999)) == 701
    assert len(setting.match([*beginning, 1, 1], limit=999)) == 700


def test_pool_does_not_leak_memory():
    setting = PoolDriver(Kernel, blocks=64)

    def churn():
        for key in range(500):
            setting.run_and_retire(key, [key] * 9)
            setting.match([key] * 9)
            setting.pool.trim()
        for key in range(500):
            setting.pool.evict(key)

    churn()
    tracemalloc.start()
    churn()
    traced_files = [tracemalloc.Filter(True, "*/cext/*")]  # other threads may allocate meanwhile
    before = tracemalloc.take_snapshot().filter_traces(traced_files)
    churn()
    after = tracemalloc.take_snapshot().filter_traces(traced_files)
    tracemalloc.stop()
    grown = sum(entry.size_diff for entry in after.compare_to(before, "filename"))
    assert grown < 20_000
    assert setting.counts() == (64, 0, 0)


def test_sizeof_is_100_to_180_bytes_per_block():
    assert 10_000 * 100 <= sys.getsizeof(BlockPool(10_000, 16, hash_key=HASH_KEY)) <= 10_000 * 180


def test_hashes_of_another_type_raise():
    pool = BlockPool(4, 2, hash_key=HASH_KEY)
    for wrong in (None, [], "x"):
        with pytest.raises(TypeError):
            pool.match_prefix(wrong, 1)
        with pytest.raises(TypeError):
            pool.cache_full_blocks([], array("i"), 0, 0, wrong)
