"""The queue by itself: tickets over the kernel's handles, bytes, and what tenants were charged."""

from random import Random

import pytest

from fairlead.base.job import Relay
from fairlead.router.dispatch.queue import Queue
from fairlead.router.dispatch.ticket import Ticket
from fairlead.router.dispatch.wait_survey import QueueOrder
from router.dispatch.recorded import job


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


# Weights -------------------------------------------------------------------------------------------


def test_weight_of_two_doubles_the_share():
    subject = Queue(20, fairness="tokens", tenant_weights={"A": 2.0})
    for tenant in "AAAAAABBB":
        subject.push(job(tenant))
    popped = [subject.pop(accept_all) for _ in range(9)]
    assert "".join(ticket.job.tenant for ticket in popped if ticket) == "ABABAABAA"


def test_counter_of_a_tenant_with_a_tiny_weight_stays_finite():
    subject = Queue(3, fairness="tokens", tenant_weights={"A": 5e-324})
    ticket = job("A", cost=2.0)
    subject.push(ticket)
    subject.pop(accept_all)
    subject.charge(ticket, 1e308)
    subject.push(job("B"))
    assert subject.counters("AB").counters == {"A": 1e300, "B": 0.0}
    subject.refund(ticket, down_to=0.0)
    assert subject.counters("B").counters == {"B": 0.0}


WEIGHTS = {"A": 0.5, "B": 4.0}


class ChargeIgnoresTheWeight(Queue):
    def charge(self, ticket: Ticket, cost: float) -> None:
        self._kernel.charge(ticket.job.tenant, max(0.0, cost - ticket.charged))
        ticket.charged = max(ticket.charged, cost)


class RefundIgnoresTheWeight(Queue):
    def refund(self, ticket: Ticket, *, down_to: float) -> None:
        self._kernel.refund(ticket.job.tenant, max(0.0, ticket.charged - down_to))
        ticket.charged = 0.0


class PushIgnoresTheWeight(Queue):
    def push(self, ticket: Ticket) -> None:
        self._weights, weights = {}, self._weights
        super().push(ticket)
        self._weights = weights


class OrderIgnoresTheWeight(Queue):
    def order(self) -> QueueOrder:
        self._weights, weights = {}, self._weights
        try:
            return super().order()
        finally:
            self._weights = weights


def test_weights_divide_every_cost():
    check_weights(Queue)


@pytest.mark.parametrize("mutant", Queue.__subclasses__(), ids=lambda mutant: mutant.__name__)
def test_queue_that_ignores_a_weight_is_detected(mutant):
    with pytest.raises(AssertionError):
        check_weights(mutant)


def check_weights(queue_type: type[Queue]) -> None:
    """Compare a queue with one without weights in which each cost was divided by hand."""
    random = Random(14)
    subject = queue_type(1000, fairness="tokens", tenant_weights=WEIGHTS)
    plain = Queue(1000, fairness="tokens")
    running: list[tuple[Ticket, Ticket]] = []
    twins: dict[Ticket, Ticket] = {}
    for _ in range(400):
        action = random.choice(["push", "push", "pop", "charge", "refund", "requeue"])
        tenant, cost = random.choice("ABC"), float(random.randint(0, 8))
        weight = WEIGHTS.get(tenant, 1.0)
        if action == "push":
            ticket, twin = job(tenant, cost=cost), job(tenant, cost=cost / weight)
            twins[ticket] = twin
            subject.push(ticket)
            plain.push(twin)
        elif action == "pop" and len(subject):
            popped, expected = subject.pop(accept_all), plain.pop(accept_all)
            assert popped is not None
            assert expected is twins[popped]
            running.append((popped, expected))
        elif running:
            ticket, twin = running.pop(random.randrange(len(running)))
            weight = WEIGHTS.get(ticket.job.tenant, 1.0)
            if action == "charge":
                subject.charge(ticket, cost)
                plain.charge(twin, cost / weight)
                running.append((ticket, twin))
            elif action == "requeue":
                subject.requeue(ticket)
                plain.requeue(twin)
            else:
                subject.refund(ticket, down_to=cost)
                plain.refund(twin, down_to=cost / weight)
        assert plain.counters("ABC") == subject.counters("ABC")
        assert plain.order().newcomers == subject.order().newcomers
    assert [twins[ticket] for ticket in subject.order().tickets] == plain.order().tickets


# Capacity and bytes --------------------------------------------------------------------------------


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
