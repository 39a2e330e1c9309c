"""The blocks of all groups: a sequence takes all that it needs or nothing, and frees all of them."""

from array import array

import pytest

from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.engine.memory import Memory, blocks_ceiling, longest
from fairlead.engine.sequence import MOST_PREEMPTIONS, Sequence

SIZE = 4


class Cache:
    """A `Memory`, its batch, and helpers that add, compute and remove sequences."""

    def __init__(self, *, blocks=(20,), windows=(None,), chunk=16, prefix_cache=True) -> None:
        self.batch = InputBatch(
            slots=8,
            max_batched_tokens=chunk,
            max_model_len=200,
            block_size=SIZE,
            vocab_size=100,
            windows=windows,
        )
        self.memory = Memory(
            self.batch,
            blocks_total=blocks,
            windows=windows,
            block_size=SIZE,
            max_batched_tokens=chunk,
            hash_key=bytes(16),
            prefix_cache=prefix_cache,
        )

    def new(
        self, key: int, tokens: int, max_tokens: int = 8, *, pinned=False, salt=b"", prompt=range(1, 200)
    ) -> Sequence:
        state = SequenceState(key, list(prompt[:tokens]), max_tokens=max_tokens)
        sequence = Sequence(state, hashes=self.memory.new_hashes(salt))
        sequence.preemptions = MOST_PREEMPTIONS if pinned else 0
        return sequence

    def enter(self, sequence: Sequence) -> int | None:
        """Admit a sequence to the slot of its key; return its cached tokens, or None if it has to wait."""
        prefix = self.memory.allocate(sequence)
        if prefix is None:
            return None
        sequence.tokens.rewind(prefix.tokens)
        sequence.slot = sequence.key
        self.batch.add_request(sequence.key, sequence.tokens, prefix.blocks)
        return prefix.tokens

    def compute(self, sequence: Sequence, tokens: int) -> None:
        self.batch.survey(0)
        assert tokens == self.memory.extend_for_chunk(sequence, tokens)
        self.batch.num_scheduled[sequence.slot] = tokens
        step = self.batch.prepare_inputs()
        self.batch.commit_tokens(step, array("i", [99] * step.samples))
        self.memory.index(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.memory.free(sequence, keep=True)

    @property
    def available(self) -> list[int]:
        return [pool.available for pool in self.memory.pools]


def test_all_blocks_of_a_prompt_are_taken_at_once_and_freed_at_the_end():
    cache = Cache()
    sequence = cache.new(1, 10)
    assert cache.enter(sequence) == 0
    assert cache.available == [17]
    cache.leave(sequence)
    assert cache.available == [20]


def test_sequence_that_does_not_fit_takes_no_blocks_in_any_group():
    for blocks, left in (((3, 20), [0, 17]), ((20, 5), [17, 2])):
        cache = Cache(blocks=blocks, windows=(None, 6))
        assert cache.enter(cache.new(1, 11)) == 0
        assert left == cache.available
        assert cache.enter(cache.new(2, 16)) is None
        assert left == cache.available


def test_cached_prefix_is_released_if_the_rest_does_not_fit():
    cache = Cache(blocks=(6,))
    first = cache.new(1, 9)
    cache.enter(first)
    cache.compute(first, 9)
    assert cache.enter(cache.new(2, 30)) is None
    assert cache.available == [3]
    assert [cache.memory.pools[0].reference_count(block) for block in cache.batch.block_ids(1)[0][:2]] == [
        1,
        1,
    ]


def test_shared_prefix_is_counted_as_shared():
    cache = Cache()
    first, second = cache.new(1, 9), cache.new(2, 13)
    cache.enter(first)
    cache.compute(first, 9)
    assert cache.enter(second) == 8
    assert cache.available == [20 - 3 - 2]
    assert cache.memory.shared_tokens(0) == 8
    cache.leave(first)
    assert cache.memory.shared_tokens(0) == 0


def test_prefix_reaches_only_as_far_as_every_group_has_it():
    cache = Cache(blocks=(20, 20), windows=(None, 6), chunk=40)
    first = cache.new(1, 30)
    cache.enter(first)
    cache.compute(first, 30)
    cache.leave(first)
    assert cache.enter(cache.new(2, 40)) == 28
    window = cache.batch.block_ids(2)[1].tolist()
    assert window[:5] == [-1] * 5  # the next token sees two of the seven blocks found
    assert -1 not in window[5:]


def test_pinned_sequence_takes_its_blocks_from_its_reservation():
    cache = Cache(blocks=(10,))
    pinned, other = cache.new(1, 4, 20, pinned=True), cache.new(2, 12)
    assert cache.enter(pinned) == 0
    assert (cache.available, cache.memory.unreserved(0)) == ([9], 4)
    assert cache.enter(other) == 0
    assert (cache.available[0], cache.memory.unreserved(0)) == (6, 1)
    assert cache.memory.extend(pinned, 24)
    assert (cache.available[0], cache.memory.unreserved(0), pinned.reserved) == (1, 1, [0])
    assert not cache.memory.extend(other, 24)
    cache.leave(pinned)
    assert (cache.available[0], cache.memory.unreserved(0)) == (7, 7)


def test_pinned_sequence_waits_until_all_it_can_need_is_free():
    cache = Cache(blocks=(10,))
    cache.enter(cache.new(1, 20))
    assert cache.enter(cache.new(2, 4, 20, pinned=True)) is None
    assert cache.enter(cache.new(3, 4, 16, pinned=True)) == 0


def test_without_prefix_cache_nothing_is_hashed_or_kept():
    cache = Cache(prefix_cache=False)
    first = cache.new(1, 9)
    assert first.hashes is None
    cache.enter(first)
    cache.compute(first, 9)
    cache.leave(first)
    assert cache.enter(cache.new(2, 9)) == 0
    assert cache.memory.pools[0].evictable == 0


@pytest.mark.parametrize(
    ("blocks", "windows", "tokens"),
    [
        ((10,), (None,), 40),
        ((10, 4), (None, 6), 40),
        ((10, 2), (None, 6), 8),  # two blocks cannot hold a window of 6 at every offset
        ((10, 3), (None, 6), 40),
        ((3,), (6,), 2**31 - 1),
    ],
)
def test_longest_sequence_is_what_no_group_bounds(blocks, windows, tokens):
    assert tokens == longest(blocks, windows, SIZE)


@pytest.mark.parametrize(("window", "blocks"), [(None, 50), (6, 11), (1000, 50)])
def test_window_limits_the_blocks_of_one_sequence(window, blocks):
    assert blocks == blocks_ceiling(50, window, SIZE, 16)


# Suspended sequences -------------------------------------------------------------------------------


def suspended(cache: Cache, key: int, tokens: int, *, pinned=False) -> Sequence:
    """Return a sequence that was computed to its last token and suspended."""
    sequence = cache.new(key, tokens, pinned=pinned, prompt=range(key, 100))
    cache.enter(sequence)
    for first in range(0, tokens, 16):
        cache.compute(sequence, min(16, tokens - first))
    cache.memory.hold(sequence)
    return sequence


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_suspended_sequence_goes_on_with_its_own_blocks_and_computes_nothing_again(windows, prefix_cache):
    cache = Cache(blocks=[20] * len(windows), windows=windows, prefix_cache=prefix_cache)
    sequence = suspended(cache, 1, 30)
    held = sequence.held
    assert sequence.held is not None
    assert cache.enter(sequence) == 30
    assert [[*ids[: len(before)]] for ids, before in zip(cache.batch.block_ids(1), held, strict=True)] == [
        *held
    ]
    assert sequence.held is None
    cache.leave(sequence)
    assert cache.available == [20] * len(windows)


def test_what_is_cached_is_evicted_before_suspended_sequences_lose_blocks():
    cache = Cache(blocks=(12,))
    ended = cache.new(1, 15, prompt=range(60, 100))
    cache.enter(ended)
    cache.compute(ended, 15)
    first, second = suspended(cache, 2, 10), suspended(cache, 3, 10)
    cache.leave(ended)  # the latest in the cache, and still the first to go
    assert cache.available == [6]
    assert cache.enter(cache.new(4, 23, prompt=range(40, 80))) == 0
    assert (len(first.held[0]), len(second.held[0])) == (3, 3)
    assert cache.available == [0]
    assert cache.enter(cache.new(5, 5, prompt=range(50, 80))) == 0
    assert (first.held is None, second.held) == (False, None)  # the latest has given up
    assert second.tokens.computed == 0


def test_nothing_is_given_up_for_what_does_not_fit_anyway():
    cache = Cache(blocks=(12,))
    running = cache.new(1, 17)
    cache.enter(running)
    sequence = suspended(cache, 2, 10)
    assert cache.enter(cache.new(3, 40)) is None
    assert sequence.held is not None
    assert cache.available == [4]


def test_blocks_that_were_given_up_are_found_in_the_prefix_cache():
    cache = Cache(blocks=(12,))
    sequence = suspended(cache, 1, 30)
    cache.memory.give_up(sequence)
    assert cache.available == [12]
    assert cache.enter(sequence) == 28


@pytest.mark.parametrize("windows", [(None,), (6,)])
def test_pinned_sequence_has_no_reservation_while_it_is_suspended_and_a_new_one_afterwards(windows):
    cache = Cache(windows=windows)
    sequence = cache.new(1, 10, max_tokens=30, pinned=True)
    cache.enter(sequence)
    cache.compute(sequence, 10)
    reserved = sum(sequence.reserved)
    assert reserved > 0
    cache.memory.hold(sequence)
    assert cache.memory.unreserved(0) == cache.available[0]
    assert cache.enter(sequence) == (0 if windows == (6,) else 10)
    held = sum(block >= 0 for block in cache.batch.block_ids(1)[0])
    assert held + sum(sequence.reserved) >= min(10, cache.memory.ceiling(0) // SIZE)
    cache.leave(sequence)
    assert cache.memory.unreserved(0) == 20


def test_decode_takes_a_block_from_a_suspended_sequence():
    cache = Cache(blocks=(5,))
    running = cache.new(1, 8, prompt=range(50, 90))
    cache.enter(running)
    sequence = suspended(cache, 2, 9)
    assert cache.available == [0]
    cache.compute(running, 8)
    by_slot = [None] * 8
    assert cache.memory.extend_by_one_block([1], by_slot)
    assert sequence.held is None


def test_drafts_take_no_block_from_a_suspended_sequence():
    cache = Cache(blocks=(5,))
    running = cache.new(1, 8, prompt=range(50, 90))
    cache.enter(running)
    sequence = suspended(cache, 2, 9)
    cache.compute(running, 8)
    assert cache.memory.extend_for_drafts(running, 3) == -1
    assert sequence.held is not None


def test_blocks_that_suspended_sequences_share_do_not_count_as_shared():
    cache = Cache()
    first, second = cache.new(1, 9), cache.new(2, 13)
    cache.enter(first)
    cache.compute(first, 9)
    assert cache.enter(second) == 8
    assert cache.memory.shared_tokens(0) == 8
    cache.memory.hold(first)
    assert cache.memory.shared_tokens(0) == 0
    cache.memory.give_up(first)
    assert cache.memory.shared_tokens(0) == 0
