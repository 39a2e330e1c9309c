from itertools import product

import pytest

from fairlead._cext.inputbatch import SequenceState
from fairlead.engine.sequence import MOST_PREEMPTIONS, TRANSITIONS, Sequence, State

ENDS = {State.COMPLETED, State.TIMEOUT, State.FAILED, State.CANCELLED}

# The spec's table, written once more by hand.
ALLOWED = {
    *((State.PENDING, state) for state in (State.PROCESSING, State.FAILED, State.TIMEOUT, State.CANCELLED)),
    *((State.PROCESSING, state) for state in ENDS),
    (State.PROCESSING, State.PENDING),
}


def sequence_in(state: State) -> Sequence:
    sequence = Sequence(SequenceState(1, [5, 6], max_tokens=4))
    if state in {State.PROCESSING, State.COMPLETED}:
        sequence.become(State.PROCESSING)
    if state not in {State.PENDING, State.PROCESSING}:
        sequence.become(state)
    return sequence


def test_a_sequence_begins_pending_and_without_output():
    sequence = sequence_in(State.PENDING)
    assert State.PENDING is sequence.state
    assert (1, 0) == (sequence.key, sequence.tokens.output_length)


@pytest.mark.parametrize(("before", "after"), sorted(ALLOWED))
def test_a_transition_of_the_table_is_made(before, after):
    sequence = sequence_in(before)
    sequence.become(after)
    assert after is sequence.state


@pytest.mark.parametrize(("before", "after"), sorted(set(product(State, State)) - ALLOWED))
def test_every_other_transition_is_a_bug_that_raises(before, after):
    sequence = sequence_in(before)
    with pytest.raises(AssertionError, match=f"cannot go from {before} to {after}"):
        sequence.become(after)
    assert before is sequence.state


def test_nothing_follows_an_end():
    assert not {before for before, _ in TRANSITIONS} & ENDS


def test_one_that_waits_has_no_slot():
    with pytest.raises(AssertionError):
        assert sequence_in(State.PENDING).slot >= 0


def test_after_three_preemptions_it_is_pinned():
    sequence = sequence_in(State.PENDING)
    pinned = []
    for _ in range(MOST_PREEMPTIONS + 1):
        pinned.append(sequence.pinned)
        sequence.preemptions += 1
    assert [False, False, False, True] == pinned
