"""Every row of the tables in document 001, on `InputBatch`, which keeps state by slot.

Its terms and ours: a `CachedRequestState` is a `SequenceState`; a request id is a slot and its key; a row's
index is its position in `order()`; the tensors are columns by slot, so nothing moves with a row. Those of
sampling parameters are `SamplingColumns`, which follow the batch's changes.

Absent here, as in the whole server: `prompt_embeds` (a prompt is token ids), `mm_features` (text only),
`lora_request` (one set of weights per model), speculative decoding (`num_tokens_no_spec` is the number of
tokens), pooling. `generator` is a seed: a draw depends on it and on the position, so no state is kept.
"""

from array import array

import numpy as np
import pytest

from cext.input_batch_oracle import HEADER
from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.base.job import Sampling
from fairlead.engine.sampling.parameters import TABLE, BatchUpdate, SamplingColumns

BLOCK = 4


def new_batch(**changes):
    options = {
        "slots": 8,
        "max_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": BLOCK,
        "vocab_size": 100,
        "eos_token_ids": [99],
    }
    return InputBatch(**options | changes)


def new_state(key=1, prompt=(10, 11, 12), **changes):
    sampling = Sampling(**{"max_tokens": 20, "seed": 0} | changes)
    return SequenceState(
        key,
        list(prompt),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        sampling=TABLE.encode(sampling),
    )


def columns_of(batch):
    """Return the sampling parameters' columns of a batch."""
    changes = batch.changes(0)
    columns = SamplingColumns(batch.slots)
    columns.update_state(BatchUpdate(changes.removed, [(slot, batch.state(slot)) for slot in changes.added]))
    return columns


