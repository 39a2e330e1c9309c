"""What a client that waits is told: headers, and the comments of a stream that was answered early."""

import json

import pytest
import trio
import trio.testing

from api.conftest import FakeWaiting
from api.raw_http import post, serving
from fairlead.config import QueueConfig
from fairlead.errors import Cancelled, NodeFailed, QueueFull, QueueTimeout
from fairlead.job import Delta

CHAT = "/v1/chat/completions"


# Headers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_waited_says_how_long_it_was_to_be(client, chat, stream):
    client.gateway.estimated_wait_s = 24
    client.gateway.queue_position = 3
    client.gateway.estimated_wait_p90_s = 41
    reply = await client.post(CHAT, chat(stream=stream))
    assert ("24", "3", "41") == (
        reply.headers["x-estimated-wait"],
        reply.headers["x-queue-position"],
        reply.headers["x-estimated-wait-p90"],
    )


async def test_an_answer_that_did_not_wait_says_nothing(client, chat):
    reply = await client.post(CHAT, chat())
    assert not {"x-estimated-wait", "x-queue-position", "x-estimated-wait-p90"} & set(reply.headers)


# Comments ------------------------------------------------------------------------------------------


async def timed(client, chat, **fields):
    """Return the answer, and when each of its pieces came."""
    began_s = trio.current_time()
    times_s = []

    class Pieces(list):
        def append(self, piece):
            super().append(piece)
            times_s.append(trio.current_time() - began_s)

    reply = await client.post(CHAT, chat(stream=True, **fields), pieces=Pieces())
    return reply, times_s


