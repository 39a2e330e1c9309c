"""Responses in the background: their states, how they fail, and what they count for."""

import json

import pytest
import trio
import trio.testing

from fairlead.base.config import ApiKey, KeyLimits
from fairlead.base.errors import NodeFailed, QueueFull
from fairlead.base.job import Delta
from fairlead.generation.offload import Offload
from fake_fleet import FakeFleet
from server.routes.responses_client import (
    PATH,
    Sent,
    body_of,
    created,
    found,
    in_steps,
    keeping,
    kept,
    running,
)

# States ----------------------------------------------------------------------------------------------


async def test_response_is_queued_then_in_progress_then_completed(client, autojump_clock):
    in_steps(client, 10, 10)
    async with running(client):
        answer = await created(client, background=True)
        assert (answer["status"], answer["background"], answer["output"]) == ("queued", True, [])
        assert await found(client, answer["id"]) == answer
        await trio.sleep(15)
        assert await found(client, answer["id"]) == {**answer, "status": "in_progress"}
        await trio.sleep(10)
        ended = await found(client, answer["id"])
    assert ended["status"] == "completed"
    assert ended["output"][0]["content"][0]["text"] == "word0 end"
    assert ended["usage"]["output_tokens"] == 2


async def test_response_does_not_need_its_client(client, autojump_clock):
    in_steps(client, 10, 10)
    async with running(client) as clients:
        sent = Sent(client, clients, "POST", PATH, content=body_of(background=True, stream=True))
        await trio.sleep(1)
        response_id = sent.events[0]["response"]["id"]
        await sent.leave()
        await trio.sleep(30)
        assert (await found(client, response_id))["status"] == "completed"


async def test_response_may_continue_another_and_be_continued(client, autojump_clock):
    async with running(client):
        first = await created(client, "one")
        second = await created(client, "two", background=True, previous_response_id=first["id"])
        reply = await client.post(PATH, body_of(previous_response_id=second["id"]))
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
        assert "queued" in reply.error["message"]
        await trio.sleep(1)
        third = await created(client, "three", previous_response_id=second["id"])
    assert third["status"] == "completed"
    assert len(client.gateway.jobs[-1].prompts[0]) > len(client.gateway.jobs[1].prompts[0])


@pytest.mark.parametrize("wait_s", [0, 10])
async def test_refusal_of_the_queue_fails_the_response(client, wait_s, autojump_clock):
    client.gateway.wait_s, client.gateway.refusal = wait_s, QueueFull("no room")
    async with running(client):
        answer = await created(client, background=True, stream=False)
        await trio.sleep(20)
        ended = await found(client, answer["id"])
    assert (ended["status"], ended["error"]["code"]) == ("failed", "rate_limit_exceeded")
    assert ended["error"]["message"] == "no room"


async def test_failure_after_the_first_token_fails_the_response_with_what_it_has(client, autojump_clock):
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], NodeFailed("gone")]
    async with running(client):
        answer = await created(client, background=True)
        await trio.sleep(1)
        ended = await found(client, answer["id"])
    assert (ended["status"], ended["error"]["message"]) == ("failed", "gone")
    assert ended["output"][0]["content"][0]["text"] == "Hello"


@pytest.mark.parametrize("step", ["before", "after"])
async def test_bug_fails_only_its_own_response(client, log, step, autojump_clock):
    def script(job):
        if step == "after":
            yield [Delta(0, "Hello", [1])]
        raise ZeroDivisionError("secret")

    async with running(client):
        client.gateway.script, script_of_others = script, client.gateway.script
        answer = await created(client, background=True)
        await trio.sleep(1)
        ended = await found(client, answer["id"])
        client.gateway.script = script_of_others
        other = await created(client, background=True)
        await trio.sleep(1)
        assert (await found(client, other["id"]))["status"] == "completed"
    assert ended["status"] == "failed"
    assert "secret" not in json.dumps(ended)
    assert any("exc_info" in entry for entry in log)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"temperature": 9}, "temperature"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"store": False}, "background"),
    ],
)
async def test_invalid_request_is_refused_at_once(client, fields, param, autojump_clock):
    async with running(client):
        await trio.testing.wait_all_tasks_blocked()  # until what ends after the start has ended
        tasks = trio.lowlevel.current_statistics().tasks_living
        reply = await client.post(PATH, body_of(background=True) | fields)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert await kept(client) == (0, 0)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_client_that_disconnects_before_the_answer_leaves_nothing_behind(
    client, autojump_clock, monkeypatch
):
    async def decode(*arguments):
        """Take as long as a turn of another tenant."""
        await trio.sleep_forever()

    monkeypatch.setattr(Offload, "decode", decode)
    async with running(client) as clients:
        await trio.testing.wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        sent = Sent(client, clients, "POST", PATH, content=body_of(background=True))
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living > tasks
        reply = await sent.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert (reply.pieces, client.gateway.jobs) == ([], [])
        assert await kept(client) == (0, 0)


async def test_server_that_is_about_to_stop_begins_no_response(client_with, autojump_clock):
    client = client_with(draining=lambda: True)
    async with running(client):
        reply = await client.post(PATH, body_of(background=True))
    assert (reply.status, reply.error["code"]) == (503, "draining")


async def test_application_without_a_lifespan_refuses_background(client, autojump_clock):
    reply = await client.post(PATH, body_of(background=True))
    assert (reply.status, reply.error["code"]) == (503, "not_started")


# What it counts for ----------------------------------------------------------------------------------


async def test_response_counts_against_its_key_until_its_end(client_with, autojump_clock):
    client = client_with(ApiKey(key="ana", limits=KeyLimits(concurrent=1)))
    headers = {"Authorization": "Bearer ana", "X-Request-Id": "mine"}
    in_steps(client, 10, 10)
    async with running(client):
        await created(client, background=True, headers=headers)
        reply = await client.post(PATH, body_of(background=True), headers=headers)
        assert (reply.status, reply.error["code"]) == (429, "rate_limited")
        assert (await kept(with_key(client, headers)))[0] == 1
        await trio.sleep(30)
        await created(client, background=True, headers=headers)
    job = client.gateway.jobs[0]
    assert (job.request_id, job.stream, job.owner) == ("mine", True, job.owner)
    assert job.tenant == job.owner


async def test_hundreds_of_responses_leave_nothing_behind(client_with, autojump_clock):
    client = keeping(client_with, max_bytes=100_000)
    async with running(client):
        await trio.testing.wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(200):
            await created(client, background=True, stream=False)
            assert (await kept(client))[1] <= 100_000
        await trio.sleep(100)
        assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert client.gateway.ended == 200
    assert client.gateway._scopes == {}


def with_key(client, headers):
    """Return an object with the client's `get`, which sends these headers."""

    class WithKey:
        async def get(self, path):
            return await client.get(path, headers=headers)

    return WithKey()


async def test_translated_response_is_streamed_by_its_node(client_with, autojump_clock):
    """The client did not ask for a stream."""
    client = client_with(fleet=FakeFleet(["small"], ["remote"], dialects=("openai",)))
    async with running(client):
        answer = await created(client, model="remote", background=True)
        await trio.sleep(1)
        assert (await found(client, answer["id"]))["status"] == "completed"
    relay = client.gateway.job.relay
    assert (relay.only_chat, relay.stream, json.loads(relay.chat.body)["stream"]) == (True, True, True)
