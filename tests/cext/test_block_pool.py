"""What a block pool promises, tried on the kernel and on its oracle; then what only the kernel has."""

import sys
import tracemalloc
from array import array

import pytest

from cext.block_pool_oracle import BlockHashesOracle, BlockPoolOracle
from fairlead._cext.blockpool import BlockHashes, BlockPool, OutOfBlocks

HASH_KEY = bytes(range(16))


class Kernel:
    pool, hashes = BlockPool, BlockHashes


class Oracle:
    pool, hashes = BlockPoolOracle, BlockHashesOracle


@pytest.fixture(params=[Kernel, Oracle], ids=["kernel", "oracle"])
def kind(request):
    return request.param


class Setting:
    """A pool, and what a sequence does with it. Blocks of two tokens."""

    def __init__(self, kind, blocks=8, **options):
        self.kind = kind
        self.pool = kind.pool(blocks, 2, hash_key=HASH_KEY, **options)

    def hashes(self, tokens, salt=b""):
        chain = self.kind.hashes(HASH_KEY, 2, salt)
        chain.extend(array("i", tokens))
        return chain

    def run(self, tokens):
        """Takes the blocks that many tokens need and fills them."""
        blocks = self.pool.get_new_blocks(self.pool.blocks_for(len(tokens)))
        full = len(tokens) // 2
        self.pool.cache_full_blocks(blocks, array("i", tokens), 0, full, self.kind.hashes(HASH_KEY, 2))
        return blocks

    def live(self, key, tokens):
        blocks = self.run(tokens)
        self.pool.retire(key, blocks)
        return blocks

    def match(self, tokens, limit=99, **options):
        return self.pool.match_prefix(self.hashes(tokens), limit, **options)

    def counts(self):
        statistics = self.pool.statistics()
        return statistics.free, statistics.evictable, statistics.referenced


@pytest.fixture
def setting(kind):
    return Setting(kind)


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


# Contents ------------------------------------------------------------------------------------------


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


# Requests that have ended --------------------------------------------------------------------------


def test_an_ended_request_is_kept_but_for_its_last_partial_block(setting):
    blocks = setting.live(1, [1, 2, 3, 4, 5])
    assert (6, 2, 0) == setting.counts()
    statistics = setting.pool.statistics()
    assert (1, 4) == (statistics.cached_requests, statistics.cached_tokens)
    assert blocks[:2] == setting.match([1, 2, 3, 4, 5])


def test_a_request_with_no_full_block_is_not_kept(setting):
    setting.live(1, [1])
    setting.pool.retire(2, [])
    assert (8, 0, 0) == setting.counts()
    assert 0 == setting.pool.statistics().cached_requests
    assert not setting.pool.evict(1)


def test_a_key_kept_twice_means_the_later_one(setting):
    setting.live(1, [1, 2, 3, 4])
    setting.live(1, [5, 6])
    assert 1 == setting.pool.statistics().cached_requests
    assert (7, 1, 0) == setting.counts()
    assert [] == setting.match([1, 2])
    assert setting.pool.evict(1)
    assert (8, 0, 0) == setting.counts()


def test_a_key_retired_with_nothing_keeps_what_it_had(setting):
    blocks = setting.live(1, [1, 2])
    setting.live(1, [9])
    assert blocks == setting.match([1, 2])


def test_a_request_that_another_covers_is_dropped(setting):
    setting.live(1, [1, 2])
    longer = setting.match([1, 2])
    setting.pool.touch(longer)
    longer += setting.pool.get_new_blocks(1)
    setting.pool.cache_full_blocks(longer, array("i", [1, 2, 3, 4]), 0, 2, setting.hashes([1, 2, 3, 4]))
    setting.pool.retire(2, longer)
    assert 1 == setting.pool.statistics().cached_requests
    assert not setting.pool.evict(1)
    assert longer == setting.match([1, 2, 3, 4])


def test_the_same_prompt_a_thousand_times_is_kept_once(setting):
    for key in range(1000):
        setting.live(key, [1, 2, 3, 4])
    assert 1 == setting.pool.statistics().cached_requests
    assert (6, 2, 0) == setting.counts()


def test_the_least_recently_used_request_goes_first_and_as_a_whole(setting):
    setting.live(1, [1, 2, 3, 4])
    setting.live(2, [5, 6, 7, 8])
    setting.pool.get_new_blocks(5)
    assert [] == setting.match([1, 2, 3, 4])
    assert 2 == len(setting.match([5, 6, 7, 8]))
    assert (1, 2, 5) == setting.counts()


def test_a_hit_makes_a_request_the_most_recently_used(setting):
    setting.live(1, [1, 2, 3, 4])
    setting.live(2, [5, 6, 7, 8])
    found = setting.match([1, 2])
    setting.pool.touch(found)
    setting.pool.free_blocks(found)
    setting.pool.get_new_blocks(5)
    assert 2 == len(setting.match([1, 2, 3, 4]))
    assert [] == setting.match([5, 6, 7, 8])


def test_blocks_that_another_request_shares_stay(setting):
    first = setting.live(1, [1, 2, 3, 4])
    setting.pool.touch(first[:1])
    second = [first[0], *setting.pool.get_new_blocks(1)]
    setting.pool.cache_full_blocks(second, array("i", [1, 2, 9, 9]), 0, 2, setting.hashes([1, 2, 9, 9]))
    setting.pool.retire(2, second)
    assert 6 == setting.pool.statistics().cached_tokens
    assert setting.pool.evict(1)
    assert second == setting.match([1, 2, 9, 9])
    assert first[:1] == setting.match([1, 2, 3, 4])