async def test_a_stream_that_waits_is_told_its_place_every_five_seconds(client, chat, autojump_clock):
    client.gateway.wait_s = 28.0
    reply, times_s = await timed(client, chat)
    assert 200 == reply.status
    assert [
        ": queued position=13 estimated_wait=104",
        ": queued position=8 estimated_wait=64",
        ": queued position=3 estimated_wait=24",
    ] == reply.comments
    assert [15.0, 20.0, 25.0, 28.0] == pytest.approx(times_s[:4])
    assert "Hello world" == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.chunks)
    assert reply.whole
    assert ("104", "13") == (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"])
    assert "text/event-stream" == reply.headers["content-type"]


async def test_a_stream_whose_answer_is_there_before_has_no_comments(client, chat, autojump_clock):
    client.gateway.wait_s = 14.9
    reply, times_s = await timed(client, chat)
    assert [] == reply.comments
    assert pytest.approx(14.9) == times_s[0]


async def test_a_job_that_has_its_seat_but_nothing_to_say_yet_is_said_to_run(client, chat, autojump_clock):
    def slow(job):
        return [[Delta(0, "late", [1], finish_reason="stop")]]

    client.gateway.script = slow
    client.gateway.prefill_s = 17.0
    reply, _ = await timed(client, chat)
    assert [": running"] == reply.comments
    assert reply.whole


async def test_two_streams_of_one_request_id_are_each_told_their_own_place(client, chat, autojump_clock):
    client.gateway.wait_s = 18.0
    replies = []

    async def ask():
        headers = {"X-Request-Id": "mine"}
        replies.append(await client.post(CHAT, chat(stream=True), headers=headers))

    async with trio.open_nursery() as clients:
        clients.start_soon(ask)
        await trio.sleep(10)
        client.gateway.wait_s = 21.0
        clients.start_soon(ask)
    assert [[3], [6, 1]] == [
        [int(comment.partition("position=")[2].split()[0]) for comment in reply.comments] for reply in replies
    ]
    assert "mine" == replies[0].headers["x-request-id"] != replies[1].headers["x-request-id"]


async def test_an_error_after_the_early_200_is_an_event_and_a_cut(client, chat, autojump_clock):
    client.gateway.wait_s = 21.0
    client.gateway.refusal = QueueTimeout("waited too long")
    reply, times_s = await timed(client, chat)
    assert 200 == reply.status
    assert 2 == len(reply.comments)
    (event,) = reply.events
    assert b'{"error":{"message":"waited too long","type":"timeout_error","param":null,' in event
    assert b'"code":"queue_timeout"' in event
    assert not reply.whole
    assert pytest.approx([15.0, 20.0, 21.0]) == times_s


async def test_a_bug_after_the_early_200_is_an_event_without_internals(client, chat, log, autojump_clock):
    client.gateway.wait_s = 16.0
    client.gateway.refusal = ZeroDivisionError("secret")
    reply, _ = await timed(client, chat)
    assert b"internal_error" in reply.events[-1]
    assert b"secret" not in reply.body
    assert not reply.whole
    assert 1 == len(log)


async def test_a_failure_after_the_first_delta_is_an_event_as_ever(client, chat, autojump_clock):
    client.gateway.wait_s = 16.0
    client.gateway.script = lambda job: [[Delta(0, "a", [1])], NodeFailed("gone")]
    reply, _ = await timed(client, chat)
    assert b"node_failed" in reply.events[-1]
    assert not reply.whole


@pytest.mark.parametrize("wait_s", [0.0, 14.9])
async def test_an_error_before_the_keep_alive_is_a_real_status(client, chat, wait_s, autojump_clock):
    client.gateway.wait_s = wait_s
    client.gateway.refusal = QueueFull("full", retry_after_s=7, estimated_wait_s=30)
    reply, _ = await timed(client, chat)
    assert (429, "7", "30") == (reply.status, reply.headers["retry-after"], reply.headers["x-estimated-wait"])


async def test_with_keep_alive_zero_no_stream_is_answered_early(client_with, chat, autojump_clock):
    client = client_with(queue=QueueConfig(keep_alive_s=0))
    client.gateway.wait_s = 500.0
    client.gateway.refusal = QueueTimeout("waited too long")
    reply, _ = await timed(client, chat)
    assert (504, "false") == (reply.status, reply.headers["x-should-retry"])


async def test_what_is_not_streamed_is_never_answered_early(client, chat, autojump_clock):
    client.gateway.wait_s = 50.0
    client.gateway.refusal = QueueTimeout("waited too long", estimated_wait_s=12)
    reply = await client.post(CHAT, chat())
    assert (504, "12") == (reply.status, reply.headers["x-estimated-wait"])


async def test_comments_and_a_cut_come_through_the_real_listener(client_with, chat):
    client = client_with(queue=QueueConfig(keep_alive_s=0.001))
    client.gateway.wait_s = 1000.0
    client.gateway.waiting = lambda _: FakeWaiting(1000, 8000)  # however late it is asked
    request = post(json.dumps(chat(stream=True)).encode(), CHAT, "X-Request-Id: mine")
    async with serving(client.app) as server:
        stream = await server.connect()
        await stream.send(request)
        await stream.until(b": queued position=1000 estimated_wait=8000\n\n")
        assert 200 == (await server.ask(post(b"", "/v1/requests/mine/cancel"))).status
        answer = await stream.answer()
    assert (200, False) == (answer.status, answer.whole)
    assert b'"code":"cancelled"' in answer.body


async def test_a_499_comes_through_the_real_listener(client, chat):
    client.gateway.refusal = Cancelled("the request was cancelled")
    async with serving(client.app) as server:
        reply = await server.ask(post(json.dumps(chat()).encode(), CHAT))
    assert (499, "cancelled", True) == (reply.status, reply.error["code"], reply.whole)


@pytest.mark.parametrize("after_s", [5.0, 17.0, 22.0])
async def test_a_client_that_leaves_while_it_waits_ends_its_job(client, chat, after_s, autojump_clock):
    client.gateway.wait_s = 100.0
    left = trio.Event()
    async with trio.open_nursery() as clients:
        clients.start_soon(lambda: client.post(CHAT, chat(stream=True), left=left))
        await trio.sleep(after_s)
        assert 0 == client.gateway.ended
        left.set()
        await trio.testing.wait_all_tasks_blocked()
        assert 1 == client.gateway.ended


async def test_a_gateway_without_an_answer_is_a_bug_that_is_logged(client, chat, log):
    client.gateway.script = lambda job: []
    assert 500 == (await client.post(CHAT, chat())).status
    assert 1 == len(log)
