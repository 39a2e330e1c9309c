from itertools import product

import pytest

from fairlead._cext.inputbatch import SequenceState
from fairlead.engine.sequence import MOST_PREEMPTIONS, TRANSITIONS, Sequence, SequenceStatus

ENDS = {SequenceStatus.COMPLETED, SequenceStatus.TIMEOUT, SequenceStatus.FAILED, SequenceStatus.CANCELLED}

# The state transitions that the requirements allow, repeated here by hand.
ALLOWED = {
    *(
        (SequenceStatus.COMPILING, state)
        for state in (
            SequenceStatus.PENDING,
            SequenceStatus.FAILED,
            SequenceStatus.TIMEOUT,
            SequenceStatus.CANCELLED,
        )
    ),
    *(
        (SequenceStatus.PENDING, state)
        for state in (
            SequenceStatus.PROCESSING,
            SequenceStatus.SUSPENDED,
            SequenceStatus.FAILED,
            SequenceStatus.TIMEOUT,
            SequenceStatus.CANCELLED,
        )
    ),
    *((SequenceStatus.PROCESSING, state) for state in ENDS),
    (SequenceStatus.PROCESSING, SequenceStatus.PENDING),
    (SequenceStatus.PROCESSING, SequenceStatus.SUSPENDED),
    *(
        (SequenceStatus.SUSPENDED, state)
        for state in (
            SequenceStatus.PENDING,
            SequenceStatus.FAILED,
            SequenceStatus.TIMEOUT,
            SequenceStatus.CANCELLED,
        )
    ),
}


def sequence_in(state: SequenceStatus) -> Sequence:
    if state is SequenceStatus.COMPILING:
        return Sequence(SequenceState(1, [5, 6], max_tokens=4), state=state)
    sequence = Sequence(SequenceState(1, [5, 6], max_tokens=4))
    if state in {SequenceStatus.PROCESSING, SequenceStatus.COMPLETED}:
        sequence.become(SequenceStatus.PROCESSING)
    if state not in {SequenceStatus.PENDING, SequenceStatus.PROCESSING}:
        sequence.become(state)
    return sequence


def test_new_sequence_is_pending_without_output():
    sequence = sequence_in(SequenceStatus.PENDING)
    assert SequenceStatus.PENDING is sequence.state
    assert (sequence.key, sequence.tokens.output_length) == (1, 0)


@pytest.mark.parametrize(("before", "after"), sorted(ALLOWED))
def test_allowed_transition_changes_the_state(before, after):
    sequence = sequence_in(before)
    sequence.become(after)
    assert after is sequence.state


@pytest.mark.parametrize(("before", "after"), sorted(set(product(SequenceStatus, SequenceStatus)) - ALLOWED))
def test_every_other_transition_raises(before, after):
    sequence = sequence_in(before)
    with pytest.raises(AssertionError, match=f"cannot go from {before} to {after}"):
        sequence.become(after)
    assert before is sequence.state


def test_final_states_have_no_transitions():
    assert not {before for before, _ in TRANSITIONS} & ENDS


def test_pending_sequence_has_no_slot():
    with pytest.raises(AttributeError):
        sequence_in(SequenceStatus.PENDING).slot  # noqa: B018


def test_sequence_is_pinned_after_three_preemptions():
    sequence = sequence_in(SequenceStatus.PENDING)
    pinned = []
    for _ in range(MOST_PREEMPTIONS + 1):
        pinned.append(sequence.is_pinned())
        sequence.preemptions += 1
    assert pinned == [False, False, False, True]
