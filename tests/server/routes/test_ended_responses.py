"""Responses in the background that end early: by a cancellation, deletion, eviction, expiry or shutdown."""

import json

import pytest
import trio
import trio.testing

from fairlead.base.job import Delta
from server.routes.responses_client import (
    PATH,
    Sent,
    body_of,
    created,
    events_of,
    found,
    in_steps,
    keeping,
    kept,
    running,
)

STEPS = [0.0, 5.0, 15.0, 25.0]  # before the job's first step, queued, in progress, after its end


async def cancelled(client, response_id):
    reply = await client.post(f"{PATH}/{response_id}/cancel", b"")
    assert reply.status == 200, reply.body
    return reply.json


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_s", STEPS)
async def test_cancelling_ends_the_job_at_once(client, after_s, stream, autojump_clock):
    in_steps(client, 10, 10)
    async with running(client) as clients:
        sent = Sent(client, clients, "POST", PATH, content=body_of(background=True, stream=stream))
        while not sent.pieces:
            await trio.lowlevel.checkpoint()
        response_id = sent.events[0]["response"]["id"] if stream else json.loads(sent.pieces[0])["id"]
        if after_s:
            await trio.sleep(after_s)
        began_s = trio.current_time()
        answer = await cancelled(client, response_id)
        assert trio.current_time() == began_s
        await trio.testing.wait_all_tasks_blocked()
        assert client.gateway.ended == len(client.gateway.jobs)
        assert answer["status"] == ("completed" if after_s == 25 else "cancelled")
        assert await cancelled(client, response_id) == await found(client, response_id) == answer
        if stream:
            events = events_of(await sent.over())
            assert events[-1]["response"] == answer
            assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("after_s", STEPS[1:3])
async def test_request_id_cancels_the_response(client, after_s, autojump_clock):
    in_steps(client, 10, 10)
    async with running(client):
        answer = await created(client, background=True, headers={"X-Request-Id": "mine"})
        await trio.sleep(after_s)
        assert (await client.post("/v1/requests/mine/cancel", b"")).status == 200
        await trio.testing.wait_all_tasks_blocked()
        assert (await found(client, answer["id"]))["status"] == "cancelled"


@pytest.mark.parametrize("after_s", STEPS)
async def test_deleting_ends_the_job_and_its_streams(client, after_s, autojump_clock):
    in_steps(client, 10, 10)
    async with running(client) as clients:
        sent = Sent(client, clients, "POST", PATH, content=body_of(background=True, stream=True))
        while not sent.pieces:
            await trio.lowlevel.checkpoint()
        response_id = sent.events[0]["response"]["id"]
        if after_s:
            await trio.sleep(after_s)
        assert (await client.send("DELETE", f"{PATH}/{response_id}", b"")).status == 200
        await trio.testing.wait_all_tasks_blocked()
        assert client.gateway.ended == len(client.gateway.jobs)
        assert (await sent.over()).is_complete == (after_s == 25)
        assert (await client.get(f"{PATH}/{response_id}")).status == 404
        assert await kept(client) == (0, 0)


@pytest.mark.parametrize("after_s", STEPS)
async def test_server_that_stops_ends_the_response(client, after_s, autojump_clock):
    in_steps(client, 10, 10)
    async with running(client):
        await created(client, background=True)
        if after_s:
            await trio.sleep(after_s)
        stopped_s = trio.current_time()
    assert trio.current_time() == stopped_s
    assert client.gateway.ended == len(client.gateway.jobs)


async def test_response_whose_bytes_are_needed_is_cancelled_and_gone(client_with, autojump_clock):
    client = keeping(client_with, max_bytes=8000)
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], [Delta(0, "x" * 8000, [2])], None]
    async with running(client):
        reply = await client.post(PATH, body_of(background=True, stream=True))
        assert not reply.is_complete
        assert client.gateway.ended == 1
        assert await kept(client) == (0, 0)


async def test_response_whose_input_exceeds_the_bound_is_refused(client_with, autojump_clock):
    client = keeping(client_with, max_bytes=8000)
    async with running(client):
        reply = await client.post(PATH, body_of("x" * 9000, background=True))
        await trio.testing.wait_all_tasks_blocked()
        assert client.gateway.ended == len(client.gateway.jobs)
    assert (reply.status, reply.error["param"]) == (400, "input")


async def test_response_does_not_expire_before_its_end(client_with, autojump_clock):
    client = keeping(client_with, ttl_s=5)
    in_steps(client, 10, 10)
    async with running(client):
        answer = await created(client, background=True)
        await trio.sleep(24)
        assert (await found(client, answer["id"]))["status"] == "completed"
        await trio.sleep(25)
        assert await kept(client) == (0, 0)
