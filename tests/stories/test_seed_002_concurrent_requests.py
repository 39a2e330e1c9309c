"""States, limits (with its numbers) and rules of document 002, as tests of the engine.

Its RequestQueue is the parent's queue with its 429 (stories of document 000). Its `runningRequests_` are the
sequences in the engine: 8 with a slot, 4 of them in a step.
"""

from array import array
from itertools import count, product
from pathlib import Path

import pytest

from engine.fake_model import EOS, VOCABULARY, FakeRunner, Loop, answer
from fairlead._cext.blockpool import BlockHashes, BlockPool
from fairlead._cext.inputbatch import SequenceState
from fairlead._cext.slotmap import NoSlotFree, SlotMap, StaleHandle
from fairlead.base.config import Config, ConfigError, KvCacheConfig, ModelConfig, QueueConfig
from fairlead.base.errors import FairleadError
from fairlead.base.job import Sampling
from fairlead.base.messages import Output
from fairlead.engine.engine import Engine
from fairlead.engine.sequence import Sequence, SequenceStatus

# The document's numbers. The engine adds cancellation and preemption to the document's states.
MODEL = ModelConfig(
    name="m",
    path=Path("/nowhere"),
    slots=8,
    max_batch=4,
    max_input_tokens=128,
    max_output_tokens=2048,
    kv_cache=KvCacheConfig(
        max_entries=4 * 1024 * 1024, max_memory_mb=1024, eviction_threshold=0.8, cleanup_interval_s=1.0
    ),
)
CONFIG = Config(models=(MODEL,), queue=QueueConfig(capacity=256), request_timeout_s=60.0)
BLOCK_SIZE = 16
BLOCKS = 100
HASH_KEY = bytes(16)


class Server(Loop):
    """The engine with the document's limits, over a fake model and a clock that the tests advance."""

    def __init__(self, *, blocks=BLOCKS, slots=MODEL.slots, max_entries=MODEL.kv_cache.max_entries) -> None:
        runner = FakeRunner(BLOCK_SIZE)
        engine = Engine(
            runner,
            slots=slots,
            max_batch=min(MODEL.max_batch, slots),
            max_batched_tokens=512,
            max_model_len=MODEL.max_input_tokens + MODEL.max_output_tokens,
            max_input_tokens=MODEL.max_input_tokens,
            max_output_tokens=MODEL.max_output_tokens,
            blocks_total=blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            eos_token_ids=[EOS],
            draw_seed=lambda: 1,
            max_entries=max_entries,
            eviction_threshold=MODEL.kv_cache.eviction_threshold,
            cleanup_interval_s=MODEL.kv_cache.cleanup_interval_s,
            hash_key=HASH_KEY,
        )
        super().__init__(engine, runner)
        self._keys = count(1)

    def request(self, prompt: list[int] | None = None, *, tokens: int = 100) -> int:
        key = next(self._keys)
        prompt = [1 + key % 11, 2, 3] if prompt is None else prompt
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        self.engine.submit(key, prompt, sampling, timeout_s=CONFIG.request_timeout_s)
        return key

    def state(self, key: int) -> SequenceStatus | None:
        """Return the sequence's state, or None after its release from `runningRequests_`."""
        sequence = self.engine._live.by_key.get(key)
        return None if sequence is None else sequence.state

    @property
    def counts(self):
        return self.engine.statistics()


# Configuration -------------------------------------------------------------------------------------


def test_numbers_of_the_seed_are_a_configuration():
    assert (
        CONFIG.queue.capacity,
        MODEL.slots,
        MODEL.max_batch,
        MODEL.max_input_tokens,
        MODEL.max_output_tokens,
        CONFIG.request_timeout_s,
    ) == (256, 8, 4, 128, 2048, 60.0)
    cache = MODEL.kv_cache
    assert (
        cache.max_entries,
        cache.max_memory_mb,
        cache.eviction_threshold,
        cache.cleanup_interval_s,
    ) == (4_194_304, 1024, 0.8, 1.0)


def test_batch_limit_above_the_slots_is_refused():
    with pytest.raises(ConfigError, match="maxBatch: must be at most slots, which is 8"):
        ModelConfig(name="m", path=Path("/nowhere"), slots=8, max_batch=9)


# States --------------------------------------------------------------------------------------------

