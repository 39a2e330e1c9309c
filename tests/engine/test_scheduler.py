"""Which sequences run in a step, which are admitted, and which are preempted when blocks run out."""

from array import array

import numpy as np

from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.engine.memory import Memory
from fairlead.engine.scheduler import StepScheduler
from fairlead.engine.sequence import Sequence, SequenceStatus


class FixedPrediction:
    """Predicts `tokens` remaining tokens for every sequence, or its limit if that is lower."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def remaining(self, keys, outputs, limits):
        return np.minimum(self.tokens, limits)

    def learn(self, length):
        pass

    def on_preemption(self):
        pass


class Line:
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
        sampling = set(step.sample_rows)
        rows = [
            (self.batch.state(slot).key, step.positions[first], last - first, row in sampling)
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
    assert Line().scheduler.plan() is None


def test_a_prompt_is_prefilled_and_then_decoded_token_by_token():
    line = Line()
    line.submit(1, prompt_length=5)
    assert line.step() == [(1, 0, 5, True)]
    assert line.step() == [(1, 5, 1, True)]
    assert line.step() == [(1, 6, 1, True)]


def test_a_long_prompt_is_prefilled_in_chunks_and_only_the_last_samples():
    line = Line(max_batched_tokens=4)
    line.submit(1, prompt_length=9)
    assert line.step() == [(1, 0, 4, False)]
    assert line.step() == [(1, 4, 4, False)]
    assert line.step() == [(1, 8, 1, True)]


def test_long_prefill_gets_the_budget_that_decodes_leave():
    line = Line(max_batched_tokens=6)
    line.submit(1, prompt_length=2)
    line.submit(2, prompt_length=1)
    line.step()
    line.submit(3, prompt_length=50)
    assert line.step() == [(1, 2, 1, True), (2, 1, 1, True), (3, 0, 4, False)]
    assert line.step() == [(1, 3, 1, True), (2, 2, 1, True), (3, 4, 4, False)]


def test_prefills_share_the_budget_first_come_first_served():
    line = Line(max_batched_tokens=8)
    for key in (1, 2, 3):
        line.submit(key, prompt_length=6)
    assert line.step() == [(1, 0, 6, True), (2, 0, 2, False)]
    assert line.step() == [(1, 6, 1, True), (2, 2, 4, True), (3, 0, 3, False)]


def test_prefill_is_not_starved_by_decodes():
    line = Line(max_batch=8, max_batched_tokens=2)
    for key in (1, 2, 3):
        line.submit(key, prompt_length=1, max_tokens=50)
    line.step()
    line.step()
    prefill = line.submit(4, prompt_length=6, max_tokens=2)
    steps = 0
    while prefill.tokens.output_length == 0:
        line.step()
        steps += 1
    assert steps <= 14


def test_sequences_beyond_max_batch_take_turns():
    line = Line(max_batch=2)
    for key in (1, 2, 3, 4):
        line.submit(key, prompt_length=1, max_tokens=9)
    turns = [set(line.keys()) for _ in range(6)]
    assert turns == [{1, 2}, {3, 4}] * 3


def test_stream_of_short_sequences_does_not_starve_long_ones():
    line = Line(slots=6, max_batch=2)
    for key in (0, 1):
        line.submit(key, prompt_length=1, max_tokens=100)
    served = 0
    newcomers = iter(range(2, 1000))
    for _ in range(60):
        while line.scheduler.pending < 4:
            line.submit(next(newcomers), prompt_length=1, max_tokens=1)
        served += len({0, 1} & set(line.keys()))
    assert served >= 30


# Admission -----------------------------------------------------------------------------------------


def test_a_sequence_waits_while_no_slot_is_free():
    line = Line(slots=1)
    first = line.submit(1, prompt_length=2)
    second = line.submit(2, prompt_length=2)
    assert line.step() == [(1, 0, 2, True)]
    assert (line.scheduler.running, line.scheduler.pending) == (1, 1)
    assert SequenceStatus.PENDING is second.state
    line.end(first)
    assert line.step() == [(2, 0, 2, True)]
    assert SequenceStatus.PROCESSING is second.state


def test_sequence_waits_while_the_predicted_peak_is_too_high_and_is_not_overtaken():
    line = Line(blocks=8, predicted=8)  # the limit is 31 tokens, which is 97 % of 32
    first = line.submit(1, prompt_length=8, max_tokens=50)
    line.submit(2, prompt_length=12, max_tokens=50)  # 8 + 12 tokens, and 8 more for each: 36
    line.submit(3, prompt_length=1, max_tokens=1)
    assert line.keys() == [1]
    line.end(first)
    assert line.keys() == [3, 2]


def test_sequences_that_fit_at_their_longest_need_no_prediction():
    line = Line(blocks=8, predicted=1000)
    line.submit(1, prompt_length=8, max_tokens=7)
    line.submit(2, prompt_length=8, max_tokens=8)
    assert line.keys() == [1, 2]


def test_prompt_waits_for_free_blocks_regardless_of_the_prediction():
    line = Line(blocks=6, predicted=0)
    line.submit(1, prompt_length=13, max_tokens=9)  # 4 blocks
    line.submit(2, prompt_length=10, max_tokens=9)  # 3 blocks, of which 2 are free
    assert line.keys() == [1]


def test_sequence_alone_is_always_admitted():
    line = Line(blocks=6, predicted=1000)
    line.submit(1, prompt_length=20, max_tokens=4)
    assert line.keys() == [1]


def test_admission_is_by_class_and_then_first_come_first_served():
    line = Line(slots=1, max_batch=1)
    for key, priority in ((1, 2), (2, 1), (3, 0), (4, 1), (5, 0)):
        line.submit(key, prompt_length=1, max_tokens=1, priority=priority)
    assert [line.keys()[0] for _ in range(5)] == [3, 5, 2, 4, 1]


def test_a_lower_class_does_not_overtake_a_higher_one_that_does_not_fit():
    line = Line(blocks=8, predicted=8)
    line.submit(1, prompt_length=8, max_tokens=50)
    line.step()
    line.submit(2, prompt_length=20, max_tokens=50, priority=0)
    line.submit(3, prompt_length=1, max_tokens=1, priority=2)
    assert line.keys() == [1]
    assert line.scheduler.pending == 2


def test_running_sequences_hold_different_slots_and_blocks():
    line = Line(max_batched_tokens=64)
    sequences = [line.submit(key, prompt_length=7) for key in range(5)]
    line.step()
    assert len({sequence.slot for sequence in sequences}) == 5
    blocks = [block for sequence in sequences for block in line.batch.block_ids(sequence.slot)[0]]
    assert 5 * 2 == len(set(blocks)) == len(blocks)


def test_reused_slot_gets_a_new_handle():
    line = Line(slots=1)
    first = line.submit(1, prompt_length=2)
    line.step()
    slot, handle = first.slot, first.handle
    line.end(first)
    second = line.submit(2, prompt_length=2)
    line.step()
    assert slot == second.slot
    assert handle != second.handle


def test_removing_a_queued_sequence_keeps_the_others_queued():
    line = Line(slots=1)
    line.submit(1, prompt_length=2)
    second = line.submit(2, prompt_length=2)
    line.submit(3, prompt_length=2)
    line.step()
    line.end(second)
    assert (line.scheduler.running, line.scheduler.pending) == (1, 1)


# When blocks run out -------------------------------------------------------------------------------


def crowded(priorities=(1, 1, 1)) -> tuple[Line, list[Sequence]]:
    """Return three sequences that were predicted to end at once, in a cache filled by their prompts."""
    line = Line(blocks=6, max_batched_tokens=64, predicted=0)
    sequences = [
        line.submit(key, prompt_length=7, max_tokens=12, priority=priority)
        for key, priority in enumerate(priorities)
    ]
    line.step()
    assert line.scheduler.running == 3
    return line, sequences


def test_newest_sequence_is_preempted_and_requeued_first():
    line, sequences = crowded()
    line.submit(9, prompt_length=1)
    while line.scheduler.preemptions == 0:
        line.step()
    assert [one.state for one in sequences] == [
        SequenceStatus.PROCESSING,
        SequenceStatus.PROCESSING,
        SequenceStatus.PENDING,
    ]
    assert (sequences[2].preemptions, sequences[2].tokens.computed) == (1, 0)
    assert [*line.scheduler._queue._classes[1]] == [2, 9]


def test_the_lowest_class_is_preempted_first():
    line, sequences = crowded(priorities=(2, 1, 1))
    while line.scheduler.preemptions == 0:
        line.step()
    assert SequenceStatus.PENDING is sequences[0].state


def test_preempted_sequence_keeps_its_tokens_and_recomputes_them():
    line, sequences = crowded()
    while line.scheduler.preemptions == 0:
        line.step()
    tokens = sequences[2].tokens.num_tokens
    assert tokens > 7
    for key in (0, 1):
        line.end(sequences[key])
    assert [(2, 0, tokens, True)] == line.step()
    assert tokens + 1 == sequences[2].tokens.num_tokens


def test_no_sequence_is_preempted_a_fourth_time_and_all_complete():
    line = Line(blocks=8, max_batched_tokens=64, predicted=0)
    sequences = [line.submit(key, prompt_length=3, max_tokens=28) for key in range(6)]
    steps = 0
    while line.scheduler.running or line.scheduler.pending:
        line.step()
        steps += 1
        assert steps < 1000
    assert max(sequence.preemptions for sequence in sequences) == 3
    assert {SequenceStatus.COMPLETED} == {sequence.state for sequence in sequences}
    assert line.memory.pools[0].free == 8


def test_sequence_preempted_three_times_reserves_all_it_can_need():
    line = Line(blocks=10, predicted=0)
    pinned = line.submit(1, prompt_length=4, max_tokens=12)
    pinned.preemptions = 3
    line.step()
    assert pinned.reserved == [3]
    assert (line.memory.pools[0].available, line.memory.unreserved(0)) == (9, 6)
    while pinned.state is SequenceStatus.PROCESSING:
        line.step()
    assert line.memory.unreserved(0) == 10


def test_pinned_sequence_waits_for_all_its_blocks_and_is_never_preempted():
    line = Line(blocks=10, predicted=0)
    other = line.submit(1, prompt_length=4, max_tokens=30)
    line.step()
    pinned = line.submit(2, prompt_length=4, max_tokens=33)  # 10 blocks
    pinned.preemptions = 3
    line.step()
    assert SequenceStatus.PENDING is pinned.state
    line.end(other)
    line.step()
    assert SequenceStatus.PROCESSING is pinned.state
    waits = line.submit(3, prompt_length=1, max_tokens=30, priority=0)
    line.step()
    assert SequenceStatus.PENDING is waits.state


def test_another_sequence_takes_the_row_of_a_preempted_one():
    line = Line(slots=2, blocks=6, max_batch=1, predicted=0)
    pinned = line.submit(1, prompt_length=4, max_tokens=12)
    pinned.preemptions = 3
    other = line.submit(2, prompt_length=7, max_tokens=12)
    while other.preemptions == 0:
        keys = line.keys()
    assert keys == [1]
    assert SequenceStatus.PENDING is other.state


# Windows -------------------------------------------------------------------------------------------


def test_blocks_outside_the_window_are_freed_while_the_sequence_runs():
    line = Line(blocks=[30, 6], windows=(None, 6), max_batched_tokens=8)
    sequence = line.submit(1, prompt_length=50, max_tokens=40)
    used = []
    while sequence.state is not SequenceStatus.COMPLETED:
        line.step()
        used.append(6 - line.memory.pools[1].free)
    assert max(used) <= 4
    assert tuple(pool.free for pool in line.memory.pools) == (30, 6)


def test_prompts_that_together_hold_all_window_blocks_do_not_deadlock():
    line = Line(blocks=[60, 4], windows=(None, 6), max_batched_tokens=4, predicted=0)
    sequences = [line.submit(key, prompt_length=30, max_tokens=5) for key in range(3)]
    steps = 0
    while line.scheduler.running or line.scheduler.pending:
        line.step()
        steps += 1
        assert steps < 300
    assert {SequenceStatus.COMPLETED} == {sequence.state for sequence in sequences}
