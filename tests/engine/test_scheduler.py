from fairlead.engine.blocks import BlockPool
from fairlead.engine.scheduler import Scheduler
from fairlead.engine.sequence import Plan, Sequence, State
from fairlead.engine.slots import SlotPool
from fairlead.job import Sampling


def scheduler(*, slots=8, blocks=100, max_batch=8, max_batched_tokens=16) -> Scheduler:
    return Scheduler(
        slots=SlotPool(slots),
        blocks=BlockPool(blocks, block_size=4),
        max_batch=max_batch,
        max_batched_tokens=max_batched_tokens,
    )


def submitted(scheduler: Scheduler, key: int, prompt_length: int, max_tokens: int = 4) -> Sequence:
    sequence = Sequence(key, [1] * prompt_length, Sampling(max_tokens=max_tokens), seed=0)
    scheduler.submit(sequence)
    return sequence


def run(plan: Plan) -> None:
    """What a step does to its sequences."""
    for chunk in plan.chunks:
        chunk.sequence.computed += chunk.count
        if chunk.samples:
            chunk.sequence.token_ids.append(1)


def step(scheduler: Scheduler) -> list[tuple[int, int, int, bool]]:
    """Run the next step; return its chunks as (key, start, count, samples)."""
    plan = scheduler.plan()
    assert plan is not None
    chunks = [(chunk.sequence.key, chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks]
    run(plan)
    return chunks


def test_without_sequences_there_is_no_plan():
    assert scheduler().plan() is None


def test_a_prompt_is_prefilled_and_then_decoded_token_by_token():
    line = scheduler()
    submitted(line, 1, prompt_length=5)
    assert step(line) == [(1, 0, 5, True)]
    assert step(line) == [(1, 5, 1, True)]
    assert step(line) == [(1, 6, 1, True)]


def test_a_long_prompt_is_prefilled_in_chunks_and_only_the_last_samples():
    line = scheduler(max_batched_tokens=4)
    submitted(line, 1, prompt_length=9)
    assert step(line) == [(1, 0, 4, False)]
    assert step(line) == [(1, 4, 4, False)]
    assert step(line) == [(1, 8, 1, True)]


def test_decodes_come_first_and_a_long_prefill_gets_what_they_leave():
    line = scheduler(max_batched_tokens=6)
    submitted(line, 1, prompt_length=2)
    submitted(line, 2, prompt_length=1)
    step(line)
    submitted(line, 3, prompt_length=50)
    assert step(line) == [(1, 2, 1, True), (2, 1, 1, True), (3, 0, 4, False)]
    assert step(line) == [(1, 3, 1, True), (2, 2, 1, True), (3, 4, 4, False)]


def test_prefills_share_the_budget_first_come_first_served():
    line = scheduler(max_batched_tokens=8)
    for key in (1, 2, 3):
        submitted(line, key, prompt_length=6)
    assert step(line) == [(1, 0, 6, True), (2, 0, 2, False)]
    assert step(line) == [(1, 6, 1, True), (2, 2, 4, True), (3, 0, 3, False)]


def test_a_sequence_waits_while_no_slot_is_free():
    line = scheduler(slots=1)
    first = submitted(line, 1, prompt_length=2)
    second = submitted(line, 2, prompt_length=2)
    assert step(line) == [(1, 0, 2, True)]
    assert (1, 1) == (line.running, line.pending)
    assert second.state is State.PENDING
    line.remove(first)
    assert step(line) == [(2, 0, 2, True)]
    assert second.state is State.PROCESSING
    assert first.slot is None


def test_a_sequence_waits_for_the_blocks_of_its_worst_case_and_nobody_overtakes_it():
    line = scheduler(blocks=4)
    first = submitted(line, 1, prompt_length=2, max_tokens=6)  # 8 tokens, 2 blocks
    submitted(line, 2, prompt_length=8, max_tokens=1)  # 3 blocks
    submitted(line, 3, prompt_length=1, max_tokens=1)  # 1 block, but behind
    assert step(line) == [(1, 0, 2, True)]
    assert line.blocks.free == 2
    line.remove(first)
    assert step(line) == [(3, 0, 1, True), (2, 0, 8, True)]
    assert line.blocks.free == 0


def test_running_sequences_hold_different_slots_and_blocks():
    line = scheduler()
    sequences = [submitted(line, key, prompt_length=7) for key in range(5)]
    line.plan()
    assert len({sequence.slot for sequence in sequences}) == 5
    blocks = [block for sequence in sequences for block in sequence.block_ids[0]]
    assert len(blocks) == len(set(blocks)) == 5 * 3


def test_a_slot_comes_back_under_another_generation():
    line = scheduler(slots=1)
    first = submitted(line, 1, prompt_length=2)
    line.plan()
    before = (first.slot, first.generation)
    line.remove(first)
    second = submitted(line, 2, prompt_length=2)
    line.plan()
    assert before[0] == second.slot
    assert before[1] != second.generation


def test_removing_a_waiting_sequence_leaves_the_others_in_line():
    line = scheduler(slots=1)
    submitted(line, 1, prompt_length=2)
    second = submitted(line, 2, prompt_length=2)
    submitted(line, 3, prompt_length=2)
    line.plan()
    line.remove(second)
    assert (1, 1) == (line.running, line.pending)


def test_more_sequences_than_a_step_takes_have_their_turns():
    line = scheduler(max_batch=2)
    for key in (1, 2, 3, 4):
        submitted(line, key, prompt_length=1, max_tokens=9)
    turns = [{chunk[0] for chunk in step(line)} for _ in range(6)]
    assert [{1, 2}, {3, 4}] * 3 == turns


def test_a_stream_of_short_newcomers_starves_nobody():
    line = scheduler(slots=2, max_batch=1)
    submitted(line, 0, prompt_length=1, max_tokens=50)
    served = 0
    for key in range(1, 20):
        newcomer = submitted(line, key, prompt_length=1)
        while newcomer.output_length == 0:
            served += step(line)[0][0] == 0
        line.remove(newcomer)
    assert served >= 9


def test_decodes_never_leave_a_prefill_without_a_token():
    line = scheduler(max_batch=8, max_batched_tokens=2)
    for key in (1, 2, 3):
        submitted(line, key, prompt_length=1, max_tokens=50)
    step(line)
    step(line)
    prefill = submitted(line, 4, prompt_length=6, max_tokens=1)
    steps = 0
    while prefill.output_length == 0:
        step(line)
        steps += 1
    assert steps <= 12