SEED_TRANSITIONS = {
    (SequenceStatus.PENDING, SequenceStatus.PROCESSING),
    (SequenceStatus.PROCESSING, SequenceStatus.COMPLETED),
    (SequenceStatus.PROCESSING, SequenceStatus.TIMEOUT),
    (SequenceStatus.PROCESSING, SequenceStatus.FAILED),
}
SPEC_TRANSITIONS = {
    (SequenceStatus.PROCESSING, SequenceStatus.CANCELLED),
    (SequenceStatus.PROCESSING, SequenceStatus.PENDING),
    (SequenceStatus.PENDING, SequenceStatus.CANCELLED),
    (SequenceStatus.PENDING, SequenceStatus.TIMEOUT),
    (SequenceStatus.PENDING, SequenceStatus.FAILED),
    # One that another tenant's needs displace goes on later.
    (SequenceStatus.PROCESSING, SequenceStatus.SUSPENDED),
    (SequenceStatus.PENDING, SequenceStatus.SUSPENDED),
    (SequenceStatus.SUSPENDED, SequenceStatus.PENDING),
    (SequenceStatus.SUSPENDED, SequenceStatus.FAILED),
    (SequenceStatus.SUSPENDED, SequenceStatus.TIMEOUT),
    (SequenceStatus.SUSPENDED, SequenceStatus.CANCELLED),
    # A sequence with a grammar waits for it before it is pending.
    (SequenceStatus.COMPILING, SequenceStatus.PENDING),
    (SequenceStatus.COMPILING, SequenceStatus.FAILED),
    (SequenceStatus.COMPILING, SequenceStatus.TIMEOUT),
    (SequenceStatus.COMPILING, SequenceStatus.CANCELLED),
}


def sequence_in(state: SequenceStatus) -> Sequence:
    sequence = Sequence(SequenceState(1, [5], max_tokens=4))
    sequence.state = state
    return sequence


@pytest.mark.parametrize(("before", "after"), sorted(SEED_TRANSITIONS))
def test_transition_of_the_seed_is_made(before, after):
    sequence = sequence_in(before)
    sequence.become(after)
    assert after is sequence.state


@pytest.mark.parametrize(
    ("before", "after"),
    sorted(set(product(SequenceStatus, SequenceStatus)) - SEED_TRANSITIONS - SPEC_TRANSITIONS),
)
def test_every_other_transition_is_refused(before, after):
    with pytest.raises(AssertionError, match=f"cannot go from {before} to {after}"):
        sequence_in(before).become(after)


def test_pending_until_a_slot_is_free_then_processing():
    server = Server(slots=1)
    first, second = server.request(), server.request()
    assert (server.state(first), server.state(second)) == (SequenceStatus.PENDING, SequenceStatus.PENDING)
    server.turn()
    assert (server.state(first), server.state(second)) == (SequenceStatus.PROCESSING, SequenceStatus.PENDING)


def test_processing_to_completed_releases_everything_and_reports_it():
    server = Server()
    key = server.request(tokens=3)
    server.run()
    assert server.ends[key].finish_reason == "length"
    assert server.state(key) is None
    assert (server.counts.running, server.counts.slots_free, server.counts.blocks_free) == (0, 8, BLOCKS)


def test_processing_to_timeout_releases_everything_and_reports_408():
    server = Server()
    key = server.request(tokens=2000)
    server.turn()
    server.turn(60.1)
    reason = "the request took longer than 60 s"
    assert Output(key, [], error=reason, code="request_timeout") == server.ends[key]
    assert (server.counts.running, server.counts.slots_free, server.counts.blocks_free) == (0, 8, BLOCKS)
    (status,) = {kind.status for kind in kinds_of_error() if kind.code == "request_timeout"}
    assert status == 408


def test_processing_to_failed_releases_everything_and_reports_it():
    server = Server()
    key, other = server.request(), server.request(tokens=4)
    server.turn()
    server.runner._pick = lambda batch, step, row, token_id: (
        "the logits are not numbers" if batch.state(step.slots[row]).key == key else token_id
    )
    server.run()
    assert Output(key, [], error="the logits are not numbers") == server.ends[key]
    assert server.ends[other].finish_reason == "length"
    assert (server.counts.running, server.counts.slots_free, server.counts.blocks_free) == (0, 8, BLOCKS)


def test_broken_connection_releases_all_resources_without_a_response():
    server = Server()
    running, waiting = [server.request() for _ in range(8)], server.request()
    server.turn()
    for key in (running[3], waiting):
        server.engine.abort(key)
        assert server.state(key) is None
    server.turn()
    assert (server.counts.running, server.counts.pending) == (7, 0)
    assert not server.ends


def kinds_of_error(kind: type = FairleadError) -> list[type]:
    return [kind, *(longer for below in kind.__subclasses__() for longer in kinds_of_error(below))]


