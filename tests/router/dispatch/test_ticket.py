"""The states of a ticket: which transitions are allowed."""

import itertools

import pytest

from fairlead.router.dispatch.ticket import TRANSITIONS, Ticket, TicketState
from router.dispatch.recorded import job

NEW, QUEUED, GRANTED, DONE = TicketState
ROUTES: dict[TicketState, tuple[TicketState, ...]] = {
    NEW: (),
    QUEUED: (QUEUED,),
    GRANTED: (QUEUED, GRANTED),
    DONE: (DONE,),
}


def ticket_in(state: TicketState) -> Ticket:
    ticket = job()
    for step in ROUTES[state]:
        ticket.become(step)
    return ticket


@pytest.mark.parametrize(("before", "after"), [*itertools.product(TicketState, repeat=2)])
def test_ticket_makes_the_transitions_of_the_table_and_no_others(before, after):
    ticket = ticket_in(before)
    if after in TRANSITIONS[before]:
        ticket.become(after)
        assert ticket.state is after
    else:
        with pytest.raises(AssertionError, match=f"cannot go from {before} to {after}"):
            ticket.become(after)
        assert ticket.state is before


def test_only_a_new_job_is_never_entered_again_and_only_done_is_final():
    assert set(itertools.chain(*TRANSITIONS.values())) == {QUEUED, GRANTED, DONE}
    assert [before for before, allowed in TRANSITIONS.items() if not allowed] == [DONE]
