"""The requests of several fronts: all are at the dispatcher, once, and a new one gets them again."""

import msgspec
import pytest
import trio

from fairlead.base.errors import NoNode
from fairlead.distributed.frontends.shared_board import RemoteBoard, SharedBoard
from fairlead.generation.metrics.board import RequestBoard
from fairlead.generation.metrics.requests import RequestQuery, RequestScope
from generation.metrics.board_values import running
from generation.metrics.test_job_metrics import timeline

ALL, EVERY = RequestScope(), RequestQuery()
NOW = 1000.0


class FakeClient:
    """The connection of a front: questions and answers are encoded. Without a `board` nothing answers."""

    def __init__(self, name, board):
        self.name, self.board, self.run_id = name, board, "1"
        self.on_connect = []
        self.asked = []

    async def ask(self, question, *arguments):
        await trio.lowlevel.checkpoint()
        if self.board is None:
            raise NoNode("the dispatcher does not answer")
        self.asked.append(question)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(arguments))
        return msgspec.msgpack.decode(
            msgspec.msgpack.encode(self.board.questions[question](self.name, *sent))
        )

    def connect(self, board, run_id):
        self.board, self.run_id = board, run_id
        for call in self.on_connect:
            call()


def shared(*jobs):
    return SharedBoard(RequestBoard(lambda: list(jobs), now=lambda: NOW))


def front(board, name="1"):
    client = FakeClient(name, board)
    return RemoteBoard(client, now=lambda: NOW), client


async def tenants(board, scope=ALL):
    return [request.tenant for request in (await board.requests(scope, EVERY)).ended]


async def test_each_front_sees_the_requests_of_all(autojump_clock):
    board = shared(running("carl"))
    (one, _), (two, _) = front(board, "1"), front(board, "2")
    one.record(timeline("ana"))
    two.record(timeline("ben"))
    assert await tenants(one) == ["ana"]
    assert await tenants(two) == ["ben", "ana"]
    assert await tenants(one) == ["ben", "ana"]
    assert await tenants(one, RequestScope(tenant="ana")) == ["ana"]
    assert [job.tenant for job in (await one.requests(ALL, EVERY)).open] == ["carl"]
    assert [person.tenant for person in await one.people(RequestScope(tenant="ben"))] == ["ben"]


async def test_request_is_counted_once_also_if_it_is_sent_again(autojump_clock):
    board = shared()
    one, client = front(board)
    one.record(timeline("ana"))
    assert await tenants(one) == ["ana"]
    client.connect(board, "2")  # it is another run for the front, but has the requests
    one.record(timeline("ben"))
    assert await tenants(one) == ["ben", "ana"]


async def test_new_dispatcher_gets_the_kept_requests_again(autojump_clock, nursery):
    one, client = front(shared())
    nursery.start_soon(one.run)
    one.record(timeline("ana"))
    await trio.sleep(1)
    client.connect(None, "1")
    one.record(timeline("ben"))
    await trio.sleep(5)
    after = shared()
    client.connect(after, "2")
    await trio.sleep(5)
    two, _ = front(after, "2")
    assert await tenants(two) == ["ben", "ana"]
    assert client.asked.count("requests_ended") == 2


async def test_front_that_starts_again_under_its_name_is_not_taken_for_the_one_before(autojump_clock):
    board = shared()
    (one, _) = front(board)
    one.record(timeline("ana"))
    assert await tenants(one) == ["ana"]
    client = FakeClient("1", board)
    again = RemoteBoard(client, now=lambda: NOW + 1)
    again.record(timeline("ben"))
    assert await tenants(again) == ["ben", "ana"]


async def test_times_are_those_of_all_fronts_but_of_one_tenant_only_its_own(autojump_clock):
    board = shared()
    (one, _), (two, _) = front(board, "1"), front(board, "2")
    one.record(timeline("ana"))
    two.record(timeline("ben"))
    await tenants(two)
    assert (await one.timings(ALL, "1h")).rows[0].wait.count == 2
    assert (await one.timings(RequestScope(tenant="ben"), "1h")).rows[0].wait.count == 1
    assert (await one.timings(RequestScope(models=frozenset()), "1h")).rows[-1].model == ""


async def test_refusals_are_counted_once_also_if_no_dispatcher_answers_at_first(autojump_clock):
    board = shared()
    one, client = front(None)
    for _ in range(3):
        one.refuse("rate_limited")
    with pytest.raises(NoNode):
        await one.timings(ALL, "1h")
    client.connect(board, "2")
    for _ in range(2):
        assert sum((await one.timings(ALL, "1h")).outcomes["rate_limited"]) == 3


@pytest.mark.parametrize(
    ("question", "arguments"),
    [
        ("timings", ("2h", None)),
        ("requests", ({}, {"state": "x"})),
        ("requests_ended", ([{"tokens": -1}], {})),
        ("requests_ended", ([], {"x": -1})),
    ],
)
def test_invalid_question_is_refused(question, arguments):
    with pytest.raises(msgspec.ValidationError):
        shared().questions[question]("1", *arguments)
