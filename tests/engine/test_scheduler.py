"""Which sequences run in a step, which are admitted, and which are preempted when blocks run out."""

from array import array

import numpy as np
import pytest

from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.engine.memory import Memory
from fairlead.engine.running_sequences import RunningSequences
from fairlead.engine.scheduler import StepScheduler
from fairlead.engine.sequence import Sequence, SequenceStatus


class FixedPrediction:
    """Predicts `tokens` remaining tokens for every sequence, or its limit if that is lower."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.preemptions = 0

    def remaining(self, keys, outputs, limits):
        return np.minimum(self.tokens, limits)

    def learn(self, length):
        pass

    def on_preemption(self):
        self.preemptions += 1


class SchedulerDriver:
    """A scheduler, with a fake runner that commits one token per sampling row."""

    def __init__(
        self, *, slots=8, blocks=100, max_batch=8, max_batched_tokens=16, windows=(None,), predicted=0
    ):
        self.batch = InputBatch(
            slots=slots,
            max_batched_tokens=max_batched_tokens,
            max_model_len=200,
            block_size=4,
            vocab_size=10,
            windows=windows,
        )
        self.memory = Memory(
            self.batch,
            blocks_total=[blocks] if isinstance(blocks, int) else blocks,
            windows=windows,
            block_size=4,
            max_batched_tokens=max_batched_tokens,
            hash_key=bytes(16),
            prefix_cache=False,
        )
        self.scheduler = StepScheduler(
            self.batch,
            self.memory,
            slots=slots,
            max_batch=max_batch,
            max_batched_tokens=max_batched_tokens,
            predictor=FixedPrediction(predicted),
        )

    def submit(self, key: int, prompt_length: int, max_tokens: int = 4, *, priority: int = 1) -> Sequence:
        sequence = Sequence(SequenceState(key, [1] * prompt_length, max_tokens=max_tokens), priority=priority)
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> list[tuple[int, int, int, bool]]:
        """Run the next step; return its rows as (key, start, count, samples)."""
        step = self.scheduler.plan()
        assert step is not None
        sampled = set(step.sample_tokens)
        rows = [
            (self.batch.state(slot).key, step.positions[first], last - first, last - 1 in sampled)
            for row, (slot, first, last) in enumerate(
                zip(step.slots, step.query_starts, list(step.query_starts)[1:], strict=False)
            )
        ]
        committed = self.batch.commit_tokens(step, array("i", [1] * step.samples))
        self.scheduler.indexed(committed.filled)
        for slot, _, _ in committed.finished:
            sequence = self.scheduler.running_in(slot)
            sequence.become(SequenceStatus.COMPLETED)
            self.scheduler.remove(sequence)
        return rows

    def keys(self) -> list[int]:
        return [row[0] for row in self.step()]

    def end(self, sequence: Sequence) -> None:
        sequence.become(SequenceStatus.CANCELLED)
        self.scheduler.remove(sequence)


# A step --------------------------------------------------------------------------------------------


def test_no_step_is_planned_without_sequences():
    assert SchedulerDriver().scheduler.plan() is None


def test_prompt_is_prefilled_and_then_decoded_token_by_token():
    driver = SchedulerDriver()
    driver.submit(1, prompt_length=5)
    assert driver.step() == [(1, 0, 5, True)]
    assert driver.step() == [(1, 5, 1, True)]
    assert driver.step() == [(1, 6, 1, True)]


def test_long_prompt_is_prefilled_in_chunks_and_only_the_last_samples():
    driver = SchedulerDriver(max_batched_tokens=4)
    driver.submit(1, prompt_length=9)
    assert driver.step() == [(1, 0, 4, False)]
    assert driver.step() == [(1, 4, 4, False)]
    assert driver.step() == [(1, 8, 1, True)]


def test_long_prefill_gets_the_budget_that_decodes_leave():
    driver = SchedulerDriver(max_batched_tokens=6)
    driver.submit(1, prompt_length=2)
    driver.submit(2, prompt_length=1)
    driver.step()
    driver.submit(3, prompt_length=50)
    assert driver.step() == [(1, 2, 1, True), (2, 1, 1, True), (3, 0, 4, False)]
    assert driver.step() == [(1, 3, 1, True), (2, 2, 1, True), (3, 4, 4, False)]


def test_prefills_share_the_budget_first_come_first_served():
    driver = SchedulerDriver(max_batched_tokens=8)
    for key in (1, 2, 3):
        driver.submit(key, prompt_length=6)
    assert driver.step() == [(1, 0, 6, True), (2, 0, 2, False)]
    assert driver.step() == [(1, 6, 1, True), (2, 2, 4, True), (3, 0, 3, False)]


def test_prefill_is_not_starved_by_decodes():
    driver = SchedulerDriver(max_batch=8, max_batched_tokens=2)
    for key in (1, 2, 3):
        driver.submit(key, prompt_length=1, max_tokens=50)
    driver.step()
    driver.step()
    prefill = driver.submit(4, prompt_length=6, max_tokens=2)
    steps = 0
    while prefill.tokens.output_length == 0:
        driver.step()
        steps += 1
    assert steps <= 14


def test_sequences_beyond_max_batch_take_turns():
    driver = SchedulerDriver(max_batch=2)
    for key in (1, 2, 3, 4):
        driver.submit(key, prompt_length=1, max_tokens=9)
    turns = [set(driver.keys()) for _ in range(6)]
    assert turns == [{1, 2}, {3, 4}] * 3


def test_stream_of_short_sequences_does_not_starve_long_ones():
    driver = SchedulerDriver(slots=6, max_batch=2)
    for key in (0, 1):
        driver.submit(key, prompt_length=1, max_tokens=100)
    served = 0
    added = iter(range(2, 1000))
    for _ in range(60):
        while driver.scheduler.pending < 4:
            driver.submit(next(added), prompt_length=1, max_tokens=1)
        served += len({0, 1} & set(driver.keys()))
    assert served >= 30


# Admission -----------------------------------------------------------------------------------------


def test_sequence_waits_while_no_slot_is_free():
    driver = SchedulerDriver(slots=1)
    first = driver.submit(1, prompt_length=2)
    second = driver.submit(2, prompt_length=2)
    assert driver.step() == [(1, 0, 2, True)]
    assert (driver.scheduler.running, driver.scheduler.pending) == (1, 1)
    assert SequenceStatus.PENDING is second.state
    driver.end(first)
    assert driver.step() == [(2, 0, 2, True)]
    assert SequenceStatus.PROCESSING is second.state


def test_sequence_waits_while_the_predicted_peak_is_too_high_and_is_not_overtaken():
    driver = SchedulerDriver(blocks=8, predicted=8)  # the limit is 31 tokens, which is 97 % of 32
    first = driver.submit(1, prompt_length=8, max_tokens=50)
    driver.submit(2, prompt_length=12, max_tokens=50)  # 8 + 12 tokens, and 8 more for each: 36
    driver.submit(3, prompt_length=1, max_tokens=1)
    assert driver.keys() == [1]
    driver.end(first)
    assert driver.keys() == [3, 2]


def test_sequences_that_fit_at_their_longest_need_no_prediction():
    driver = SchedulerDriver(blocks=8, predicted=1000)
    driver.submit(1, prompt_length=8, max_tokens=7)
    driver.submit(2, prompt_length=8, max_tokens=8)
    assert driver.keys() == [1, 2]


def test_prompt_waits_for_free_blocks_regardless_of_the_prediction():
    driver = SchedulerDriver(blocks=6, predicted=0)
    driver.submit(1, prompt_length=13, max_tokens=9)  # 4 blocks
    driver.submit(2, prompt_length=10, max_tokens=9)  # 3 blocks, of which 2 are free
    assert driver.keys() == [1]


def test_sequence_alone_is_always_admitted():
    driver = SchedulerDriver(blocks=6, predicted=1000)
    driver.submit(1, prompt_length=20, max_tokens=4)
    assert driver.keys() == [1]


def test_admission_is_by_class_and_then_first_come_first_served():
    driver = SchedulerDriver(slots=1, max_batch=1)
    for key, priority in ((1, 2), (2, 1), (3, 0), (4, 1), (5, 0)):
        driver.submit(key, prompt_length=1, max_tokens=1, priority=priority)
    assert [driver.keys()[0] for _ in range(5)] == [3, 5, 2, 4, 1]


def test_lower_class_does_not_overtake_a_higher_one_that_does_not_fit():
    driver = SchedulerDriver(blocks=8, predicted=8)
    driver.submit(1, prompt_length=8, max_tokens=50)
    driver.step()
    driver.submit(2, prompt_length=20, max_tokens=50, priority=0)
    driver.submit(3, prompt_length=1, max_tokens=1, priority=2)
    assert driver.keys() == [1]
    assert driver.scheduler.pending == 2


def test_running_sequences_hold_different_slots_and_blocks():
    driver = SchedulerDriver(max_batched_tokens=64)
    sequences = [driver.submit(key, prompt_length=7) for key in range(5)]
    driver.step()
    assert len({sequence.slot for sequence in sequences}) == 5
    blocks = [block for sequence in sequences for block in driver.batch.block_ids(sequence.slot)[0]]
    assert 5 * 2 == len(set(blocks)) == len(blocks)


def test_reused_slot_gets_a_new_handle():
    driver = SchedulerDriver(slots=1)
    first = driver.submit(1, prompt_length=2)
    driver.step()
    slot, handle = first.slot, first.handle
    driver.end(first)
    second = driver.submit(2, prompt_length=2)
    driver.step()
    assert slot == second.slot
    assert handle != second.handle


def test_removing_a_queued_sequence_keeps_the_others_queued():
    driver = SchedulerDriver(slots=1)
    driver.submit(1, prompt_length=2)
    second = driver.submit(2, prompt_length=2)
    driver.submit(3, prompt_length=2)
    driver.step()
    driver.end(second)
    assert (driver.scheduler.running, driver.scheduler.pending) == (1, 1)


# When blocks run out -------------------------------------------------------------------------------


def crowded(priorities=(1, 1, 1)) -> tuple[SchedulerDriver, list[Sequence]]:
    """Return three sequences that were predicted to end at once, in a cache filled by their prompts."""
    driver = SchedulerDriver(blocks=6, max_batched_tokens=64, predicted=0)
    sequences = [
        driver.submit(key, prompt_length=7, max_tokens=12, priority=priority)
        for key, priority in enumerate(priorities)
    ]
    driver.step()
    assert driver.scheduler.running == 3
    return driver, sequences


def test_newest_sequence_is_preempted_and_requeued_first():
    driver, sequences = crowded()
    driver.submit(9, prompt_length=1)
    while driver.scheduler.preemptions == 0:
        driver.step()
    assert [one.state for one in sequences] == [
        SequenceStatus.PROCESSING,
        SequenceStatus.PROCESSING,
        SequenceStatus.PENDING,
    ]
    assert (sequences[2].preemptions, sequences[2].tokens.computed) == (1, 0)
    queue = driver.scheduler._queue
    assert (len(queue), queue.head()) == (2, sequences[2])


def test_lowest_class_is_preempted_first():
    driver, sequences = crowded(priorities=(2, 1, 1))
    while driver.scheduler.preemptions == 0:
        driver.step()
    assert SequenceStatus.PENDING is sequences[0].state


def test_preempted_sequence_keeps_its_tokens_and_recomputes_them():
    driver, sequences = crowded()
    while driver.scheduler.preemptions == 0:
        driver.step()
    tokens = sequences[2].tokens.num_tokens
    assert tokens > 7
    for key in (0, 1):
        driver.end(sequences[key])
    assert [(2, 0, tokens, True)] == driver.step()
    assert tokens + 1 == sequences[2].tokens.num_tokens


def test_no_sequence_is_preempted_a_fourth_time_and_all_complete():
    driver = SchedulerDriver(blocks=8, max_batched_tokens=64, predicted=0)
    sequences = [driver.submit(key, prompt_length=3, max_tokens=28) for key in range(6)]
    steps = 0
    while driver.scheduler.running or driver.scheduler.pending:
        driver.step()
        steps += 1
        assert steps < 1000
    assert max(sequence.preemptions for sequence in sequences) == 3
    assert {SequenceStatus.COMPLETED} == {sequence.state for sequence in sequences}
    assert driver.memory.pools[0].free == 8


def test_sequence_preempted_three_times_reserves_all_it_can_need():
    driver = SchedulerDriver(blocks=10, predicted=0)
    pinned = driver.submit(1, prompt_length=4, max_tokens=12)
    pinned.preemptions = 3
    driver.step()
    assert pinned.reserved == [3]
    assert (driver.memory.pools[0].available, driver.memory.unreserved(0)) == (9, 6)
    while pinned.state is SequenceStatus.PROCESSING:
        driver.step()
    assert driver.memory.unreserved(0) == 10


def test_pinned_sequence_waits_for_all_its_blocks_and_is_never_preempted():
    driver = SchedulerDriver(blocks=10, predicted=0)
    other = driver.submit(1, prompt_length=4, max_tokens=30)
    driver.step()
    pinned = driver.submit(2, prompt_length=4, max_tokens=33)  # 10 blocks
    pinned.preemptions = 3
    driver.step()
    assert SequenceStatus.PENDING is pinned.state
    driver.end(other)
    driver.step()
    assert SequenceStatus.PROCESSING is pinned.state
    waits = driver.submit(3, prompt_length=1, max_tokens=30, priority=0)
    driver.step()
    assert SequenceStatus.PENDING is waits.state


def test_another_sequence_takes_the_row_of_a_preempted_one():
    driver = SchedulerDriver(slots=2, blocks=6, max_batch=1, predicted=0)
    pinned = driver.submit(1, prompt_length=4, max_tokens=12)
    pinned.preemptions = 3
    other = driver.submit(2, prompt_length=7, max_tokens=12)
    while other.preemptions == 0:
        keys = driver.keys()
    assert keys == [1]
    assert SequenceStatus.PENDING is other.state


# Windows -------------------------------------------------------------------------------------------


def test_blocks_outside_the_window_are_freed_while_the_sequence_runs():
    driver = SchedulerDriver(blocks=[30, 6], windows=(None, 6), max_batched_tokens=8)
    sequence = driver.submit(1, prompt_length=50, max_tokens=40)
    used = []
    while sequence.state is not SequenceStatus.COMPLETED:
        driver.step()
        used.append(6 - driver.memory.pools[1].free)
    assert max(used) <= 4
    assert tuple(pool.free for pool in driver.memory.pools) == (30, 6)


def test_prompts_that_together_hold_all_window_blocks_do_not_deadlock():
    driver = SchedulerDriver(blocks=[60, 4], windows=(None, 6), max_batched_tokens=4, predicted=0)
    sequences = [driver.submit(key, prompt_length=30, max_tokens=5) for key in range(3)]
    steps = 0
    while driver.scheduler.running or driver.scheduler.pending:
        driver.step()
        steps += 1
        assert steps < 300
    assert {SequenceStatus.COMPLETED} == {sequence.state for sequence in sequences}


def test_newest_sequence_of_the_lowest_class_gives_way():
    driver = SchedulerDriver(blocks=6)
    high = driver.submit(1, prompt_length=7, max_tokens=30, priority=0)
    low = [driver.submit(key, prompt_length=7, max_tokens=30, priority=2) for key in (2, 3)]
    newest = driver.submit(4, prompt_length=1, max_tokens=1, priority=0)
    driver.step()
    assert newest.state is SequenceStatus.COMPLETED
    while not driver.scheduler.preemptions:
        driver.step()
    assert [sequence.preemptions for sequence in (high, *low)] == [0, 0, 1]


def test_admission_learns_of_each_preemption():
    driver = SchedulerDriver(blocks=6)
    for key in range(3):
        driver.submit(key, prompt_length=7, max_tokens=12)
    while driver.scheduler.running or driver.scheduler.pending:
        driver.step()
    assert driver.scheduler.preemptions > 0
    assert driver.scheduler.admission.predictor.preemptions == driver.scheduler.preemptions


def highest_class_gives_way(self: RunningSequences) -> Sequence | None:
    newest = (reversed(self._by_class[priority].values()) for priority in sorted(self._by_class))
    return next((sequence for of_class in newest for sequence in of_class if not sequence.is_pinned()), None)


def preempts_without_a_report(self: StepScheduler, victim: Sequence) -> None:
    predictor, self.admission.predictor = self.admission.predictor, FixedPrediction(0)
    _preempt(self, victim)
    self.admission.predictor = predictor


_preempt = StepScheduler._preempt


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "case"),
    [
        (
            RunningSequences,
            "newest_of_the_lowest_class",
            highest_class_gives_way,
            test_newest_sequence_of_the_lowest_class_gives_way,
        ),
        (StepScheduler, "_preempt", preempts_without_a_report, test_admission_learns_of_each_preemption),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistake_in_preempting_is_detected(monkeypatch, owner, name, mutant, case):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        case()
