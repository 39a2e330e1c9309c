"""The events of responses in the background, for any number of readers, which come and go."""

import json

import pytest
import trio

from fairlead.base.errors import QueueFull
from fairlead.server.responses.background import EVENTS_AT_ONCE
from server.routes.responses_client import (
    PATH,
    Sent,
    body_of,
    created,
    events_of,
    found,
    in_steps,
    kept,
    running,
)

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
