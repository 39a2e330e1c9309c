"""The last requests: what is recorded, how many are kept, and which of them a caller sees."""

import pytest

from fairlead.base.errors import QueueFull
from fairlead.generation.metrics.requests import (
    EndedRequest,
    RequestHistory,
    RequestQuery,
    RequestScope,
    ended_request_of,
    select,
)
from generation.metrics.board_values import ended, running, waiting
from generation.metrics.test_job_metrics import timeline

ALL = RequestScope()


def test_batches_of_a_tenant_are_its_own():
    scope = RequestScope(tenant="ana")
    assert scope.sees(ended("batch:ana"))
    assert not scope.sees(ended("batch:ben"))


def test_record_has_the_times_of_a_job():
    record = ended_request_of(timeline("ana", tokens=5), now=1000.0, number=3)
    assert (record.number, record.tenant, record.ended_at) == (3, "ana", 1000.0)
    assert (record.wait_s, record.first_token_s, record.took_s) == (1.0, 3.0, 7.0)
    assert (record.tokens_per_s, record.token_gap_s) == (1.0, 1.0)


def test_record_of_a_refused_job_says_why_and_has_no_seat():
    refused = timeline(outcome=QueueFull.code, granted_s=None, first_delta_s=None, ended_s=2.0, tokens=0)
    refused.problem = "all nodes are busy"
    record = ended_request_of(refused, now=1000.0)
    assert (record.outcome, record.problem) == ("queue_full", "all nodes are busy")
    assert (record.wait_s, record.first_token_s, record.seats, record.tokens_per_s) == (2.0, None, 0, None)


def test_only_the_last_requests_are_kept_and_the_latest_is_first():
    history = RequestHistory(kept=2)
    for number in range(4):
        history.add(ended(number=number))
    assert [request.number for request in history] == [3, 2]


@pytest.mark.parametrize(
    ("scope", "seen"),
    [
        (ALL, ["ana", "ben", "portal/carl"]),
        (RequestScope(models=frozenset({"other"})), ["ben"]),
        (RequestScope(tenant="ana"), ["ana"]),
        (RequestScope(tenant="nobody"), []),
        (RequestScope(tenant="portal"), []),
        (RequestScope(tenant="portal", key="key-portal"), ["portal/carl"]),
        (RequestScope(tenant="portal/carl"), ["portal/carl"]),
    ],
)
def test_scope_hides_other_requests(scope, seen):
    history = RequestHistory()
    history.add(ended("portal/carl", owner="key-portal/carl"))
    history.add(ended("ben", model="other"))
    history.add(ended("ana"))
    jobs = [waiting("ana"), running("ben", model="other"), waiting("portal/carl", owner="key-portal/carl")]
    found = select(jobs, history, scope, RequestQuery())
    assert [request.tenant for request in found.ended] == seen
    assert [job.tenant for job in found.open] == seen
    assert (found.waiting, found.running) == (
        sum(name != "ben" for name in seen),
        sum(name == "ben" for name in seen),
    )


@pytest.mark.parametrize(
    ("query", "numbers", "states"),
    [
        (RequestQuery(), [4, 3, 2, 1], ["waiting", "running"]),
        (RequestQuery(state="ended"), [4, 3, 2, 1], []),
        (RequestQuery(state="waiting"), [], ["waiting"]),
        (RequestQuery(state="running"), [], ["running"]),
        (RequestQuery(model="big"), [2], []),
        (RequestQuery(tenant="ben"), [3], ["running"]),
        (RequestQuery(team="red"), [1], []),
        (RequestQuery(node="n"), [4, 3, 2, 1], ["running"]),
        (RequestQuery(priority=0), [4], []),
        (RequestQuery(outcome="success"), [4, 2, 1], []),
        (RequestQuery(outcome="node_failed"), [3], []),
        (RequestQuery(outcome="failed"), [3], []),
        (RequestQuery(limit=1), [4], ["waiting"]),
        (RequestQuery(tenant="ben", outcome="success"), [], []),
    ],
)
def test_query_selects(query, numbers, states):
    history = RequestHistory()
    for request in (
        ended(number=1, team="red"),
        ended(number=2, model="big"),
        ended("ben", number=3, outcome="node_failed"),
        ended(number=4, priority=0),
    ):
        history.add(request)
    found = select([waiting("ana"), running("ben")], history, ALL, query)
    assert [request.number for request in found.ended] == numbers
    assert [job.state for job in found.open] == states


def test_rate_needs_two_tokens_after_the_first():
    assert ended(tokens=81).tokens_per_s == 10.0
    assert ended(tokens=1).tokens_per_s is None
    assert ended(first_token_s=None).tokens_per_s is None
    assert ended(took_s=2.0).tokens_per_s is None
    assert EndedRequest(tenant="a", request_id="", model="", outcome="", ended_at=0).tokens_per_s is None
