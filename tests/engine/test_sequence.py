from itertools import product

import pytest

from fairlead.engine.sequence import TRANSITIONS, Sequence, State
from fairlead.job import Sampling

ENDS = {State.COMPLETED, State.TIMEOUT, State.FAILED, State.CANCELLED}

# The spec's table, written once more by hand.
ALLOWED = {
    *((State.PENDING, state) for state in (State.PROCESSING, State.FAILED, State.TIMEOUT, State.CANCELLED)),
    *((State.PROCESSING, state) for state in ENDS),
    (State.PROCESSING, State.PENDING),
}


def sequence_in(state: State) -> Sequence:
    sequence = Sequence(1, [5, 6], Sampling(max_tokens=4), seed=0)
    if state in {State.PROCESSING, State.COMPLETED}:
        sequence.become(State.PROCESSING)
    if state not in {State.PENDING, State.PROCESSING}:
        sequence.become(state)
    return sequence


def test_a_sequence_begins_pending_and_without_output():
    sequence = sequence_in(State.PENDING)
    assert sequence.state is State.PENDING
    assert sequence.output_length == 0


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