def test_a_request_that_holds_less_of_the_beginning_covers_no_other(setting):
    """With a window: what has slid out of the one is still good for the other."""
    first = setting.live(1, [1, 2, 3, 4])
    setting.pool.touch(first)
    setting.pool.free_blocks(first[:1])
    second = [-1, first[1], *setting.pool.get_new_blocks(1)]
    tokens = [1, 2, 3, 4, 5, 6]
    setting.pool.cache_full_blocks(second, array("i", tokens), 2, 3, setting.hashes(tokens))
    setting.pool.retire(2, second)
    assert 2 == setting.pool.statistics().cached_requests
    assert [*first, second[2]] == setting.match(tokens)


def test_a_hit_on_what_an_evicted_request_held_last_makes_no_other_newer(setting):
    setting.live(1, [1, 2, 3, 4])
    setting.live(2, [5, 6, 7, 8])
    shared = setting.match([1, 2])
    setting.pool.touch(shared)
    third = [*shared, *setting.pool.get_new_blocks(1)]
    setting.pool.cache_full_blocks(third, array("i", [1, 2, 9, 9]), 0, 2, setting.hashes([1, 2, 9, 9]))
    setting.pool.retire(3, third)
    setting.pool.evict(3)
    setting.pool.touch(shared)
    setting.pool.free_blocks(shared)
    assert [1, 2] == [key for key in (1, 2) if setting.pool.evict(key)]
    assert (8, 0, 0) == setting.counts()
    for key in (4, 5, 6):
        setting.live(key, [key, key, key, key])
    setting.pool.get_new_blocks(6)
    assert [False, False, True] == [bool(setting.match([key, key])) for key in (4, 5, 6)]


def test_a_replaced_key_is_still_told_by_its_number(kind):
    setting = Setting(kind, blocks=4, threshold=0.25)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        setting.live(int("9" * 15), tokens)  # another object each time
    others = [int("8" * 15) + i for i in range(100)]
    assert [int("9" * 15)] == setting.pool.trim()
    assert 100 == len(set(others))


def test_a_block_that_is_read_is_never_evicted(setting):
    """Seed 002: what belongs to a request that is PROCESSING is untouchable."""
    setting.live(1, [1, 2, 3, 4])
    reading = setting.match([1, 2])
    setting.pool.touch(reading)
    assert setting.pool.evict(1)
    assert (7, 0, 1) == setting.counts()
    assert not set(reading) & set(setting.pool.get_new_blocks(7))
    with pytest.raises(OutOfBlocks):
        setting.pool.get_new_blocks(1)
    assert reading == setting.match([1, 2])


def test_what_is_evicted_can_be_evicted_once(setting):
    setting.live(1, [1, 2])
    assert setting.pool.evict(1)
    assert not setting.pool.evict(1)
    assert not setting.pool.evict(2**70)
    assert 1 == setting.pool.statistics().evicted_requests


@pytest.mark.parametrize("wrong", ["1", 1.5, None])
def test_what_is_no_number_is_no_key(setting, wrong):
    blocks = setting.run([1, 2])
    with pytest.raises(TypeError):
        setting.pool.retire(wrong, blocks)
    assert (7, 0, 1) == setting.counts()


# Thresholds (seed 002) -----------------------------------------------------------------------------


def test_trim_evicts_the_oldest_until_memory_is_below_the_threshold(kind):
    setting = Setting(kind, blocks=10, threshold=0.8)
    for key in range(5):
        setting.live(key, [10 * key, 1, 2, 3])
    assert 0 == setting.pool.free
    assert [0] == setting.pool.trim()
    assert 2 == setting.pool.free
    assert [] == setting.pool.trim()


def test_trim_evicts_the_oldest_until_entries_are_below_the_threshold(kind):
    setting = Setting(kind, blocks=100, max_entries=20, threshold=0.8)
    for key in range(5):
        setting.live(key, [10 * key, 1, 2, 3])
    assert [0] == setting.pool.trim()
    assert 4 * 4 == setting.pool.statistics().cached_tokens


def test_entries_in_use_count_but_are_not_trimmed(kind):
    setting = Setting(kind, blocks=100, max_entries=20, threshold=0.8)
    running = setting.run([1] * 40)
    setting.live(1, [2, 2])
    setting.live(2, [3, 3])
    assert [1, 2] == setting.pool.trim()
    assert running == setting.match([1] * 40)
    assert (80, 0, 20) == setting.counts()


def test_trim_keeps_what_frees_nothing(kind):
    """A kept request that is read as a whole: dropping it would make no room."""
    setting = Setting(kind, blocks=2, threshold=0.5)
    blocks = setting.live(1, [1, 2, 3, 4])
    setting.pool.touch(blocks)
    assert [] == setting.pool.trim()
    setting.pool.free_blocks(blocks)
    assert [1] == setting.pool.trim()


def test_the_limits_of_seed_002_fit(kind):
    pool = kind.pool(262_144 if kind is Kernel else 64, 16, hash_key=HASH_KEY, max_entries=4 * 1024 * 1024)
    assert [] == pool.trim()
    assert 8 == pool.blocks_for(128)
    assert 128 == pool.blocks_for(2048)


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
    before = tracemalloc.take_snapshot()
    churn()
    after = tracemalloc.take_snapshot()
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