def blocks_for(state, first=0):
    return (list(range(first, first + -(-state.num_tokens // BLOCK))),)


def add_to_batch(batch, slot, **changes):
    state = new_state(key=slot, **changes)
    row = batch.add_request(slot, state, blocks_for(state, first=10 * slot))
    return state, row


def run_step(batch, *tokens):
    """Run everything that can run; the sequences that sample get these tokens, in order."""
    survey = batch.survey(batch.slots)
    for slot in survey.prefills:
        batch.num_scheduled[slot] = batch.num_tokens[slot] - batch.num_computed_tokens[slot]
    for slot in survey.short:
        batch.append_block_ids(slot, ([10 * slot + batch.block_counts(slot)[0]],))
    step = batch.prepare_inputs()
    return step, batch.commit_tokens(step, array("i", tokens))


# CachedRequestState --------------------------------------------------------------------------------


def test_field_req_id_is_the_key_of_the_results():
    batch = new_batch()
    add_to_batch(batch, 5)
    _, committed = run_step(batch, 42)
    assert (list(committed.keys), list(committed.tokens)) == ([5], [42])


def test_field_prompt_token_ids_are_copied_once_from_a_list_or_int32():
    prompt = array("i", [7, 8, 9])
    state = SequenceState(1, prompt, max_tokens=1)
    prompt[0] = 0
    assert array("i", [7, 8, 9]) == state.token_ids()
    assert state.token_ids() == new_state(prompt=[7, 8, 9]).token_ids()


def test_field_sampling_params_stay_with_the_state_and_are_the_callers_own():
    sampling = object()
    state = SequenceState(1, [10], max_tokens=20, sampling=sampling, stop_token_ids=[3, 4])
    assert sampling is state.sampling
    assert state.stop_token_ids == (3, 4)


def test_field_generator_is_a_seed():
    batch = new_batch()
    add_to_batch(batch, 0, seed=2**64 - 1)
    assert columns_of(batch)["seed"][0] == 2**64 - 1


def test_field_block_ids_are_one_list_a_kv_cache_group_and_only_kept_in_the_batch():
    batch = new_batch(windows=(None, 8))
    batch.add_request(0, new_state(), ([4, 5], [6]))
    assert [list(ids) for ids in batch.block_ids(0)] == [[4, 5], [6]]
    batch.remove_request(0)
    with pytest.raises(ValueError, match="empty"):
        batch.block_ids(0)


def test_field_num_computed_tokens_includes_the_prefix_cache():
    batch = new_batch()
    state = new_state(prompt=range(10))
    state.rewind(8)
    batch.add_request(0, state, ([0, 1, 2],))
    assert (state.computed, batch.num_computed_tokens[0]) == (8, 8)
    step, _ = run_step(batch, 1)
    assert list(step.positions) == [8, 9]


def test_field_output_token_ids_follow_the_prompt():
    batch = new_batch()
    state, _ = add_to_batch(batch, 0)
    run_step(batch, 50)
    run_step(batch, 51)
    assert state.token_ids(state.prompt_length).tolist() == [50, 51]
    assert 2 == state.output_length == batch.output_tokens[0]


def test_property_num_tokens_is_the_prompt_and_the_output():
    batch = new_batch()
    state, _ = add_to_batch(batch, 0)
    assert state.num_tokens == 3
    run_step(batch, 50)
    assert 4 == state.num_tokens == state.prompt_length + state.output_length


def test_lifecycle_the_state_survives_preemption_and_resumes_with_its_tokens():
    batch = new_batch()
    state, _ = add_to_batch(batch, 0)
    run_step(batch, 50)
    run_step(batch, 51)
    before = state.token_ids()
    batch.remove_request(0)
    assert before == state.token_ids()
    state.rewind(0)
    batch.add_request(6, state, ([7, 8],))
    step, _ = run_step(batch, 52)
    assert list(step.input_ids) == [10, 11, 12, 50, 51]
    assert state.token_ids().tolist() == [10, 11, 12, 50, 51, 52]


# InputBatch: the tensors ---------------------------------------------------------------------------


def test_tensor_token_ids_need_no_row_of_max_model_len():
    batch = new_batch(slots=1024, max_model_len=1 << 19, block_size=1024)
    state, _ = add_to_batch(batch, 0)
    assert state.__sizeof__() < 1000
    run_step(batch, 50)
    assert list(state.tokens_view()) == [10, 11, 12, 50]


def test_tensor_token_ids_grow_with_the_output_and_older_views_stay_valid():
    batch = new_batch(max_model_len=1000)
    state, _ = add_to_batch(batch, 0, max_tokens=900)
    view = state.tokens_view()
    for number in range(200):
        run_step(batch, number % 99)
    assert list(view) == [10, 11, 12]
    assert [number % 99 for number in range(200)] == state.token_ids(3).tolist()


def test_tensor_num_computed_tokens_grows_when_a_step_is_prepared():
    batch = new_batch()
    state, _ = add_to_batch(batch, 3)
    batch.num_scheduled[3] = 2
    step = batch.prepare_inputs()
    assert (batch.num_computed_tokens[3], state.computed, state.committed) == (2, 2, 0)
    batch.commit_tokens(step, array("i"))
    assert (state.computed, state.committed) == (2, 2)


def test_tensor_num_tokens_counts_the_token_under_way():
    batch = new_batch()
    add_to_batch(batch, 3)
    batch.num_scheduled[3] = 3
    step = batch.prepare_inputs()
    assert batch.num_tokens[3] == 4
    batch.commit_tokens(step, array("i", [1]))
    assert batch.num_tokens[3] == 4


def test_tensor_num_prompt_tokens():
    batch = new_batch()
    add_to_batch(batch, 3, prompt=range(9))
    run_step(batch, 1)
    assert batch.num_prompt_tokens[3] == 9


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("temperature", 0.5, np.float32),
        ("top_p", 0.75, np.float32),
        ("top_k", 7, np.int32),
        ("min_p", 0.25, np.float32),
        ("presence_penalty", 0.5, np.float32),
        ("frequency_penalty", -0.5, np.float32),
        ("repetition_penalty", 1.5, np.float32),
        ("seed", 11, np.uint64),
        ("logprobs", 3, np.int32),
    ],
)
def test_tensor_of_a_sampling_parameter_is_a_column_by_slot(name, value, kind):
    batch = new_batch()
    add_to_batch(batch, 3, **{name: value})
    column = columns_of(batch)[name]
    assert (column.dtype, column.shape) == (kind, (8,))
    assert value == column[3]


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 13), ("min_tokens", 2)])
def test_bound_of_the_output_is_kept_with_the_state(name, value):
    state, _ = add_to_batch(new_batch(), 3, **{name: value})
    assert getattr(state, name) == value


