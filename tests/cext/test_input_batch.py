"""What the state machine does not reach: the caller's arenas, lifetimes, sizes and long runs."""

import gc
import random
import sys
import tracemalloc
import weakref
from array import array
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from cext.input_batch_machine import plain
from cext.input_batch_oracle import InputBatchOracle, SequenceStateOracle
from fairlead._cext.inputbatch import InputBatch, SequenceState

OPTIONS = {
    "slots": 4,
    "max_batched_tokens": 16,
    "max_model_len": 64,
    "block_size": 4,
    "vocab_size": 100,
}
SIZES = {name: OPTIONS[name] for name in ("slots", "max_batched_tokens", "max_model_len", "block_size")}


class Sampling:
    """An object that supports weak references."""


def enter(batch, slot, prompt=(1, 2, 3), **changes):
    state = SequenceState(slot, list(prompt), **{"max_tokens": 50} | changes)
    batch.add_request(slot, state, (list(range(16 * slot, 16 * slot + 16)),))
    return state


def prepare(batch, max_rows=100):
    survey = batch.survey(max_rows)
    lengths, computed = batch.num_tokens, batch.num_computed_tokens
    for slot in survey.prefills:
        batch.num_scheduled[slot] = lengths[slot] - computed[slot]
    return batch.prepare_inputs()


def run(batch, max_rows=100):
    step = prepare(batch, max_rows)
    batch.commit_tokens(step, array("i", [5] * step.samples))
    return list(step.slots)


def test_steps_are_written_to_the_arenas_that_were_given_in_turn():
    size = InputBatch.arena_size(**SIZES)
    arenas = [np.zeros(size // 4, dtype=np.int32), bytearray(size + 5), memoryview(bytearray(size))]
    batch = InputBatch(**OPTIONS, arenas=arenas)
    enter(batch, 0)
    indices = []
    for _ in range(4):
        step = prepare(batch)
        indices.append(step.arena_index)
        written = np.frombuffer(arenas[step.arena_index], dtype=np.int32, count=len(step.arena))
        assert step.arena.tolist() == written.tolist()
        batch.commit_tokens(step, array("i", [5]))
    assert indices == [0, 1, 2, 0]


def test_sections_are_views_into_the_arena_and_no_copies():
    batch = InputBatch(**OPTIONS)
    enter(batch, 0)
    step = prepare(batch)
    step.arena[step.offsets.positions] = 77
    assert step.positions[0] == 77
    assert np.shares_memory(np.asarray(step.arena), np.asarray(step.slot_mapping[0]))


@pytest.mark.parametrize(
    ("arenas", "error"),
    [
        (0, ValueError),
        (65, ValueError),
        ([], ValueError),
        ([bytearray(8)], ValueError),
        ([bytes(100_000)], ValueError),
        ([memoryview(bytearray(200_001))[1:]], ValueError),
        ([memoryview(bytearray(200_000))[::2]], ValueError),
        ([1], TypeError),
        (1.5, TypeError),
    ],
)
def test_arena_that_cannot_hold_a_step_is_refused(arenas, error):
    with pytest.raises(error):
        InputBatch(**OPTIONS, arenas=arenas)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 0},
        {"slots": 2**40},
        {"max_batched_tokens": 0},
        {"max_model_len": 1},
        {"max_model_len": 2**31},
        {"block_size": 0},
        {"vocab_size": 0},
        {"windows": ()},
        {"windows": (0,)},
        {"windows": (None,) * 17},
        {"eos_token_ids": [2**31]},
        {"slots": 2**20, "max_model_len": 2**30, "block_size": 1},
    ],
)
def test_invalid_options_are_refused(change):
    with pytest.raises(ValueError, match=r"."):
        InputBatch(**OPTIONS | change)


def test_deleted_batch_releases_its_sequences_with_their_committed_tokens():
    batch = InputBatch(**OPTIONS)
    state = enter(batch, 2)
    run(batch)
    prepare(batch)
    references = sys.getrefcount(state)
    del batch
    assert references - 1 == sys.getrefcount(state)
    assert (state.slot, state.num_tokens, state.committed) == (-1, 4, 3)
    InputBatch(**OPTIONS).add_request(0, state, ([1],))


def test_removed_sequence_is_freed_with_its_sampling():
    batch = InputBatch(**OPTIONS)
    sampling = Sampling()
    watched = weakref.ref(sampling)
    enter(batch, 0, sampling=sampling)
    del sampling
    gc.collect()
    assert watched() is not None
    batch.remove_request(0)
    assert watched() is None


