"""The blocks of all groups under random sequences: what a prefix has is what its tokens' blocks hold.

The oracle writes down what each block of each group holds, and which sequences vouch for it. The order of
eviction is that of one pool, which `tests/cext/test_block_pool_machine.py` compares with an oracle.
"""

from array import array
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.test_memory import SIZE, Cache
from fairlead.engine.memory import Memory, Prefix
from fairlead.engine.sequence import NO_HANDLE, Sequence
from first_failure import until_first_failure

CHUNK = 16
LONGEST = 100
PLENTY = 400  # blocks, so that nothing is evicted in a run
TEXTS = ([1, 2, 3, 4] * 25, [5] * 100, [1, 2, 3, 4] * 9 + [6, 7] * 32)

MACHINE_SETTINGS = settings(
    stateful_step_count=30, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)

Content = tuple[bytes, tuple[int, ...]]  # salt, and all tokens up to the block's end


class MemoryMachine(RuleBasedStateMachine):
    """Sequences are admitted, computed in chunks, ended, failed and preempted. Mutants replace `wrap`."""

    fixed_options = {}  # noqa: RUF012
    wrap = staticmethod(lambda pool: pool)

    @initialize(
        windows=st.sampled_from([(None,), (6,), (None, 6), (9,), (None, 3, 9), (1,), (None, 4)]),
        blocks=st.sampled_from([PLENTY, 12, 20]),
    )
    def start(self, **options) -> None:
        options |= self.fixed_options
        windows, blocks = options["windows"], options["blocks"]
        self.cache = Cache(blocks=[blocks] * len(windows), windows=windows, chunk=CHUNK)
        self.memory, self.windows, self.blocks = self.cache.memory, windows, blocks
        self.memory.pools = tuple(map(type(self).wrap, self.memory.pools))
        self.running: dict[int, tuple[Sequence, bytes]] = {}
        self.contents: list[dict[int, Content]] = [{} for _ in windows]
        # For each content in a group: the sequences that computed or read it and have not failed.
        self.vouching: list[dict[Content, set[int]]] = [defaultdict(set) for _ in windows]
        self.failed: list[set[Content]] = [set() for _ in windows]  # computed by a sequence that failed
        self.keys = 0

    @precondition(lambda self: len(self.running) < 6)
    @rule(text=st.sampled_from(TEXTS), length=st.integers(1, LONGEST), salt=st.sampled_from([b"", b"", b"A"]))
    def admit(self, text, length, salt) -> None:
        slot = next(slot for slot in range(8) if slot not in self.running)
        self.keys += 1
        sequence = self.cache.new(self.keys, length, 60, salt=salt, prompt=text)
        self.enter(sequence, slot, salt)

    def enter(self, sequence: Sequence, slot: int, salt: bytes) -> bool:
        prefix = self.memory.allocate(sequence)
        if prefix is None:
            return False
        tokens = sequence.tokens.token_ids().tolist()
        assert prefix.tokens % SIZE == 0
        assert prefix.tokens < len(tokens)
        self.check_prefix(sequence, salt, tokens, prefix)
        for group, blocks in enumerate(prefix.blocks):
            for column, block in enumerate(blocks[prefix.tokens // SIZE :], prefix.tokens // SIZE):
                assert block >= 0, "the blocks to write are new"
                assert column * SIZE >= prefix.tokens
                self.contents[group].pop(block, None)
        sequence.tokens.rewind(prefix.tokens)
        sequence.slot, sequence.handle = slot, 1
        self.cache.batch.add_request(slot, sequence.tokens, prefix.blocks)
        self.running[slot] = sequence, salt
        return True

    def check_prefix(self, sequence, salt, tokens, prefix) -> None:
        """Compare what was found with the oracle: its contents, and that it is all that is surely cached."""
        for group, window in enumerate(self.windows):
            cached = prefix.blocks[group][: prefix.tokens // SIZE]
            first_seen = 0 if window is None else max(0, prefix.tokens - window + 1)
            for column, block in enumerate(cached):
                if (column + 1) * SIZE <= first_seen:
                    assert block == -1, "a block that no token sees is taken"
                    continue
                content = salt, tuple(tokens[: (column + 1) * SIZE])
                assert self.contents[group][block] == content
                assert self.vouching[group][content], "only a sequence that failed computed it"
                self.vouching[group][content].add(sequence.key)
        if self.blocks == PLENTY:
            assert prefix.tokens >= self.surely_cached(salt, tokens) * SIZE

    def surely_cached(self, salt, tokens) -> int:
        """Return how many blocks of a prefix every group has if nothing was ever evicted."""

        def has(group: int, column: int) -> bool:
            content = salt, tuple(tokens[: (column + 1) * SIZE])
            return bool(self.vouching[group][content]) and content not in self.failed[group]

        def is_cached(group: int, length: int) -> bool:
            window = self.windows[group]
            first = 0 if window is None else max(0, length * SIZE - window + 1) // SIZE
            return all(has(group, column) for column in range(first, length))

        groups = range(len(self.windows))
        lengths = range((len(tokens) - 1) // SIZE, -1, -1)
        return next(length for length in lengths if all(is_cached(group, length) for group in groups))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, CHUNK))
    def compute(self, data, count) -> None:
        sequence, salt = self.drawn(data)
        tokens = sequence.tokens
        count = self.memory.extend_for_chunk(sequence, min(count, tokens.num_tokens - tokens.computed))
        if not count:
            return
        self.cache.batch.survey(0)
        self.cache.batch.num_scheduled[sequence.slot] = count
        step = self.cache.batch.prepare_inputs()
        written = self.written(sequence, tokens.computed - count)
        committed = self.cache.batch.commit_tokens(step, array("i", [1 + tokens.computed % 4] * step.samples))
        known = tokens.token_ids().tolist()
        for group, blocks in enumerate(self.cache.batch.block_ids(sequence.slot)):
            for column in range(tokens.committed // SIZE):
                if blocks[column] >= 0 and blocks[column] in written[group]:
                    content = salt, tuple(known[: (column + 1) * SIZE])
                    self.contents[group][blocks[column]] = content
                    self.vouching[group][content].add(sequence.key)
        self.memory.index(sequence)
        for slot, *_ in committed.finished:
            self.leave(slot, keep=True)

    def written(self, sequence, first: int) -> list[set[int]]:
        """Check that nobody else can read the blocks that a step writes; return them by group."""
        written = []
        for group, blocks in enumerate(self.cache.batch.block_ids(sequence.slot)):
            columns = range(first // SIZE, -(-sequence.tokens.computed // SIZE))
            written.append({blocks[column] for column in columns})
            for block in written[-1]:
                assert self.memory.pools[group].reference_count(block) == 1, "two sequences have the block"
        return written

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data, fails) -> None:
        """End a sequence: finished, aborted or timed out, so that its blocks stay cached; or failed."""
        sequence, salt = self.drawn(data)
        if fails:
            known = sequence.tokens.token_ids().tolist()
            for group in range(len(self.windows)):
                for column in range(sequence.reused, sequence.tokens.committed // SIZE):
                    content = salt, tuple(known[: (column + 1) * SIZE])
                    self.vouching[group][content].discard(sequence.key)
                    self.failed[group].add(content)
        self.leave(sequence.slot, keep=not fails)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data) -> None:
        """Preempt a sequence and admit it again, which finds at least as much as anybody else would."""
        sequence, salt = self.drawn(data)
        slot = sequence.slot
        self.leave(slot, keep=True)
        sequence.preemptions = 1
        sequence.tokens.rewind(0)
        self.enter(sequence, slot, salt)

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 30))
    def need_memory(self, count) -> None:
        """Take blocks, as somebody else's sequence would, and free them again."""
        for group, pool in enumerate(self.memory.pools):
            wanted = min(count, pool.available)
            if self.blocks != PLENTY:
                taken = pool.get_new_blocks(wanted)
                for block in taken:
                    self.contents[group].pop(block, None)
                pool.free_blocks(taken)

    @invariant()
    def blocks_that_no_running_sequence_has_are_available(self) -> None:
        if not hasattr(self, "memory"):
            return
        tables = [self.cache.batch.block_ids(slot) for slot in self.running]
        for group, pool in enumerate(self.memory.pools):
            used = Counter(block for table in tables for block in table[group] if block >= 0)
            assert pool.available == pool.total - len(used)
            for block in range(min(pool.total, 40)):
                assert pool.reference_count(block) == used[block]
            for slot, (sequence, _) in self.running.items():
                held = sum(block >= 0 for block in self.cache.batch.block_ids(slot)[group])
                assert held * SIZE <= self.memory.ceiling(group), (sequence.key, self.windows[group])

    def teardown(self) -> None:
        for slot in list(getattr(self, "running", {})):
            self.leave(slot, keep=True)
        if hasattr(self, "memory"):
            assert all(pool.available == pool.total for pool in self.memory.pools)

    def drawn(self, data) -> tuple[Sequence, bytes]:
        return self.running[data.draw(st.sampled_from(sorted(self.running)), label="slot")]

    def leave(self, slot: int, *, keep: bool) -> None:
        sequence, _ = self.running.pop(slot)
        self.memory.free(sequence, keep=keep)
        sequence.handle = NO_HANDLE


def test_prefixes_are_what_their_blocks_hold():
    run_state_machine_as_test(MemoryMachine, settings=MACHINE_SETTINGS)


# Memories with one defect each ---------------------------------------------------------------------


class FaultyPool:
    """A pool of which subclasses replace a method."""

    def __init__(self, pool) -> None:
        self._pool = pool

    def __getattr__(self, name):
        return getattr(self._pool, name)


def test_wrapped_pool_passes_the_machine():
    """Otherwise the mutants below could fail because of the wrapper."""
    machine = type("Machine", (MemoryMachine,), {"wrap": FaultyPool})
    run_state_machine_as_test(machine, settings=settings(MACHINE_SETTINGS, max_examples=30))


class FreesWhatSlidOut(FaultyPool):
    def retire_blocks(self, block_ids):
        self._pool.free_blocks(block_ids)


class HoldsWhatSlidOut(FaultyPool):
    def retire_blocks(self, block_ids):
        pass


class KeepsWhatSlidOutOfFailedSequences(FaultyPool):
    def forget_blocks(self, hashes, first, last):
        pass


class ForgetsWhatFailedSequencesReused(FaultyPool):
    def forget_blocks(self, hashes, first, last):
        self._pool.forget_blocks(hashes, 0, last)


class FindsAWindowThatLacksABlock(FaultyPool):
    def match_prefix(self, hashes, limit, *, window=None):
        return self._pool.match_prefix(hashes, limit, window=window and window - 1)


class FindsOnlyWholePrefixes(FaultyPool):
    def match_prefix(self, hashes, limit, *, window=None):
        return self._pool.match_prefix(hashes, limit)


class MissesTheFirstBlockOfAWindow(FaultyPool):
    def touch(self, block_ids):
        self._pool.touch(block_ids[1:])


def asks_each_group_once(self, sequence):
    prefix = match(self, sequence)
    if sequence.hashes is not None and prefix.tokens:
        limit = (sequence.tokens.num_tokens - 1) // SIZE
        found = tuple(self._match_in(group, sequence.hashes, limit) for group in self._groups)
        length = min(map(len, found))
        return Prefix(tuple(blocks[:length] for blocks in found), length * SIZE)
    return prefix


def never_slides_within_a_block(self, sequence, group):
    return sequence.tokens.committed % SIZE > 0


def indexes_the_block_that_is_not_full_yet(self, sequence):
    index(self, sequence)
    sequence.indexed += sequence.tokens.committed % SIZE > 0


index, match = Memory.index, Memory._match

METHODS = [
    ("_match", asks_each_group_once, {"windows": (None, 3, 9), "blocks": 20}),
    ("_should_delay_sliding", never_slides_within_a_block, {"windows": (6,), "blocks": PLENTY}),
    ("index", indexes_the_block_that_is_not_full_yet, {}),
]
WITH_WINDOWS = {"windows": (None, 6), "blocks": PLENTY}


@pytest.mark.parametrize("faulty", FaultyPool.__subclasses__(), ids=lambda faulty: faulty.__name__)
def test_machine_detects_a_memory_whose_pool(faulty):
    run_mutant(wrap=faulty, fixed_options=WITH_WINDOWS)


@pytest.mark.parametrize(("name", "method", "options"), METHODS, ids=[row[1].__name__ for row in METHODS])
def test_machine_detects_a_memory_that(monkeypatch, name, method, options):
    monkeypatch.setattr(Memory, name, method)
    run_mutant(fixed_options=options)


def run_mutant(**attributes) -> None:
    machine = type("Machine", (MemoryMachine,), attributes)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        run_state_machine_as_test(machine, settings=until_first_failure(MACHINE_SETTINGS, max_examples=2000))