def test_tensor_block_table_is_int32_by_slot_and_column():
    batch = new_batch()
    batch.add_request(3, new_state(), ([21, 22],))
    table = np.asarray(batch.block_table(0))
    assert (table.dtype, table.shape) == (np.int32, (8, 16))
    assert table[3, :2].tolist() == [21, 22]


# Request management --------------------------------------------------------------------------------


def test_req_ids_name_the_request_of_each_row_and_mark_empty_rows():
    batch = new_batch()
    for slot in (4, 2, 6):
        add_to_batch(batch, slot)
    batch.remove_request(2)
    assert batch.order() == [4, -1, 6]


def test_req_id_to_index_is_the_inverse():
    batch = new_batch()
    for slot in (4, 2, 6):
        add_to_batch(batch, slot)
    assert sorted((4, 2, 6), key=batch.row_of) == [4, 2, 6]
    assert all(slot == batch.order()[batch.row_of(slot)] for slot in (4, 2, 6))


def test_num_reqs_is_how_many_there_are_holes_left_out():
    batch = new_batch()
    for slot in (4, 2, 6):
        add_to_batch(batch, slot)
    batch.remove_request(2)
    assert batch.num_reqs == 2


# add_request ---------------------------------------------------------------------------------------


def test_add_1_takes_the_end_or_the_lowest_hole():
    batch = new_batch()
    assert [add_to_batch(batch, slot)[1] for slot in (7, 5, 3, 1)] == [0, 1, 2, 3]
    batch.remove_request(3)
    batch.remove_request(5)
    assert [add_to_batch(batch, slot)[1] for slot in (0, 2, 4)] == [1, 2, 4]


def test_add_2_the_tokens_are_not_copied():
    batch = new_batch()
    state, _ = add_to_batch(batch, 0, prompt=[30, 31, 32])
    batch.num_scheduled[0] = 3
    assert list(batch.prepare_inputs().input_ids) == [30, 31, 32]
    assert state.token_ids().tolist() == [30, 31, 32]


def test_add_3_sets_the_block_ids():
    batch = new_batch(windows=(None, 4))
    batch.add_request(0, new_state(), ([1], [2]))
    assert batch.block_counts(0) == (1, 1)


def test_add_4_copies_the_sampling_parameters_that_any_sequence_uses():
    batch = new_batch()
    add_to_batch(batch, 0, temperature=0.0, top_p=0.5, logprobs=0)
    add_to_batch(batch, 1, temperature=0.5, top_p=0.5, presence_penalty=1.0)
    gathered = columns_of(batch).gather(np.arange(2))
    assert set(gathered) == {"temperature", "top_p", "logprobs", "presence_penalty", "seed"}
    assert list(gathered["temperature"]) == [0.0, 0.5]


def test_add_to_a_full_batch_or_an_occupied_slot_raises_and_changes_nothing():
    batch = new_batch(slots=2)
    add_to_batch(batch, 0)
    add_to_batch(batch, 1)
    late_result = new_state(key=9)
    for slot in (0, 1, 2, -1):
        with pytest.raises(ValueError, match="slot"):
            batch.add_request(slot, late_result, ([1],))
    assert (batch.order(), batch.num_reqs, late_result.slot) == ([0, 1], 2, -1)


# remove_request ------------------------------------------------------------------------------------


def test_remove_1_and_2_leave_a_hole_and_no_index():
    batch = new_batch()
    add_to_batch(batch, 0)
    add_to_batch(batch, 1)
    batch.remove_request(0)
    assert batch.order() == [-1, 1]
    with pytest.raises(ValueError, match="empty"):
        batch.row_of(0)


def test_remove_3_frees_its_parameters():
    batch, columns = new_batch(), SamplingColumns(8)
    state, _ = add_to_batch(batch, 0, top_k=5, min_p=0.5, repetition_penalty=2.0, logprobs=1)
    columns.update_state(BatchUpdate([], [(0, state)]))
    assert set(columns.gather(np.arange(1))) == {
        "temperature",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logprobs",
        "seed",
    }
    batch.remove_request(0)
    columns.update_state(BatchUpdate(batch.changes(0).removed, []))
    assert columns.gather(np.arange(1)) == {}


