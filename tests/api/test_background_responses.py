"""Responses in the background: their states, their events, how they end, and what they count for."""

import json

import pytest
import trio
import trio.testing

from api.responses_client import PATH, Sent, body_of, created, events_of, kept, running
from fairlead.api.responses.background import EVENTS_AT_ONCE
from fairlead.config import ApiKey, Config, KeyLimits, ModelConfig, ResponsesConfig
from fairlead.errors import NodeFailed, QueueFull
from fairlead.job import Delta

CREATED = ["response.created", "response.queued"]
HELLO = [
    *CREATED,
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def types(events):
    return [event["type"] for event in events]


def numbers(events):
    return [event["sequence_number"] for event in events]


async def found(client, response_id):
    return (await client.get(f"{PATH}/{response_id}")).json


async def cancelled(client, response_id, **options):
    reply = await client.post(f"{PATH}/{response_id}/cancel", b"", **options)
    assert reply.status == 200, reply.body
    return reply.json


def in_steps(client, *seconds):
    """Let the job wait, and pause before each of its steps; with as many words as there are numbers."""
    wait_s, *pauses = seconds
    client.gateway.wait_s = wait_s
    steps = [[Delta(0, f"word{index} ", [index + 1])] for index in range(len(pauses))]
    steps.append([Delta(0, "end", [9], finish_reason="stop")])

    async def play(step, deltas, play=client.gateway._play):
        if step is not None and step is not steps[0]:
            await trio.sleep(pauses[steps.index(step) - 1])
        await play(step, deltas)

    client.gateway._play = play
    client.gateway.script = lambda job: steps


@pytest.fixture
def limited(client_with, tmp_path):
    """A function that returns a client of an application with these settings of kept responses."""

    def client(*api_keys, **settings):
        card = ModelConfig(path=tmp_path, name="small")
        responses = ResponsesConfig(**settings)
        return client_with(config=Config(models=(card,), api_keys=api_keys, responses=responses))

    return client


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
        ({"previous_response_id": "resp-unknown"}, "previous_response_id"),
        ({"store": False}, "background"),
    ],
)
async def test_invalid_request_is_refused_at_once(client, fields, param, autojump_clock):
    async with running(client):
        tasks = trio.lowlevel.current_statistics().tasks_living
        reply = await client.post(PATH, body_of(background=True) | fields)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert await kept(client) == (0, 0)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_application_without_a_lifespan_refuses_background(client, autojump_clock):
    reply = await client.post(PATH, body_of(background=True))
    assert (reply.status, reply.error["code"]) == (503, "not_started")


# Cancelling ------------------------------------------------------------------------------------------

STEPS = [0.0, 5.0, 15.0, 25.0]  # before the job's first step, queued, in progress, after its end


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
            assert numbers(events) == list(range(len(events)))


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


async def test_response_whose_bytes_are_needed_is_cancelled_and_gone(limited, autojump_clock):
    client = limited(max_bytes=8000)
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], [Delta(0, "x" * 8000, [2])], None]
    async with running(client):
        reply = await client.post(PATH, body_of(background=True, stream=True))
        assert not reply.is_complete
        assert client.gateway.ended == 1
        assert await kept(client) == (0, 0)


async def test_response_whose_input_exceeds_the_bound_is_refused(limited, autojump_clock):
    client = limited(max_bytes=8000)
    async with running(client):
        reply = await client.post(PATH, body_of("x" * 9000, background=True))
        await trio.testing.wait_all_tasks_blocked()
        assert client.gateway.ended == len(client.gateway.jobs)
    assert (reply.status, reply.error["param"]) == (400, "input")


async def test_response_does_not_expire_before_its_end(limited, autojump_clock):
    client = limited(ttl_s=5)
    in_steps(client, 10, 10)
    async with running(client):
        answer = await created(client, background=True)
        await trio.sleep(24)
        assert (await found(client, answer["id"]))["status"] == "completed"
        await trio.sleep(25)
        assert await kept(client) == (0, 0)


# Events ----------------------------------------------------------------------------------------------