# Time ----------------------------------------------------------------------------------------------


def test_no_request_times_out_within_60_seconds():
    server = Server()
    key = server.request(tokens=2000)
    server.turn()
    server.turn(60.0)
    assert SequenceStatus.PROCESSING is server.state(key)


def test_timeout_is_seen_by_the_next_step_however_often_steps_are():
    server = Server()
    keys = [server.request(tokens=2000)]
    for _ in range(10):
        server.turn(5.0)
    keys.append(server.request(tokens=2000))
    while server.state(keys[0]) is not None:
        server.turn(5.0)
    assert 60.0 < server.now_s <= 70.0
    assert SequenceStatus.PROCESSING is server.state(keys[1])


def test_after_a_timeout_the_next_request_runs():
    server = Server(slots=1)
    server.request(tokens=2000)
    server.turn()
    server.turn(30.0)
    second = server.request(tokens=2000)
    server.turn(30.1)
    assert SequenceStatus.PROCESSING is server.state(second)


# Limits --------------------------------------------------------------------------------------------


def test_eight_run_at_once_and_four_of_them_are_in_a_step():
    server = Server()
    for _ in range(12):
        server.request()
    rows = []
    for _ in range(6):
        before = server.runner.computed
        server.turn()
        rows.append(server.runner.computed - before)
        assert (server.counts.running, server.counts.pending) == (8, 4)
    assert rows == [4 * 3, 4 * 3, 4, 4, 4, 4]  # two steps of prompts, then decodes in turn


def test_prompt_has_at_most_128_tokens():
    server = Server()
    fits, refused = server.request([1] * 128, tokens=2), server.request([1] * 129, tokens=2)
    server.run()
    assert server.ends[fits].finish_reason == "length"
    assert server.ends[refused].error == "the prompt has 129 tokens; at most 128 are accepted"


def test_output_has_at_most_2048_tokens():
    server = Server(blocks=200)
    key = server.request([1] * 128, tokens=100_000)
    server.now_s = -1000.0
    for _ in range(2048):
        server.turn(0.001)
    assert len(server.token_ids_of[key]) == 2048
    assert server.ends[key].finish_reason == "length"


def test_when_one_of_a_batch_is_complete_the_others_continue():
    server = Server()
    short, long = server.request([1, 2, 3], tokens=2), server.request([4, 5, 6], tokens=9)
    for _ in range(4):
        server.turn()
    assert (server.state(short), server.state(long)) == (None, SequenceStatus.PROCESSING)
    server.run()
    assert answer([4, 5, 6], Sampling(max_tokens=9, ignore_eos=True), 2176)[0] == server.token_ids_of[long]


def test_next_request_gets_a_slot_as_soon_as_one_is_released():
    server = Server()
    keys = [server.request(tokens=3 if field == 0 else 500) for field in range(9)]
    while server.state(keys[0]) is not None:
        assert SequenceStatus.PENDING is server.state(keys[8])
        server.turn()
    server.turn()
    assert SequenceStatus.PROCESSING is server.state(keys[8])
    assert (server.counts.running, server.counts.pending) == (8, 0)


# Sequence ids --------------------------------------------------------------------------------------


def test_sequence_ids_are_0_to_7_and_each_has_one_owner():
    pool = SlotMap(8)
    handles = [pool.alloc(key) for key in range(100, 108)]
    assert list(range(8)) == sorted(handle & 0xFFFFFFFF for handle in handles)
    assert list(range(100, 108)) == [pool.get(handle) for handle in handles]


def test_when_all_sequence_ids_are_taken_nothing_changes_and_the_request_stays_pending():
    pool = SlotMap(8)
    handles = pool.alloc_many(list(range(8)))
    with pytest.raises(NoSlotFree):
        pool.alloc(8)
    assert all(map(pool.is_valid, handles))
    server = Server()
    keys = [server.request() for _ in range(9)]
    server.turn()
    assert SequenceStatus.PENDING is server.state(keys[8])


def test_sequence_id_is_reused_and_its_former_owner_is_refused():
    pool = SlotMap(1)
    first = pool.alloc(1)
    pool.free(first)
    second = pool.alloc(2)
    assert first & 0xFFFFFFFF == second & 0xFFFFFFFF
    assert first != second
    with pytest.raises(StaleHandle):
        pool.get(first)
    with pytest.raises(StaleHandle):
        pool.free(first)


# KV cache ------------------------------------------------------------------------------------------