def test_remove_4_clears_no_column_and_the_next_occupant_overwrites_it():
    batch, columns = new_batch(), SamplingColumns(8)
    columns.update_state(BatchUpdate([], [(0, add_to_batch(batch, 0, top_k=5)[0])]))
    batch.remove_request(0)
    columns.update_state(BatchUpdate([0], []))
    assert columns["top_k"][0] == 5
    columns.update_state(BatchUpdate([], [(0, add_to_batch(batch, 0, top_k=6, prompt=[1])[0])]))
    assert (columns["top_k"][0], batch.num_prompt_tokens[0]) == (6, 1)


# condense ------------------------------------------------------------------------------------------


def test_condense_a_hole_b_hole_c_becomes_a_c_b():
    batch = new_batch()
    a, x, b, y, c = 0, 1, 2, 3, 4
    for slot in (a, x, b, y, c):
        add_to_batch(batch, slot)
    batch.remove_request(x)
    batch.remove_request(y)
    assert [a, -1, b, -1, c] == batch.order()
    assert batch.condense() == [(4, 1)]
    assert [a, c, b] == batch.order()


def test_condense_of_a_batch_without_holes_moves_nothing():
    batch = new_batch()
    add_to_batch(batch, 0)
    add_to_batch(batch, 1)
    assert batch.condense() == []
    batch.remove_request(1)
    assert batch.condense() == []
    assert batch.order() == [0]


def test_condense_of_an_empty_batch_leaves_nothing():
    batch = new_batch()
    add_to_batch(batch, 0)
    add_to_batch(batch, 1)
    batch.remove_request(0)
    batch.remove_request(1)
    assert (batch.condense(), batch.order()) == ([], [])


def test_condense_keeps_every_column_of_moved_rows():
    batch = new_batch()
    for slot in range(3):
        add_to_batch(batch, slot, prompt=[slot] * (slot + 1), temperature=slot / 4, top_p=0.5, top_k=slot)
    run_step(batch, 1, 1, 1)
    before = state_of_slot(batch, 2)
    batch.remove_request(0)
    batch.condense()
    assert batch.order() == [2, 1]
    assert before == state_of_slot(batch, 2)


def state_of_slot(batch, slot):
    state, counts = batch.state(slot), ("num_tokens", "num_prompt_tokens", "num_computed_tokens")
    sampled = columns_of(batch)
    parameters = [
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "seed", "logprobs"),
    ]
    return (
        [getattr(batch, name)[slot] for name in counts],
        [sampled[name][slot] for name in parameters],
        batch.block_ids(slot),
        state.token_ids(),
    )


# MultiGroupBlockTable ------------------------------------------------------------------------------


def test_group_table_is_found_by_the_groups_number():
    batch = new_batch(windows=(None, 4))
    batch.add_request(0, new_state(), ([1], [2]))
    assert (batch.block_table(0)[0, 0], batch.block_table(1)[0, 0]) == (1, 2)
    with pytest.raises(ValueError, match="group must be in 0"):
        batch.block_table(2)


def test_group_append_row_reaches_all_groups_or_none():
    batch = new_batch(windows=(None, 4))
    batch.add_request(0, new_state(), ([1], [2]))
    batch.append_block_ids(0, ([3], [4, 5]))
    assert [list(ids) for ids in batch.block_ids(0)] == [[1, 3], [2, 4, 5]]
    with pytest.raises(ValueError, match="block ids"):
        batch.append_block_ids(0, ([6], [-1]))
    with pytest.raises(ValueError, match="2 lists"):
        batch.append_block_ids(0, ([6],))
    assert [list(ids) for ids in batch.block_ids(0)] == [[1, 3], [2, 4, 5]]


def test_group_commit_sends_the_changed_entries_of_all_groups_in_one_arena():
    batch = new_batch(windows=(None, 4))
    batch.add_request(3, new_state(), ([1], [2]))
    batch.num_scheduled[3] = 3
    step = batch.prepare_inputs()
    assert list(step.block_writes) == [0, 3, 0, 1, 1, 1, 3, 0, 1, 2]
    header = list(step.arena[:HEADER])
    assert header[4:7] == [10, 2, 2]
    assert list(step.block_writes) == list(step.arena[header[-1] :])


