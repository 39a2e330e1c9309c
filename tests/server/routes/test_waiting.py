"""A queued client receives headers, and comments if the response to its stream has started early."""

import json

import pytest
import trio
import trio.testing

from fairlead.base.config import ApiKey, QueueConfig
from fairlead.base.errors import Cancelled, NodeFailed, QueueFull, QueueTimeout
from fairlead.base.job import Delta
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.fleet.status import NodeStatus
from fake_fleet import FakeFleet
from server.routes.raw_http import post, serving

CHAT = "/v1/chat/completions"


async def timed(client, chat, **fields):
    """Return the response, and the times at which its pieces arrived."""
    began_s = trio.current_time()
    times_s = []

    class Pieces(list):
        def append(self, piece):
            super().append(piece)
            times_s.append(trio.current_time() - began_s)

    reply = await client.post(CHAT, chat(stream=True, **fields), pieces=Pieces())
    return reply, times_s


async def test_waiting_stream_reports_its_queue_position_every_five_seconds(client, chat, autojump_clock):
    client.gateway.wait_s = 28.0
    reply, times_s = await timed(client, chat)
    assert reply.status == 200
    assert reply.comments == [
        ": queued position=13 estimated_wait=104",
        ": queued position=8 estimated_wait=64",
        ": queued position=3 estimated_wait=24",
    ]
    assert pytest.approx(times_s[:4]) == [15.0, 20.0, 25.0, 28.0]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.chunks) == "Hello world"
    assert reply.is_complete
    assert (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"]) == ("104", "13")
    assert reply.headers["content-type"] == "text/event-stream"


async def test_stream_that_starts_before_the_keep_alive_has_no_comments(client, chat, autojump_clock):
    client.gateway.wait_s = 14.9
    reply, times_s = await timed(client, chat)
    assert reply.comments == []
    assert pytest.approx(14.9) == times_s[0]


async def test_job_with_a_seat_but_without_text_is_reported_as_running(client, chat, autojump_clock):
    def slow(job):
        return [[Delta(0, "late", [1], finish_reason="stop")]]

    client.gateway.script = slow
    client.gateway.prefill_s = 17.0
    reply, _ = await timed(client, chat)
    assert reply.comments == [": running"]
    assert reply.is_complete


async def test_two_streams_of_one_request_id_each_get_their_own_position(client, chat, autojump_clock):
    client.gateway.wait_s = 18.0
    replies = []

    async def send_request():
        headers = {"X-Request-Id": "mine"}
        replies.append(await client.post(CHAT, chat(stream=True), headers=headers))

    async with trio.open_nursery() as clients:
        clients.start_soon(send_request)
        await trio.sleep(10)
        client.gateway.wait_s = 21.0
        clients.start_soon(send_request)
    assert [
        [int(comment.partition("position=")[2].split()[0]) for comment in reply.comments] for reply in replies
    ] == [[3], [6, 1]]
    assert "mine" == replies[0].headers["x-request-id"] != replies[1].headers["x-request-id"]


async def test_error_after_the_early_200_is_an_event_and_cuts_the_stream(client, chat, autojump_clock):
    client.gateway.wait_s = 21.0
    client.gateway.refusal = QueueTimeout("waited too long")
    reply, times_s = await timed(client, chat)
    assert reply.status == 200
    assert len(reply.comments) == 2
    (event,) = reply.events
    assert b'{"error":{"message":"waited too long","type":"timeout_error","param":null,' in event
    assert b'"code":"queue_timeout"' in event
    assert not reply.is_complete
    assert pytest.approx([15.0, 20.0, 21.0]) == times_s


async def test_bug_after_the_early_200_is_an_event_without_internals(client, chat, log, autojump_clock):
    client.gateway.wait_s = 16.0
    client.gateway.refusal = ZeroDivisionError("secret")
    reply, _ = await timed(client, chat)
    assert b"internal_error" in reply.events[-1]
    assert b"secret" not in reply.body
    assert not reply.is_complete
    assert len(log) == 1


async def test_failure_after_the_first_delta_is_an_event(client, chat, autojump_clock):
    client.gateway.wait_s = 16.0
    client.gateway.script = lambda job: [[Delta(0, "a", [1])], NodeFailed("gone")]
    reply, _ = await timed(client, chat)
    assert b"node_failed" in reply.events[-1]
    assert not reply.is_complete


@pytest.mark.parametrize("wait_s", [0.0, 14.9])
async def test_error_before_the_keep_alive_has_its_http_status(client, chat, wait_s, autojump_clock):
    client.gateway.wait_s = wait_s
    client.gateway.refusal = QueueFull("full", retry_after_s=7, estimated_wait_s=30)
    reply, _ = await timed(client, chat)
    assert (reply.status, reply.headers["retry-after"], reply.headers["x-estimated-wait"]) == (429, "7", "30")


async def test_with_keep_alive_zero_no_stream_starts_early(client_with, chat, autojump_clock):
    client = client_with(queue=QueueConfig(keep_alive_s=0))
    client.gateway.wait_s = 500.0
    client.gateway.refusal = QueueTimeout("waited too long")
    reply, _ = await timed(client, chat)
    assert (reply.status, reply.headers["x-should-retry"]) == (504, "false")


async def test_response_that_is_not_streamed_never_starts_early(client, chat, autojump_clock):
    client.gateway.wait_s = 50.0
    client.gateway.refusal = QueueTimeout("waited too long", estimated_wait_s=12)
    reply = await client.post(CHAT, chat())
    assert (reply.status, reply.headers["x-estimated-wait"]) == (504, "12")


async def test_comments_and_a_cut_are_sent_by_the_real_listener(client_with, chat):
    client = client_with(queue=QueueConfig(keep_alive_s=0.001))
    client.gateway.wait_s = 1000.0

    async def waiting(_request_id):  # at any time
        return WaitEstimate(1000, 8000)

    client.gateway.waiting = waiting
    request = post(json.dumps(chat(stream=True)).encode(), CHAT, "X-Request-Id: mine")
    async with serving(client.app) as server:
        stream = await server.connect()
        await stream.send(request)
        await stream.until(b": queued position=1000 estimated_wait=8000\n\n")
        assert (await server.fetch(post(b"", "/v1/requests/mine/cancel"))).status == 200
        answer = await stream.answer()
    assert (answer.status, answer.is_complete) == (200, False)
    assert b'"code":"cancelled"' in answer.body


async def test_499_is_sent_by_the_real_listener(client, chat):
    client.gateway.refusal = Cancelled("the request was cancelled")
    async with serving(client.app) as server:
        reply = await server.fetch(post(json.dumps(chat()).encode(), CHAT))
    assert (reply.status, reply.error["code"], reply.is_complete) == (499, "cancelled", True)


@pytest.mark.parametrize("after_s", [5.0, 17.0, 22.0])
async def test_disconnect_ends_a_queued_job(client, chat, after_s, autojump_clock):
    client.gateway.wait_s = 100.0
    left = trio.Event()
    async with trio.open_nursery() as clients:
        clients.start_soon(lambda: client.post(CHAT, chat(stream=True), disconnected=left))
        await trio.sleep(after_s)
        assert client.gateway.ended == 0
        left.set()
        await trio.testing.wait_all_tasks_blocked()
        assert client.gateway.ended == 1


async def test_gateway_without_an_answer_is_a_bug_that_is_logged(client, chat, log):
    client.gateway.script = lambda job: []
    assert (await client.post(CHAT, chat())).status == 500
    assert len(log) == 1


@pytest.mark.parametrize(
    ("role", "models", "far", "names_problem"),
    [
        ("operator", (), "down", True),
        ("operator", ("small",), "down", True),
        ("user", (), "down", False),
        ("operator", (), "up", False),
    ],
)
async def test_late_error_names_the_problem_of_a_down_node_to_operators(
    client_with, chat, role, models, far, names_problem
):
    nodes = [
        NodeStatus(id=name, kind="remote", models=(model,), seats=0, busy=0, state=state, problem=problem)
        for name, model, state, problem in (
            ("far", "small", far, "connection refused" if far == "down" else None),
            ("far2", "small", "down", "timed out"),
            ("other", "cold", "down", "of another model"),
        )
    ]
    key = ApiKey("sk-1", role=role, models=models)
    client = client_with(key, fleet=FakeFleet(["small"], node_statuses=nodes))
    client.gateway.refusal = QueueTimeout("no server is up")
    reply = await client.post(CHAT, chat(), headers={"Authorization": "Bearer sk-1"})
    more = "; far: connection refused; far2: timed out" if names_problem else ""
    assert (reply.status, reply.error["message"]) == (504, f"no server is up{more}")
