"""Owns the KV cache's blocks: one pool per KV cache group (the layers with the same window).

Guarantees that a call takes what it needs in every group or changes nothing, and that a pinned sequence's
blocks are available when it needs them. Independent of the queue and of steps.
"""

from array import array
from collections import Counter
from collections.abc import Sequence as ReadOnlySequence

import msgspec
import numpy as np

from fairlead._cext.blockpool import BlockHashes, BlockPool
from fairlead._cext.inputbatch import InputBatch
from fairlead.engine.sequence import Sequence

_HASHED = array("i")  # instead of the tokens of blocks that are hashed already
BlockIds = tuple[list[int], ...]


class Prefix(msgspec.Struct):
    """The blocks by group that hold the first `tokens` tokens; −1 for those that slid out of a window."""

    blocks: BlockIds
    tokens: int


class Memory:
    """The groups' block pools, and the block tables of `batch`.

    `blocks_total` and `windows` are by group; a window is in tokens, None means full attention. In a group
    with full attention a sequence takes the blocks of all its tokens when it is admitted. With a window it
    takes them with its chunks of at most `max_batched_tokens`, and leaves those that no later token can see.
    `prefix_cache`: keep blocks of ended sequences, and blocks that slid out of a window, for sequences that
    begin with the same tokens and salt. Kept blocks are evicted when memory is needed, so they count as
    available.

    A suspended sequence holds its blocks, the last of which may be partly full. They do not count as
    available, but are given up, a sequence at a time, when everything that is available does not suffice.
    What is given up goes to the prefix cache first, as the latest.
    """

    def __init__(
        self,
        batch: InputBatch,
        *,
        blocks_total: ReadOnlySequence[int],
        windows: ReadOnlySequence[int | None],
        block_size: int,
        max_batched_tokens: int,
        hash_key: bytes,
        max_entries: int | None = None,
        threshold: float = 0.8,
        first_in_first_out: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        self._batch = batch
        self._block_size = block_size
        self._hash_key = hash_key
        self._prefix_cache = prefix_cache
        self._max_entries = max_entries
        self.windows = tuple(windows)
        self.pools = tuple(
            BlockPool(
                blocks,
                block_size,
                hash_key=hash_key,
                max_entries=max_entries,
                threshold=threshold,
                first_in_first_out=first_in_first_out,
            )
            for blocks in blocks_total
        )
        self._groups = range(len(self.pools))
        self._none_reserved = [0] * len(self.pools)
        self._sliding = tuple(group for group, window in enumerate(windows) if window is not None)
        # Whether some group has a window, so that blocks are taken and freed while a sequence runs.
        self.slides = bool(self._sliding)
        self._chunks = [
            max_batched_tokens
            if window is None
            else max(1, min(max_batched_tokens, (total - 1) * block_size - (window - 1)))
            for total, window in zip(blocks_total, windows, strict=True)
        ]
        self._ceilings = [
            blocks_ceiling(total, window, block_size, max_batched_tokens)
            for total, window in zip(blocks_total, windows, strict=True)
        ]
        tables = map(batch.block_table, range(len(self.pools)))
        self._rows = [[row.data for row in np.asarray(table)] for table in tables]  # by group and slot
        self._reserved = [0] * len(self.pools)
        self._holders: dict[int, Sequence] = {}  # sequences with `held` blocks by key, the latest last
        # How many blocks of a prefix later tokens attend to, by group; None: all.
        self._seen = [None if window is None else -(-(window - 1) // block_size) for window in windows]

    # State -------------------------------------------------------------------------------------------

    @property
    def longest(self) -> int:
        """The length, in tokens, of the longest sequence that an empty cache can run to its end."""
        return longest([pool.total for pool in self.pools], self.windows, self._block_size)

    def ceiling(self, group: int) -> int:
        """Return the most tokens that one sequence holds at a time in `group`, whatever its length."""
        return self._ceilings[group] * self._block_size

    def unreserved(self, group: int) -> int:
        """Return how many blocks could be taken now and are not reserved for pinned sequences."""
        return self.pools[group].available - self._reserved[group]

    def shared_tokens(self, group: int) -> int:
        """Return the tokens in blocks that several running sequences have, once for each but the first."""
        pool = self.pools[group]
        shared = pool.shared
        if self._holders:
            held = Counter(block for one in self._holders.values() for block in _held(one, group))
            shared -= sum(min(count, pool.reference_count(block) - 1) for block, count in held.items())
        return shared * self._block_size

    def new_hashes(self, salt: bytes) -> BlockHashes | None:
        """Return a hash chain for a new sequence; None without a prefix cache."""
        return BlockHashes(self._hash_key, self._block_size, salt) if self._prefix_cache else None

    # Taking and freeing blocks -----------------------------------------------------------------------

    def allocate(self, sequence: Sequence) -> Prefix | None:
        """Take the blocks that a sequence needs to start: a cached prefix, and new ones for its first chunk.

        The result has both; computation starts at its `tokens`, with at least one token left. None, with
        nothing taken, if blocks are missing. A pinned sequence takes or reserves all that it can ever need.
        A sequence that was suspended goes on with the blocks that it holds.
        """
        pinned = sequence.is_pinned()
        if sequence.held is not None:
            if not (pinned and self.slides):
                return self._allocate_rest(sequence)
            self.give_up(sequence)
        if pinned and self.slides:
            sequence.hashes = None  # a shared block would not become free when it slides out
        prefix = self._match(sequence)
        for pool, blocks in zip(self.pools, prefix.blocks, strict=True):
            if blocks:  # before `unreserved`, which counts untouched blocks as available
                pool.touch(blocks)
        if not self._append_new(sequence, prefix):
            for pool, blocks in zip(self.pools, prefix.blocks, strict=True):
                pool.free_blocks(blocks)
            return None
        sequence.reused = sequence.indexed = prefix.tokens // self._block_size
        return prefix

    def extend(self, sequence: Sequence, tokens: int, *, from_holders: bool = True) -> bool:
        """Take the blocks that its first `tokens` tokens lack; False, with none taken, if a pool is short.

        Suspended sequences give up theirs for it, unless `from_holders` is False.
        """
        columns = -(-tokens // self._block_size)
        needed = [max(0, columns - count) for count in self._batch.block_counts(sequence.slot)]
        if not any(needed):
            return True
        own = sequence.reserved or self._none_reserved
        most = [max(0, count - mine) for count, mine in zip(needed, own, strict=True)]
        if not (self._make_available(most) if from_holders else self._are_available(most)):
            return False
        taken = tuple(pool.get_new_blocks(count) for pool, count in zip(self.pools, needed, strict=True))
        self._batch.append_block_ids(sequence.slot, taken)
        for group, count in enumerate(needed):
            self._use_reservation(sequence, group, count)
        return True

    def extend_by_one_block(
        self, slots: ReadOnlySequence[int], by_slot: ReadOnlySequence[Sequence | None]
    ) -> bool:
        """Take one more block per slot, in the only group; False, with none taken, if that is impossible."""
        if len(self.pools) > 1 or not self._make_available([len(slots)]):
            return False
        for slot, block in zip(slots, self.pools[0].get_new_blocks(len(slots)), strict=True):
            self._batch.append_block_ids(slot, ([block],))
        if self._reserved[0]:
            for slot in slots:
                if (sequence := by_slot[slot]) is not None:
                    self._use_reservation(sequence, 0, 1)
        return True

    def extend_for_chunk(self, sequence: Sequence, count: int) -> int:
        """Take the blocks for its next `count` tokens or fewer; return for how many tokens."""
        start = sequence.tokens.computed
        if self._holders:
            self._make_room_for_chunk(sequence, start + count)
        for group in self._sliding:
            own = 0 if sequence.reserved is None else sequence.reserved[group]
            columns = self._batch.block_counts(sequence.slot)[group] + self.unreserved(group) + own
            count = min(count, self._chunks[group], columns * self._block_size - start)
        if count <= 0 or not self.extend(sequence, start + count):
            return 0
        return count

    def extend_for_drafts(self, sequence: Sequence, drafts: int) -> int:
        """Take the blocks for its next token and `drafts` drafts after it; return how many fit.

        A pinned sequence takes none, so that what is reserved for it stays what it needs.
        """
        computed = sequence.tokens.computed
        if sequence.reserved is None and self.extend(sequence, computed + 1 + drafts, from_holders=False):
            return drafts
        room = min(self._batch.block_counts(sequence.slot)) * self._block_size - computed
        return min(drafts, room - 1)

    def rewind(self, sequence: Sequence) -> None:
        """Free the blocks of rejected drafts, which hold no accepted token."""
        taken = self._batch.take_unused_blocks(sequence.slot)
        for pool, blocks in zip(self.pools, taken, strict=True):
            if blocks:
                pool.free_blocks(blocks)

    def index(self, sequence: Sequence) -> None:
        """Add the blocks that are full now to the prefix cache; give up those that slid out of a window."""
        slot, hashes = sequence.slot, sequence.hashes
        if hashes is not None:
            first, full = sequence.indexed, sequence.tokens.committed // self._block_size
            sequence.indexed = full
            tokens = sequence.tokens.tokens_view() if full > len(hashes) else _HASHED
            for group in self._groups:
                self.pools[group].cache_full_blocks(self._rows[group][slot], tokens, first, full, hashes)
        for group in self._sliding:
            if self._should_delay_sliding(sequence, group):
                continue
            gone, pool = self._batch.slide(slot, group), self.pools[group]
            if gone:
                pool.retire_blocks(gone)  # which frees them if they were not indexed
                self._bound_entries(pool)
                self._use_reservation(sequence, group, -len(gone))

    def free(self, sequence: Sequence, *, keep: bool) -> None:
        """Remove a sequence from the batch, and free all its blocks.

        With `keep`, indexed ones stay cached until memory is needed: at most `max_entries` tokens, however
        seldom `trim` is called. Without, those that it computed and that slid out of a window go too.
        """
        blocks = self._batch.block_ids(sequence.slot)
        self._batch.remove_request(sequence.slot)
        self._free_blocks(sequence, blocks, keep=keep)
        self._cancel_reservation(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Remove a sequence from the batch; it holds its blocks until it starts again or gives them up.

        What a step under way computes is lost. Blocks for drafts of it are freed, and a reservation ends.
        """
        blocks = self._batch.block_ids(sequence.slot)
        self._batch.remove_request(sequence.slot)
        columns = -(-sequence.tokens.num_tokens // self._block_size)
        for pool, ids in zip(self.pools, blocks, strict=True):
            pool.free_blocks(ids[columns:])
        sequence.held = tuple(ids[:columns].tolist() for ids in blocks)
        sequence.evicted_tokens = sequence.tokens.committed
        self._holders[sequence.key] = sequence
        self._cancel_reservation(sequence)

    def give_up(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free the blocks that a sequence holds; `keep` as in `free`. It will be computed from its start."""
        if sequence.held is None:
            return
        del self._holders[sequence.key]
        blocks, sequence.held = sequence.held, None
        self._free_blocks(sequence, blocks, keep=keep)
        sequence.tokens.rewind(0)

    def trim(self) -> int:
        """Evict kept blocks, in eviction order, while a threshold is exceeded; return how many it freed."""
        before = sum(pool.free for pool in self.pools)
        for pool in self.pools:
            pool.trim()
        return sum(pool.free for pool in self.pools) - before

    def free_ids(self) -> list[list[int]]:
        """Return the ids of each group's blocks that hold nothing, ascending."""
        return [pool.free_ids() for pool in self.pools]

    # Helpers -----------------------------------------------------------------------------------------

    def _should_delay_sliding(self, sequence: Sequence, group: int) -> bool:
        """Return whether sliding now would separate a block from those that it will be reused with.

        A prompt mostly ends within a block. Reuse up to its last full block needs one block more than its
        own next token does. If that one slid out by itself, it would be evicted first, and the others would
        be kept in vain. While there is room, it stays until the next one is full.
        """
        tokens, pool = sequence.tokens, self.pools[group]
        within = tokens.committed % self._block_size > 0
        decodes = tokens.num_tokens - tokens.committed <= 2  # with the token in flight
        return within and decodes and 8 * self.unreserved(group) > pool.total

    def _allocate_rest(self, sequence: Sequence) -> Prefix | None:
        """Take the blocks that a sequence needs besides those that it holds; see `allocate`."""
        assert sequence.held is not None
        prefix = Prefix(tuple(map(list, sequence.held)), sequence.tokens.computed)
        if not self._append_new(sequence, prefix):
            return None
        del self._holders[sequence.key]
        sequence.held = None
        return prefix

    def _append_new(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Append the new blocks for its first chunk to `prefix`; False, with none taken, if a pool is short.

        A pinned sequence reserves what else it can ever need.
        """
        needed = []
        for group in self._groups:
            tokens = sequence.tokens.num_tokens
            if self.windows[group] is not None:
                tokens = min(tokens, prefix.tokens + self._chunks[group])
            needed.append(max(0, -(-tokens // self._block_size) - len(prefix.blocks[group])))
        reserved = None
        most = needed
        if sequence.is_pinned():
            reserved = [
                self._reservation(group, sequence, prefix, count) for group, count in enumerate(needed)
            ]
            most = [count + rest for count, rest in zip(needed, reserved, strict=True)]
        if not self._make_available(most, but=sequence):
            return False
        for group in self._groups:
            prefix.blocks[group].extend(self.pools[group].get_new_blocks(needed[group]))
            if reserved is not None:
                self._reserved[group] += reserved[group]
        sequence.reserved = reserved
        return True

    def _are_available(self, needed: ReadOnlySequence[int]) -> bool:
        """Return whether so many blocks by group are available, and are not reserved."""
        return all(count <= self.unreserved(group) for group, count in enumerate(needed))

    def _make_available(self, needed: ReadOnlySequence[int], *, but: Sequence | None = None) -> bool:
        """Give up blocks of suspended sequences, except `but`, until so many by group are available.

        False if that cannot suffice. The latest holder gives up first: it will probably be the last to go on.
        """
        if self._are_available(needed):
            return True
        holders = [one for one in self._holders.values() if one is not but]
        for group, count in enumerate(needed):
            # An upper bound, because blocks may be shared: nothing is given up if even that does not suffice.
            if count > self.unreserved(group) + sum(len(_held(one, group)) for one in holders):
                return False
        while holders and not self._are_available(needed):
            self.give_up(holders.pop())
        return self._are_available(needed)

    def _make_room_for_chunk(self, sequence: Sequence, tokens: int) -> None:
        """Have suspended sequences give up blocks, as far as that helps this one to `tokens` tokens."""
        counts = self._batch.block_counts(sequence.slot)
        own = sequence.reserved or self._none_reserved
        needed = [0] * len(self.pools)
        for group in self._sliding:
            chunk = min(tokens, sequence.tokens.computed + self._chunks[group])
            needed[group] = max(0, -(-chunk // self._block_size) - counts[group] - own[group])
        self._make_available(needed)

    def _free_blocks(
        self, sequence: Sequence, blocks: ReadOnlySequence[ReadOnlySequence[int]], *, keep: bool
    ) -> None:
        """Remove a sequence's references to its blocks; see `free`."""
        hashes = sequence.hashes
        for group, pool in enumerate(self.pools):
            if keep and hashes is not None:
                pool.retire(sequence.key, blocks[group])
                self._bound_entries(pool)
                continue
            pool.free_blocks(blocks[group])
            if hashes is not None and self.windows[group] is not None:
                pool.forget_blocks(hashes, sequence.reused, sequence.indexed)

    def _cancel_reservation(self, sequence: Sequence) -> None:
        for group, count in enumerate(sequence.reserved or ()):
            self._reserved[group] -= count
        sequence.reserved = None

    def _match(self, sequence: Sequence) -> Prefix:
        """Return the longest prefix that every group has cached and that leaves a token to compute.

        A group with a window needs only the blocks that the first token to compute attends to, so it may have
        a prefix of some length and none of a shorter one. Each group is asked for what the one before has,
        and all are asked again until they agree. Example with a window of two blocks (o: cached):

            full attention   o o o o o o . .   6    3
            window           . o o . o . o o   3    3
        """
        hashes, tokens = sequence.hashes, sequence.tokens
        limit = (tokens.num_tokens - 1) // self._block_size
        if hashes is None or limit == 0:
            return Prefix(tuple([] for _ in self.pools), 0)
        hashes.extend(tokens.tokens_view())
        while True:
            found = []
            for group in self._groups:
                found.append(self._match_in(group, hashes, limit))
                limit = len(found[-1])
            if len(found[0]) == limit:  # no group has fewer than the last
                return Prefix(tuple(found), limit * self._block_size)

    def _bound_entries(self, pool: BlockPool) -> None:
        if self._max_entries is not None and pool.evictable * self._block_size > self._max_entries:
            pool.trim()

    def _match_in(self, group: int, hashes: BlockHashes, limit: int) -> list[int]:
        return self.pools[group].match_prefix(hashes, limit, window=self._seen[group])

    def _reservation(self, group: int, sequence: Sequence, prefix: Prefix, count: int) -> int:
        """Return the most blocks that it can ever hold at once in `group`, less its prefix and `count`."""
        most = min(-(-sequence.longest // self._block_size), self._ceilings[group])
        blocks = prefix.blocks[group]
        return max(0, most - len(blocks) + blocks.count(-1) - count)

    def _use_reservation(self, sequence: Sequence, group: int, count: int) -> None:
        """Deduct blocks that a sequence took (negative: freed) from its reservation."""
        if sequence.reserved is not None:
            count = min(count, sequence.reserved[group])
            sequence.reserved[group] -= count
            self._reserved[group] -= count


def _held(sequence: Sequence, group: int) -> list[int]:
    """Return the blocks that a suspended sequence holds in a group, without those that slid out."""
    assert sequence.held is not None
    return [block for block in sequence.held[group] if block >= 0]


def blocks_ceiling(total: int, window: int | None, block_size: int, max_batched_tokens: int) -> int:
    """Return the most blocks that one sequence holds at a time in a group of `total` blocks.

    With a window: what its next token sees, two chunks in flight, and the partial blocks at both ends.
    """
    if window is None:
        return total
    return min(total, -(-(window - 1 + 2 * max_batched_tokens) // block_size) + 1)


def longest(
    blocks_total: ReadOnlySequence[int], windows: ReadOnlySequence[int | None], block_size: int
) -> int:
    """Return the most tokens of one sequence. A group limits it unless its window can slide in its blocks."""
    bounds = [
        total * block_size
        for total, window in zip(blocks_total, windows, strict=True)
        if window is None or total < -(-window // block_size) + 1
    ]
    return min(bounds, default=2**31 - 1)
