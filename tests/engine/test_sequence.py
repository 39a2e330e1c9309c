from itertools import product

import pytest

from fairlead._cext.inputbatch import SequenceState
from fairlead.engine.sequence import MOST_PREEMPTIONS, TRANSITIONS, Sequence, State

ENDS = {State.COMPLETED, State.TIMEOUT, State.FAILED, State.CANCELLED}

# The state transitions that the requirements allow, repeated here by hand.
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


def test_new_sequence_is_pending_without_output():
    sequence = sequence_in(State.PENDING)
    assert State.PENDING is sequence.state
    assert (sequence.key, sequence.tokens.output_length) == (1, 0)


@pytest.mark.parametrize(("before", "after"), sorted(ALLOWED))
def test_allowed_transition_changes_the_state(before, after):
    sequence = sequence_in(before)
    sequence.become(after)
    assert after is sequence.state


@pytest.mark.parametrize(("before", "after"), sorted(set(product(State, State)) - ALLOWED))
def test_every_other_transition_raises(before, after):
    sequence = sequence_in(before)
    with pytest.raises(AssertionError, match=f"cannot go from {before} to {after}"):
        sequence.become(after)
    assert before is sequence.state


def test_final_states_have_no_transitions():
    assert not {before for before, _ in TRANSITIONS} & ENDS


def test_pending_sequence_has_no_slot():
    with pytest.raises(AssertionError):
        assert sequence_in(State.PENDING).slot >= 0


def test_sequence_is_pinned_after_three_preemptions():
    sequence = sequence_in(State.PENDING)
    pinned = []
    for _ in range(MOST_PREEMPTIONS + 1):
        pinned.append(sequence.pinned)
        sequence.preemptions += 1
    assert pinned == [False, False, False, True]