async def test_stream_begins_at_once_and_ends_with_the_response(client, autojump_clock):
    in_steps(client, 12, 9)
    async with running(client) as clients:
        sent = Sent(client, clients, "POST", PATH, content=body_of(background=True, stream=True))
        await trio.sleep(1)
        assert types(sent.events) == CREATED
        assert [event["response"]["status"] for event in sent.events] == ["queued", "queued"]
        reply = await sent.over()
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.is_complete
    events = events_of(reply)
    assert types(events) == HELLO
    assert numbers(events) == list(range(len(HELLO)))
    assert {event["response"]["id"] for event in events if "response" in event} == {
        events[0]["response"]["id"]
    }
    assert [block for block in reply.body.decode().split("\n\n") if block.startswith(":")] == [
        ": queued position=7 estimated_wait=56",
        ": queued position=2 estimated_wait=16",
        ": running",
    ]


@pytest.mark.parametrize("at_s", [1, 15, 30])
@pytest.mark.parametrize("after", [None, *range(len(HELLO)), 1000])
async def test_reader_gets_exactly_the_events_after_its_last_one(client, at_s, after, autojump_clock):
    in_steps(client, 10, 10)
    async with running(client) as clients:
        sent = Sent(client, clients, "POST", PATH, content=body_of(background=True, stream=True))
        await trio.sleep(at_s)
        path = f"{PATH}/{sent.events[0]['response']['id']}?stream=true"
        reply = await client.get(path if after is None else f"{path}&starting_after={after}")
        everything = events_of(await sent.over())
    assert reply.is_complete
    assert events_of(reply) == everything[0 if after is None else after + 1 :]


async def test_several_readers_get_the_same_events(client, autojump_clock):
    in_steps(client, 10, *[1] * 20)
    async with running(client) as clients:
        sent = Sent(client, clients, "POST", PATH, content=body_of(background=True, stream=True))
        await trio.sleep(1)
        path = f"{PATH}/{sent.events[0]['response']['id']}?stream=true"
        readers = []
        for _ in range(10):
            readers.append(Sent(client, clients, "GET", path))
            await trio.sleep(3)
        await readers[0].leave()
        replies = [await reader.over() for reader in readers[1:]]
        everything = await sent.over()
    assert {json.dumps(events_of(reply)) for reply in replies} == {json.dumps(events_of(everything))}


async def test_slow_reader_gets_all_events_in_bounded_pieces(client, autojump_clock):
    in_steps(client, 0, *[0.1] * 200)
    async with running(client):
        answer = events_of(await client.post(PATH, body_of(background=True, stream=True)))[0]["response"]
        pieces = []
        reply = await client.get(f"{PATH}/{answer['id']}?stream=true", headers={}, pieces=pieces)
    assert len(events_of(reply)) > 200
    assert max(piece.count(b"\n\n") for piece in pieces) == EVENTS_AT_ONCE


async def test_events_of_a_failed_response_end_with_its_failure(client, autojump_clock):
    client.gateway.refusal = QueueFull("no room")
    async with running(client):
        reply = await client.post(PATH, body_of(background=True, stream=True))
        events = events_of(reply)
        assert types(events) == [*CREATED, "response.in_progress", "response.failed"]
        assert await found(client, events[0]["response"]["id"]) == events[-1]["response"]
    assert reply.is_complete


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9" * 5000])
async def test_invalid_starting_point_is_refused(client, value, autojump_clock):
    async with running(client):
        events = events_of(await client.post(PATH, body_of(background=True, stream=True)))
        reply = await client.get(f"{PATH}/{events[0]['response']['id']}?stream=true&starting_after={value}")
    assert (reply.status, reply.error["param"]) == (400, "starting_after")


async def test_events_of_a_response_without_stream_are_not_kept(client, autojump_clock):
    async with running(client):
        answer = await created(client, background=True)
        reply = await client.get(f"{PATH}/{answer['id']}?stream=true")
        assert (reply.status, reply.error["param"]) == (400, "stream")
        await trio.sleep(1)
        _, size = await kept(client)
    assert size < 5000


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


async def test_hundreds_of_responses_leave_nothing_behind(limited, autojump_clock):
    client = limited(max_bytes=100_000)
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