def test_views_outlive_the_batch_and_the_sequence():
    batch = InputBatch(**OPTIONS)
    state = enter(batch, 0)
    step = prepare(batch)
    kept = batch.num_tokens, batch.block_table(0), step.input_ids, state.tokens_view()
    del batch, step, state
    gc.collect()
    assert (kept[0][0], kept[1][0, 0], kept[2][0], kept[3][0]) == (4, 0, 1, 1)


def test_sequences_tokens_cannot_be_written_through_its_view():
    view = SequenceState(1, [1, 2], max_tokens=1).tokens_view()
    with pytest.raises(TypeError):
        view[0] = 5


def test_no_row_is_left_out_of_two_consecutive_steps():
    batch = InputBatch(**OPTIONS)
    for slot in range(3):
        enter(batch, slot)
    rows = [set(run(batch, max_rows=2)) for _ in range(6)]
    assert all({0, 1, 2} == one | other for one, other in pairwise(rows))


@pytest.mark.parametrize(
    ("rows", "limit"), [(2, 1), (3, 2), (4, 1), (4, 3), (7, 2), (7, 5), (12, 5), (12, 11)]
)
def test_each_row_gets_its_share_of_limited_places(rows, limit):
    batch = InputBatch(**OPTIONS | {"slots": 12, "max_model_len": 512})
    for slot in range(rows):
        batch.add_request(slot, SequenceState(slot, [1], max_tokens=500), (list(range(128)),))
    taken = Counter()
    for steps in range(1, 121):
        taken.update(run(batch, max_rows=limit))
        shares = [taken[slot] for slot in range(rows)]
        assert sum(shares) == steps * limit
        assert max(shares) - min(shares) <= 1


def test_rows_left_out_come_first_also_after_steps_with_all_rows():
    """The order continues where it stopped, also after steps that could take all rows."""
    batch = InputBatch(**OPTIONS)
    for slot in range(4):
        enter(batch, slot)
    assert run(batch, max_rows=2) == [0, 1]
    assert run(batch, max_rows=2) == [2, 3]
    assert run(batch, max_rows=1) == [0]
    assert run(batch) == [0, 1, 2, 3]
    assert run(batch, max_rows=2) == [1, 2]


def test_survey_without_a_step_does_not_use_a_turn():
    batch = InputBatch(**OPTIONS)
    for slot in range(3):
        enter(batch, slot)
    for _ in range(3):
        batch.survey(1)
    assert run(batch, max_rows=1) == [0]


def test_result_that_is_still_referenced_is_not_overwritten():
    batch = InputBatch(**OPTIONS)
    for slot in range(4):
        enter(batch, slot)
    kept = [batch.commit_tokens(prepare(batch), array("i", [token] * 4)) for token in (5, 6, 7)]
    assert [answer.tokens.tolist() for answer in kept] == [[5] * 4, [6] * 4, [7] * 4]
    assert [answer.keys.tolist() for answer in kept] == [[0, 1, 2, 3]] * 3
    kept[0].samples.release()  # releases only this view
    assert kept[1].samples.tolist() == [0, 1, 2, 3]


def test_arena_stores_slots_once_when_all_rows_sample():
    batch = InputBatch(**OPTIONS)
    for slot in range(2):
        enter(batch, slot)
    batch.num_scheduled[0], batch.num_scheduled[1] = 3, 2
    step = batch.prepare_inputs()
    assert (step.slots.tolist(), step.sample_slots.tolist()) == ([0, 1], [0])
    assert step.offsets.slots != step.offsets.sample_slots
    batch.commit_tokens(step, array("i", [5]))
    step = prepare(batch)
    assert [0, 1] == step.slots.tolist() == step.sample_slots.tolist()
    assert step.offsets.slots == step.offsets.sample_slots


def test_newcomers_do_not_overtake_waiting_rows():
    batch = InputBatch(**OPTIONS)
    for slot in range(3):
        enter(batch, slot)
    run(batch, max_rows=2)
    enter(batch, 3)
    assert 2 in run(batch, max_rows=1)


def test_memory_does_not_grow_over_a_thousand_sequences():
    batch = InputBatch(**OPTIONS)
    before = None
    tracemalloc.start()
    for number in range(1000):
        slot = number % 4
        if number >= 4:
            batch.remove_request(slot)
        enter(batch, slot, prompt=range(40))
        if number % 3 == 0:
            prepare(batch, max_rows=0)
        if number == 500:
            gc.collect()
            before = blocks_allocated_here()
    gc.collect()
    after = blocks_allocated_here()
    tracemalloc.stop()
    assert after - before < 100


