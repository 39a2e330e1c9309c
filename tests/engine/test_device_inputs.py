"""The copy of a step to a GPU: unpacked as the batch wrote it, with the block tables up to date."""

import numpy as np
import pytest
import torch

from engine.interpreted import interpreted
from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.engine.device_inputs import DeviceInputs

pytestmark = interpreted
SIZES = {"slots": 9, "max_batched_tokens": 300, "max_model_len": 400, "block_size": 16}
VOCABULARY = 100
WINDOWS = (None, 40)


@pytest.fixture
def batch():
    return InputBatch(**SIZES, vocab_size=VOCABULARY, windows=WINDOWS)


@pytest.fixture
def inputs_on_device(launches):
    words = InputBatch.arena_size(**SIZES, groups=2) // 4
    return DeviceInputs(
        words=words,
        tokens=300,
        rows=12,
        slots=9,
        columns=27,
        groups=2,
        vocab_size=VOCABULARY,
        device=torch.device("cpu"),
    )


def enter(batch, slot, length, blocks):
    """Add a sequence with nothing computed yet, and with blocks for tokens to come."""
    prompt = [(7 * slot + token) % 90 for token in range(length)]
    state = SequenceState(slot, prompt, max_tokens=20)
    batch.add_request(slot, state, (blocks, [block + 100 for block in blocks]))


def check(inputs_on_device, batch, step, *, latest=None, tokens=None, rows=None):
    """Copy and unpack a step, and compare the result with the step and the block tables."""
    tokens, rows = tokens or step.tokens, rows or step.rows
    inputs = inputs_on_device.stage(step, batch, latest)
    there = inputs_on_device.unpack(tokens, rows, step.decodes)

    def padded(view, size, fill):
        return [*view, *[fill] * (size - len(view))]

    assert padded(step.positions, tokens, 0) == there.positions.tolist()
    for mapping, place in zip(step.slot_mapping, there.cache_slots, strict=True):
        assert padded(mapping, tokens, -1) == place.tolist()
    assert padded(step.query_starts, rows + 1, step.tokens) == there.starts.tolist()
    assert padded(step.sequence_lengths, rows, 0) == there.lengths.tolist()
    assert padded(step.slots, rows, 0) == there.table_rows.tolist()
    for group, table in enumerate(there.tables):
        known = np.asarray(batch.block_table(group))
        for slot, length in zip(step.slots, step.sequence_lengths, strict=True):
            first = max(0, length - 1 - (WINDOWS[group] or length)) // 16 if WINDOWS[group] else 0
            last = -(-length // 16)
            assert known[slot, first:last].tolist() == table[slot, first:last].tolist()
    assert len(inputs.token_ids) == step.tokens
    return there


def test_staged_steps_and_tables_are_complete_and_padding_is_marked(batch, inputs_on_device):
    enter(batch, 3, 40, [5, 9, 2])
    enter(batch, 8, 5, [4])
    batch.num_scheduled[3], batch.num_scheduled[8] = 30, 5
    first = batch.prepare_inputs()
    there = check(inputs_on_device, batch, first)
    assert list(first.input_ids) == there.token_ids.tolist()
    latest = torch.tensor([11])
    batch.num_scheduled[3], batch.num_scheduled[8] = 10, 1
    second = batch.prepare_inputs()
    assert -1 in list(second.input_ids)
    there = check(inputs_on_device, batch, second, latest=latest, tokens=16, rows=6)
    expected = [11 if token == -1 else token for token in second.input_ids]
    assert [*expected, *[0] * (16 - len(expected))] == there.token_ids.tolist()


def test_block_tables_stay_current_while_sequences_are_added_and_removed(batch, inputs_on_device):
    rng = np.random.default_rng(0)
    lengths = {}
    for number in range(16):
        for slot in range(9):
            if slot in lengths and rng.random() < 0.3:
                batch.remove_request(slot)
                del lengths[slot]
            if slot not in lengths:
                length = int(rng.integers(2, 250))
                blocks = rng.permutation(90)[: -(-(length + 30) // 16)].tolist()
                enter(batch, slot, length, blocks)
                lengths[slot] = length
        survey = batch.survey(9)
        budget = 300 - survey.decodes
        for slot in survey.prefills:
            state = batch.state(slot)
            batch.num_scheduled[slot] = count = min(budget, state.num_tokens - state.computed, 120)
            budget -= count
        step = batch.prepare_inputs()
        check(inputs_on_device, batch, step, latest=torch.full((9,), number % 90))
        committed = batch.commit_tokens(step, np.full(step.samples, number % 90, np.int32))
        for slot, *_ in committed.finished:
            batch.remove_request(slot)
            del lengths[slot]


def test_token_id_outside_the_models_vocabulary_is_replaced_by_0(inputs_on_device):
    batch = InputBatch(
        **SIZES, vocab_size=2**31 - 1, windows=WINDOWS
    )  # the tokenizer has more ids than the model
    state = SequenceState(1, [5, 99, 100, 2**31 - 2], max_tokens=2)
    batch.add_request(0, state, ([0], [0]))
    batch.num_scheduled[0] = 4
    there = check(inputs_on_device, batch, batch.prepare_inputs())
    assert there.token_ids.tolist() == [5, 99, 0, 0]


def test_batch_with_more_slots_or_longer_sequences_does_not_fit(inputs_on_device):
    for changed in ({"slots": 10}, {"max_model_len": 450}):
        batch = InputBatch(**{**SIZES, **changed}, vocab_size=VOCABULARY, windows=WINDOWS)
        enter(batch, 0, 5, [1])
        batch.num_scheduled[0] = 5
        assert not inputs_on_device.holds(batch.prepare_inputs(), batch)