def keep_request(pool: BlockPool, key: int, tokens: int, hashes: BlockHashes | None = None) -> None:
    """Cache the blocks of an ended request of `tokens` tokens, which differ from those of other keys."""
    blocks = pool.get_new_blocks(tokens // BLOCK_SIZE)
    hashes = hashes if hashes is not None else BlockHashes(HASH_KEY, BLOCK_SIZE)
    ids = array("i", [key] * tokens)
    pool.cache_full_blocks(blocks, ids, 0, len(blocks), hashes)
    pool.retire(key, blocks)


def new_pool(*, blocks: int, max_entries: int | None = None) -> BlockPool:
    threshold = MODEL.kv_cache.eviction_threshold
    return BlockPool(blocks, BLOCK_SIZE, hash_key=HASH_KEY, max_entries=max_entries, threshold=threshold)


def test_entries_are_counted_in_tokens():
    """The document's example: requests of 128 and 256 tokens are 384 entries."""
    pool = new_pool(blocks=1000, max_entries=MODEL.kv_cache.max_entries)
    keep_request(pool, 1, 128)
    keep_request(pool, 2, 256)
    assert pool.statistics().cached_tokens == 384
    assert pool.trim() == []


def test_above_80_percent_of_4194304_entries_the_least_recently_used_request_is_evicted():
    entries = MODEL.kv_cache.max_entries
    pool = new_pool(blocks=entries // BLOCK_SIZE * 2, max_entries=entries)
    for key in range(1, 34):
        keep_request(pool, key, 100_000)  # 25 hold 2.5 million, 33 hold 3.3 million, 80 % are 3.36 million
    assert pool.trim() == []
    keep_request(pool, 34, 100_000)
    assert pool.trim() == [1]
    assert pool.statistics().cached_tokens == 3_300_000


def test_above_80_percent_of_the_memory_the_least_recently_used_requests_are_evicted():
    """The pool has 1024 MB, in blocks of 1 MB."""
    pool = new_pool(blocks=1024, max_entries=MODEL.kv_cache.max_entries)
    for key in range(1, 9):
        keep_request(pool, key, 100 * BLOCK_SIZE)  # 800 MB; 80 % are 819
    assert pool.trim() == []
    keep_request(pool, 9, 100 * BLOCK_SIZE)
    assert pool.trim() == [1]


def test_reused_request_is_not_the_least_recently_used():
    pool = new_pool(blocks=1024)
    hashes = BlockHashes(HASH_KEY, BLOCK_SIZE)
    keep_request(pool, 1, 400 * BLOCK_SIZE, hashes)
    keep_request(pool, 2, 400 * BLOCK_SIZE)
    found = pool.match_prefix(hashes, 400)
    pool.touch(found)
    pool.free_blocks(found)
    keep_request(pool, 3, 100 * BLOCK_SIZE)
    assert pool.trim() == [2]


def test_cache_is_trimmed_every_second():
    server = Server(blocks=20)
    server.request([1] * 128, tokens=1)
    server.request([2] * 128, tokens=1)
    server.run()
    server.request([3] * 16, tokens=1)
    server.turn(0.5)  # 17 blocks are in use, and 16 may be
    assert server.counts.cached_tokens == 272
    server.turn(0.3)
    assert server.counts.cached_tokens == 272
    server.turn(0.4)
    assert server.counts.cached_tokens == 144


def test_running_request_is_never_evicted():
    server = Server(blocks=20)
    key = server.request([1] * 128, tokens=120)
    server.turn()
    for other in range(2, 8):
        server.request([other] * 100, tokens=1)
        server.turn(2.0)
        server.turn(2.0)
        assert SequenceStatus.PROCESSING is server.state(key)
    server.run()
    assert answer([1] * 128, Sampling(max_tokens=120, ignore_eos=True), 2176)[0] == server.token_ids_of[key]
    assert server.runner.computed == 128 + 120 - 1 + 6 * 100  # nothing of it was computed twice


def test_full_cache_evicts_kept_requests_for_a_new_request():
    server = Server(blocks=10)
    server.request([1] * 128, tokens=1)
    server.run()
    assert server.counts.cached_tokens == 128
    server.request([2] * 128, tokens=1)
    server.turn(0.1)  # too early for the cleanup
    assert 2 in server.ends


def test_cache_belongs_to_the_request_not_to_its_sequence_id():
    server = Server(slots=1)
    server.request([1] * 100, tokens=1)
    server.request([2] * 100, tokens=1)  # the same sequence id
    server.run()
    computed = server.runner.computed
    server.request([1] * 100, tokens=1)
    server.run()
    assert server.runner.computed - computed == 100 - 96
