"""Run random operations on a block pool and on its oracle, and check what every block contains."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cext.block_pool_oracle import BlockHashesOracle, BlockPoolOracle
from fairlead._cext.blockpool import OutOfBlocks

MACHINE_SETTINGS = settings(
    stateful_step_count=40,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

HASH_KEY = bytes(range(16))
KEYS = [0, 1, 2, 3, 10**12, -(10**15)]
# Every sequence is a prefix of one of these, so contents repeat and prefixes are shared.
TEXTS = (
    [*range(1, 20)],
    [1, 2, 3, *range(30, 46)],
    [1, 2, 3, 30, 31, *range(50, 64)],
    [7] * 19,
    [-1, 2**31 - 1, -(2**31), 0] * 4,
)

texts = st.sampled_from(TEXTS)
lengths = st.integers(0, 12)
salts = st.sampled_from([b"", b"", b"", b"ann"])
keys = st.sampled_from(KEYS)
which = st.integers(0, 7)
windows = st.sampled_from([None, None, 0, 1, 2])
forms = st.sampled_from([list, tuple, lambda ids: array("i", ids), lambda ids: memoryview(array("i", ids))])


@dataclass
class Hashes:
    """The hash chain of one sequence, for the oracle and for the pool under test."""

    oracle: Any
    pool: Any


@dataclass
class Running:
    text: list
    length: int
    salt: bytes
    hashes: Hashes
    blocks: list = field(default_factory=list)
    cached: int = 0

    @property
    def tokens(self):
        return self.text[: self.length]


class BlockPoolMachine(RuleBasedStateMachine):
    """Subclasses set `new_pool` and `new_hashes` to the implementation under test.

    Both pools allocate the same ids, so one list of blocks serves both. `contents` maps a block to what was
    written last, as (salt, all tokens up to its end). `references` counts the sequences that use each block.
    """

    new_pool: Any = BlockPoolOracle
    new_hashes: Any = BlockHashesOracle
    fixed_options = {}  # noqa: RUF012

    @initialize(
        blocks=st.sampled_from([1, 4, 9, 14, 14, 20]),
        block_size=st.sampled_from([1, 2, 2, 3]),
        max_entries=st.sampled_from([None, None, 1, 8, 20]),
        threshold=st.sampled_from([0.5, 0.8, 1.0]),
        first_in_first_out=st.booleans(),
    )
    def begin(self, **options):
        options |= self.fixed_options
        self.total, self.block_size = options["blocks"], options["block_size"]
        self.oracle = BlockPoolOracle(**options, hash_key=HASH_KEY)
        self.pool = self.new_pool(**options, hash_key=HASH_KEY)
        self.running = []
        self.contents = {}
        self.references = Counter()

    # Running sequences

    @precondition(lambda self: len(self.running) < 8)
    @rule(
        text=texts,
        length=lengths,
        salt=salts,
        limit=st.sampled_from([0, 1, 9, 9, 9]),
        window=windows,
        form=forms,
    )
    def admit(self, text, length, salt, limit, window, form):
        """Read the cached prefix, allocate the missing blocks and fill them. A low limit makes duplicates."""
        sequence = self.new_sequence(text, length, salt)
        self.read(sequence, limit, window, form)
        self.running.append(sequence)
        self.fill(sequence, form)

    @rule(text=texts, length=lengths, window=windows, form=forms)
    def read_prefix(self, text, length, window, form):
        """Read the cached prefix and free it again without running."""
        sequence = self.new_sequence(text, length, b"")
        self.read(sequence, length, window, form)
        self.free_blocks(sequence.blocks, form)

    @precondition(lambda self: self.running)
    @rule(which=which, more=st.integers(0, 5), form=forms)
    def grow(self, which, more, form):
        sequence = self.running_sequence(which)
        sequence.length = min(sequence.length + more, len(sequence.text))
        self.fill(sequence, form)

    @precondition(lambda self: self.running)
    @rule(which=which, form=forms)
    def mark_full_again(self, which, form):
        sequence = self.running_sequence(which)
        self.mark_full(sequence, 0, sequence.cached, form)

    @precondition(lambda self: self.running)
    @rule(which=which, count=st.integers(1, 3), keep=st.booleans(), form=forms)
    def slide(self, which, count, keep, form):
        """Free or keep the first blocks that have not left the window yet."""
        sequence = self.running_sequence(which)
        first = sum(block == -1 for block in sequence.blocks)
        leaving = sequence.blocks[first : min(first + count, sequence.cached)]
        self.succeed("retire_blocks" if keep else "free_blocks", form(leaving))
        self.unreference(leaving)
        sequence.blocks[first : first + len(leaving)] = [-1] * len(leaving)

    @precondition(lambda self: self.running)
    @rule(which=which, slid=st.integers(0, 3), first=st.integers(0, 2), count=st.integers(0, 9))
    def fail(self, which, slid, first, count):
        """Free a sequence's blocks, and do not keep those that have left its window either."""
        self.slide(which, slid, True, list)
        sequence = self.running.pop(which % len(self.running))
        self.free_blocks(sequence.blocks, list)
        self.succeed("forget_blocks", sequence.hashes, first, first + count)

    @precondition(lambda self: self.running)
    @rule(which=which, form=forms)
    def abort(self, which, form):
        sequence = self.running.pop(which % len(self.running))
        self.free_blocks(sequence.blocks, form)

    @precondition(lambda self: self.running)
    @rule(
        which=which,
        more=st.integers(0, 3),
        slid=st.sampled_from([0, 0, 1, 2]),
        keep=st.booleans(),
        key=keys,
        form=forms,
    )
    def retire(self, which, more, slid, keep, key, form):
        """Retire a sequence after a few last tokens, perhaps with its first blocks out of the window."""
        self.grow(which, more, form)
        self.slide(which, slid, keep, form)
        sequence = self.running.pop(which % len(self.running))
        self.succeed("retire", key, form(sequence.blocks))
        self.unreference(sequence.blocks)

    @rule(text=texts, length=lengths, salt=salts, limit=st.integers(0, 5), window=windows)
    def match_prefix(self, text, length, salt, limit, window):
        self.match(self.new_sequence(text, length, salt), limit, window)

    # Finished requests

    @rule(text=texts, length=st.integers(1, 8), key=keys, form=forms)
    def run_and_retire(self, text, length, key, form):
        """Run and retire a request. Too few free blocks shorten it to its cached prefix."""
        sequence = self.new_sequence(text, length, b"")
        self.read(sequence, length, None, form)
        self.fill(sequence, form)
        self.succeed("retire", key, form(sequence.blocks))
        self.unreference(sequence.blocks)

    @rule(key=keys, text=texts, length=st.integers(1, 4), form=forms)
    def evict_and_read(self, key, text, length, form):
        """Evict a request, then read. Blocks that are still found are also held by other requests."""
        self.succeed("evict", key)
        self.read_prefix(text, length, None, form)

    @rule()
    def trim(self):
        before = self.pool.statistics().evicted_requests
        evicted = self.succeed("trim")
        assert before + len(evicted) == self.pool.statistics().evicted_requests

    @rule(key=keys)
    def evict(self, key):
        self.succeed("evict", key)

    @rule(more=st.integers(1, 6), all_available=st.sampled_from([False, False, True]), form=forms)
    def allocate_and_free(self, more, all_available, form):
        """Take more than is free and free it again. Taking all available blocks leaves none evictable."""
        taken = self.allocate(self.oracle.available if all_available else self.count_beyond_free(more))
        assert not all_available or self.pool.statistics().evictable == 0
        self.free_blocks(taken, form)

    # Invalid calls

    @rule(more=st.integers(1, 3))
    def allocate_too_many(self, more):
        result, error = self.attempt("get_new_blocks", self.oracle.available + more)
        assert (result, error) == ("raised", OutOfBlocks)

    @rule(
        which=which,
        method=st.sampled_from(["touch", "free_blocks", "retire", "retire_blocks"]),
        wrong=st.sampled_from([-2, 1000, 2**70, "1", 1.5, None, "unheld"]),
        after=st.booleans(),
    )
    def pass_invalid_block(self, which, method, wrong, after):
        """Pass an invalid block before or after valid ones. The valid ones must not change."""
        if wrong == "unheld":
            wrong = self.refused_block(method)
        valid = (
            [block for block in self.running_sequence(which).blocks if block != -1] if self.running else []
        )
        arguments = ([0] if method == "retire" else []) + [[*valid, wrong] if after else [wrong, *valid]]
        if wrong is not None or method == "touch":
            assert self.attempt(method, *arguments)[0] == "raised"

    @precondition(lambda self: self.running)
    @rule(which=which)
    def free_too_often(self, which):
        blocks = [block for block in self.running_sequence(which).blocks if block != -1]
        if blocks:
            extra = [blocks[0]] * self.references[blocks[0]]
            assert self.attempt("free_blocks", [*blocks, *extra]) == ("raised", ValueError)

    @precondition(lambda self: self.running)
    @rule(which=which, wrong=st.sampled_from(["tokens", "blocks", "order", "unheld", "other"]))
    def mark_too_many_full(self, which, wrong):
        sequence = self.running_sequence(which)
        tokens, full = array("i", sequence.tokens), sequence.length // self.block_size
        blocks, first, last = list(sequence.blocks), 0, full
        if wrong == "tokens":
            blocks, last = [-1] * (full + 1), full + 1
        elif wrong == "blocks":
            blocks = blocks[: full - 1] if full else []
            last = full or 1
        elif wrong == "order":
            first, last = 1, 0
        elif wrong == "unheld" and full and self.refused_block("free_blocks") is not None:
            blocks[full - 1] = self.refused_block("free_blocks")
        elif wrong == "other" and sequence.cached > 1 and -1 not in blocks[:2]:
            blocks[:2] = reversed(blocks[:2])
        else:
            return
        result, error = self.attempt("cache_full_blocks", blocks, tokens, first, last, sequence.hashes)
        assert (result, error) == ("raised", ValueError)

    # Invariants

    @invariant()
    def counts_equal_those_of_the_oracle(self):
        statistics = self.pool.statistics()
        assert self.oracle.statistics() == statistics
        assert self.total == statistics.free + statistics.evictable + statistics.referenced
        assert statistics.free + statistics.evictable == self.pool.available
        assert (statistics.free, statistics.evictable) == (self.pool.free, self.pool.evictable)
        assert self.oracle.shared == self.pool.shared
        assert statistics.cached_requests <= min(len(KEYS), self.total)
        assert statistics.cached_requests == 0 or statistics.cached_tokens > 0
        assert self.pool.free_ids() == self.oracle.free_ids()

    @invariant()
    def references_equal_those_of_the_running_sequences(self):
        for block in range(self.total):
            assert self.references[block] == self.pool.reference_count(block)

    # Helpers

    def new_sequence(self, text, length, salt):
        options = {"hash_key": HASH_KEY, "block_size": self.block_size, "salt": salt}
        hashes = Hashes(BlockHashesOracle(**options), self.new_hashes(**options))
        sequence = Running(text, min(length, len(text)), salt, hashes)
        for chain in (hashes.oracle, hashes.pool):
            full = chain.extend(array("i", sequence.tokens))
            assert sequence.length // self.block_size == full == len(chain)
        return sequence

    def running_sequence(self, which):
        return self.running[which % len(self.running)]

    def match(self, sequence, limit, window):
        """Match a prefix. Every block found must be in use and hold that part of the prefix."""
        found = self.succeed("match_prefix", sequence.hashes, limit, window=window)
        assert len(found) <= limit
        for i, block in enumerate(found):
            if window is not None and i < len(found) - window:
                assert block == -1
            else:
                assert (sequence.salt, sequence.tokens[: (i + 1) * self.block_size]) == self.contents[block]
        return found

    def read(self, sequence, limit, window, form):
        found = self.match(sequence, limit, window)
        self.succeed("touch", form(found))
        self.references.update(block for block in found if block != -1)
        sequence.blocks, sequence.cached = found, len(found)

    def free_blocks(self, blocks, form):
        self.succeed("free_blocks", form(blocks))
        self.unreference(blocks)

    def fill(self, sequence, form):
        needed = self.pool.blocks_for(sequence.length) - len(sequence.blocks)
        assert self.oracle.blocks_for(sequence.length) - len(sequence.blocks) == needed
        if needed > self.oracle.available:
            assert self.attempt("get_new_blocks", needed) == ("raised", OutOfBlocks)
            sequence.length = len(sequence.blocks) * self.block_size
            sequence.hashes = self.new_sequence(sequence.text, sequence.length, sequence.salt).hashes
        else:
            sequence.blocks = sequence.blocks + self.allocate(needed)
        self.mark_full(sequence, sequence.cached, sequence.length // self.block_size, form)

    def count_beyond_free(self, more):
        return min(self.oracle.free + more, self.oracle.available)

    def allocate(self, count):
        taken = self.succeed("get_new_blocks", count)
        assert len(set(taken)) == count
        for block in taken:
            assert self.references[block] == 0, "a block that is read was given out"
            self.contents.pop(block, None)
            self.references[block] = 1
        return taken

    def mark_full(self, sequence, first, last, form):
        tokens = array("i", sequence.tokens)
        self.succeed("cache_full_blocks", form(sequence.blocks), tokens, first, last, sequence.hashes)
        sequence.cached = max(sequence.cached, last)
        for i in range(first, last):
            if sequence.blocks[i] != -1:
                written = (sequence.salt, sequence.tokens[: (i + 1) * self.block_size])
                assert written == self.contents.setdefault(sequence.blocks[i], written)

    def unreference(self, blocks):
        self.references.subtract(block for block in blocks if block != -1)

    def refused_block(self, method):
        """Return a block that this method must refuse: a free one, or one without a reference."""
        if method == "touch":
            return next(iter(self.oracle.free_list), None)
        return next((block for block in range(self.total) if not self.references[block]), None)

    def succeed(self, method, *arguments, **options):
        result, value = self.attempt(method, *arguments, **options)
        assert result == "returned", value
        return value

    def attempt(self, method, *arguments, **options):
        before = self.snapshot()
        expected, actual = (
            outcome(
                getattr(getattr(self, side), method),
                *[getattr(value, side) if isinstance(value, Hashes) else value for value in arguments],
                **options,
            )
            for side in ("oracle", "pool")
        )
        assert expected == actual
        if actual[0] == "raised":
            assert before == self.snapshot(), "a failed call has changed something"
        return actual

    def snapshot(self):
        counts = [self.pool.reference_count(block) for block in range(self.total)]
        return self.pool.statistics(), counts


def outcome(call, *arguments, **options):
    """Return the result of a call, or the type of its exception, for comparison."""
    try:
        return "returned", call(*arguments, **options)
    except Exception as error:  # noqa: BLE001  (any exception is an outcome)
        return "raised", type(error)