def test_group_with_a_window_frees_blocks_outside_it_and_the_other_group_keeps_them():
    batch = new_batch(windows=(None, 4))
    state = new_state(prompt=range(12))
    batch.add_request(0, state, ([1, 2, 3], [4, 5, 6]))
    run_step(batch, 1)
    assert state.committed == 12
    assert (batch.slide(0, 0), batch.slide(0, 1)) == ([], [4, 5])
    assert [list(ids) for ids in batch.block_ids(0)] == [[1, 2, 3], [-1, -1, 6]]
    assert batch.slide(0, 1) == []


# Steps write only differences ----------------------------------------------------------------------


def test_step_that_changes_nothing_writes_no_block_table():
    batch = new_batch()
    add_to_batch(batch, 0, prompt=[1])
    first, _ = run_step(batch, 5)
    second, _ = run_step(batch, 6)
    assert (len(first.block_writes), len(second.block_writes)) == (5, 0)


def test_new_block_is_the_only_thing_written():
    batch = new_batch()
    add_to_batch(batch, 0, prompt=[1, 2, 3, 4])
    run_step(batch, 5)
    step, _ = run_step(batch, 6)
    assert list(step.block_writes) == [0, 0, 1, 1, 1]


def test_slot_that_is_reused_between_two_steps_is_written_once():
    batch = new_batch()
    for block in range(50):
        batch.add_request(2, new_state(), ([block],))
        if block < 49:
            batch.remove_request(2)
    batch.num_scheduled[2] = 3
    assert list(batch.prepare_inputs().block_writes) == [0, 2, 0, 1, 49]


def test_step_with_removed_and_added_rows_has_one_slot_mapping_with_decodes_first():
    batch = new_batch()
    add_to_batch(batch, 0, prompt=[1, 2, 3])
    add_to_batch(batch, 1, prompt=[4, 5, 6])
    run_step(batch, 7, 8)
    batch.remove_request(0)
    add_to_batch(batch, 5, prompt=[9, 9, 9, 9, 9])
    step, committed = run_step(batch, 70, 71)
    assert (list(step.slots), step.decodes) == ([1, 5], 1)
    assert list(step.query_starts) == [0, 1, 6]
    assert list(step.input_ids) == [8, 9, 9, 9, 9, 9]
    assert list(step.positions) == [3, 0, 1, 2, 3, 4]
    assert list(step.slot_mapping[0]) == [10 * BLOCK + 3, *range(50 * BLOCK, 50 * BLOCK + 5)]
    assert (list(committed.keys), list(committed.tokens)) == ([1, 5], [70, 71])


def test_unscheduled_rows_stay_in_the_batch_and_miss_a_step_only():
    batch = new_batch()
    add_to_batch(batch, 0)
    add_to_batch(batch, 1)
    run_step(batch, 7, 8)
    batch.survey(8)
    batch.num_scheduled[0] = 0
    step = batch.prepare_inputs()
    assert list(step.slots) == [1]
    batch.commit_tokens(step, array("i", [9]))
    assert (batch.order(), batch.num_tokens[0], batch.num_tokens[1]) == ([0, 1], 4, 5)


def test_next_step_is_prepared_while_one_is_under_way():
    batch = new_batch()
    state, _ = add_to_batch(batch, 0)
    batch.num_scheduled[0] = 3
    first = batch.prepare_inputs()
    batch.survey(8)
    second = batch.prepare_inputs()
    assert list(second.input_ids) == [-1]
    with pytest.raises(RuntimeError, match="under way"):
        batch.prepare_inputs()
    batch.commit_tokens(first, array("i", [40]))
    batch.commit_tokens(second, array("i", [41]))
    assert state.token_ids(3).tolist() == [40, 41]


def test_late_result_never_reaches_the_slots_next_occupant():
    batch = new_batch()
    add_to_batch(batch, 0)
    batch.num_scheduled[0] = 3
    step = batch.prepare_inputs()
    batch.remove_request(0)
    successor, _ = add_to_batch(batch, 0)
    committed = batch.commit_tokens(step, array("i", [40]))
    assert (list(committed.keys), committed.finished, list(committed.filled)) == ([], [], [])
    assert successor.token_ids().tolist() == [10, 11, 12]
