"""The queue by itself: tickets over the kernel's handles, bytes, and what tenants were charged."""

from dispatch.recorded import job
from fairlead.dispatch.queue import Queue
from fairlead.dispatch.ticket import Ticket
from fairlead.job import Relay


def queue(*tickets: Ticket, capacity: int = 10, waiting_bytes: int = 0) -> Queue:
    filled = Queue(capacity, fairness="tokens", waiting_bytes=waiting_bytes)
    for ticket in tickets:
        filled.push(ticket)
    return filled


def accept_all(ticket: Ticket) -> bool:
    return True


def sized(length: int, tenant: str = "A") -> Ticket:
    return job(tenant, relay=Relay("/v1/completions", b"x" * length))


def test_popped_ticket_is_charged_and_removed():
    first, second = job("A", cost=3.0), job("B", cost=2.0)
    subject = queue(first, second)
    assert first is subject.pop(accept_all)
    assert (first.charged, second.charged) == (3.0, 0.0)
    assert [second] == list(subject)
    assert (first in subject, second in subject) == (False, True)


def test_pop_skips_tickets_that_do_not_fit_and_returns_none_if_none_fits():
    first, second = job("A"), job("A")
    subject = queue(first, second)
    assert second is subject.pop(lambda ticket: True if ticket is second else None)
    assert subject.pop(lambda ticket: None) is None
    assert [first] == list(subject)


def test_requeued_ticket_comes_first_and_is_charged_once():
    again, other = job("A", cost=3.0), job("B", cost=3.0)
    subject = queue(again)
    assert again is subject.pop(accept_all)
    subject.push(other)
    subject.charge(again, 5.0)
    subject.requeue(again)
    assert again is subject.pop(accept_all)
    assert 5.0 == again.charged == subject._kernel.counter("A")


def test_charge_adds_only_what_exceeds_the_last_and_a_refund_ends_it():
    ticket = job("A", cost=3.0)
    subject = queue(ticket)
    subject.pop(accept_all)
    for cost in (1.0, 4.0, 4.0, 2.0):
        subject.charge(ticket, cost)
    assert subject._kernel.counter("A") == 4.0
    subject.refund(ticket, down_to=1.0)
    assert (subject._kernel.counter("A"), ticket.charged) == (1.0, 0.0)


def test_newcomer_displaces_a_job_of_the_longest_list_only_if_that_makes_room():
    theirs = [job("A") for _ in range(3)]
    subject = queue(*theirs, capacity=3)
    assert subject.is_full
    assert subject.displace(job("A").job) is None
    subject.requeue(back := job("C"))
    assert subject.displace(job("B").job) is None, "one job less would not make enough room"
    subject.remove(back)
    assert theirs[-1] is subject.displace(job("B").job)
    assert theirs[:-1] == list(subject)
    assert not subject.is_full


def test_request_frees_its_bytes_however_it_leaves_the_queue():
    subject = queue(capacity=1, waiting_bytes=100)
    large = sized(100)
    for remove_ticket in (subject.remove, lambda _: subject.pop(accept_all)):
        assert subject.has_bytes_for(large.job)
        subject.push(large)
        assert not subject.has_bytes_for(large.job)
        remove_ticket(large)
    subject = queue(sized(50), sized(50), capacity=2, waiting_bytes=100)  # 25 for each are reserved
    assert not subject.has_bytes_for(sized(26).job)
    subject.displace(job("B").job)
    assert subject.has_bytes_for(sized(50).job)


def test_listing_the_jobs_ahead_of_a_newcomer_does_not_change_the_queue():
    first, second = job("A"), job("A")
    subject = queue(first, second)
    assert [first.job] == subject.ahead_of_newcomer("B", 1)
    assert [first, second] == list(subject)
    assert len(subject._kernel) == 2
    assert [subject.position(ticket) for ticket in subject] == [0, 1]
    assert [first.job] == subject.ahead(second)


def test_tickets_may_be_removed_during_iteration():
    subject = queue(*(job() for _ in range(3)))
    for ticket in subject:
        subject.remove(ticket)
    assert list(subject) == []
    assert len(subject._kernel) == 0