def blocks_allocated_here():
    """Return the number of memory blocks allocated by this file. Other threads may allocate meanwhile."""
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__)])
    return sum(entry.count for entry in snapshot.statistics("filename"))


class BatchAndOracle:
    """A batch and its oracle, to which sequences are added and removed at random."""

    def __init__(self, slots, churn, seed, block_size=4):
        options = {"slots": slots, "max_batched_tokens": 8 * slots, "max_model_len": 1200}
        options |= {"block_size": block_size}
        options |= {"vocab_size": 50, "eos_token_ids": [7, 8], "windows": (None, 9)}
        self.batch, self.oracle = InputBatch(**options), InputBatchOracle(**options)
        self.slots, self.chance, self.key = slots, random.Random(seed), 0
        self.pairs, self.steps = {}, []
        self.churn, self.longest = churn, 0

    def add(self, slot):
        self.key += 1
        prompt = [self.chance.randrange(50) for _ in range(self.chance.randint(1, 7))]
        options = {
            "max_tokens": self.chance.choice([3, 60, 1000, 1000]),
            "ignore_eos": self.chance.random() < 0.8,
        }
        options |= self.chance.choice([{}, {}, {}, {"stop_token_ids": [9]}, {"min_tokens": 20}])
        self.pairs[slot] = (
            SequenceState(self.key, prompt, **options),
            SequenceStateOracle(self.key, prompt, **options),
        )
        blocks = ([10 * slot + self.key, 1], [slot, 2])
        for batch, state in zip((self.batch, self.oracle), self.pairs[slot], strict=True):
            batch.add_request(slot, state, blocks)

    def remove(self, slot):
        self.batch.remove_request(slot)
        self.oracle.remove_request(slot)
        kernel, oracle = self.pairs.pop(slot)
        assert oracle.token_ids() == kernel.token_ids()
        self.longest = max(self.longest, kernel.num_tokens)

    def prepare(self, max_rows):
        expected, actual = self.oracle.survey(max_rows), self.batch.survey(max_rows)
        assert tuple(expected) == tuple(actual)
        for batch in (self.batch, self.oracle):
            for slot in actual.short:
                batch.append_block_ids(slot, ([slot + 3], [slot + 4]))
            for slot in actual.prefills:
                batch.num_scheduled[slot] = batch.num_tokens[slot] - batch.num_computed_tokens[slot]
        self.steps.append((self.batch.prepare_inputs(), self.oracle.prepare_inputs()))
        if self.steps[-1] == (None, None):
            self.steps.pop()
        else:
            assert plain(self.steps[-1][1].arena) == plain(self.steps[-1][0].arena)

    def commit(self):
        actual, expected = self.steps.pop(0)
        sampled = array("i", [self.chance.randrange(50) for _ in range(actual.samples)])
        if actual.samples and self.chance.random() < self.churn:
            sampled[self.chance.randrange(actual.samples)] = -1
        expected_result, found = (
            self.oracle.commit_tokens(expected, sampled),
            self.batch.commit_tokens(actual, sampled),
        )
        assert plain(expected_result[:-1]) == plain(found[:-1])
        assert sorted(expected_result.filled) == sorted(found.filled)
        for slot, *_ in expected_result.finished + expected_result.failed:
            self.remove(slot)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("slots", "steps", "churn"), [(3, 1300, 0.001), (70, 80, 0.02), (200, 40, 0.01), (200, 12, 0.3)]
)
def test_wide_and_long_batches_behave_like_the_oracle(slots, steps, churn, overlap):
    """Batches wider than any vector register, and sequences longer than any buffer's initial size."""
    driver = BatchAndOracle(slots, churn, seed=slots + overlap)
    run_random_steps(driver, steps, overlap)
    assert driver.longest > min(600, steps // 2)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("block_size", [257, 300, 512])
def test_large_blocks_begin_at_the_right_step(block_size, overlap):
    driver = BatchAndOracle(8, 0.0, seed=block_size + overlap, block_size=block_size)
    run_random_steps(driver, 600, overlap)
    assert driver.longest > block_size


def run_random_steps(driver, steps, overlap):
    for number in range(steps):
        for slot in range(driver.slots):
            if slot in driver.pairs and driver.chance.random() < driver.churn:
                driver.remove(slot)
            if slot not in driver.pairs and (number == 0 or driver.chance.random() < 0.5):
                driver.add(slot)
        driver.prepare(driver.slots if driver.chance.random() < 0.95 else driver.slots - 2)
        while len(driver.steps) > overlap:
            driver.commit()
    for slot in list(driver.pairs):
        driver.remove(slot)
