"""Messages of a model that another server also has: the client gets one message, from either or from both."""

import json

import pytest

from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta
from fake_fleet import FakeFleet
from server.routes.message_events import PATH, events_of, read
from server.routes.remote_responses import ANSWER, complete_response

BODY = {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


def event(kind, **members):
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | members)}\n\n".encode()


def piece(text):
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


USAGE = {"input_tokens": 5, "output_tokens": 0}
THEIRS = {"id": "theirs", "type": "message", "role": "assistant", "model": "m", "content": []}
START = event("message_start", message=THEIRS | {"stop_reason": None, "stop_sequence": None, "usage": USAGE})
BEGUN = START + event("content_block_start", index=0, content_block={"type": "text", "text": ""})
ENDED = [
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=USAGE),
    event("message_stop"),
]


def relayed(job):
    """Return the deltas of another server."""
    return [
        [Delta(0, "Hel", raw=[BEGUN, piece("Hel")], relayed_tokens=1)],
        [Delta(0, "lo", raw=[piece("lo")], relayed_tokens=1)],
        [Delta(0, raw=ENDED, finish_reason="stop")],
    ]


def ours(job):
    """Return the deltas of our engine."""
    return [[Delta(0, "Hel", [1])], [Delta(0, "lo", [2])], [Delta(0, finish_reason="stop")]]


@pytest.fixture
def both(client_with):
    return client_with(fleet=FakeFleet(["small"], ["small"]), gateway_script=complete_response)


async def streamed(client, script):
    client.gateway.script = script
    return await client.post(PATH, BODY | {"stream": True})


@pytest.mark.parametrize("stream", [False, True])
async def test_job_that_both_can_run_has_token_ids_and_the_body_to_relay(both, stream):
    body = json.dumps(BODY | {"stream": stream, "unknown": 1}).encode()
    await both.post(PATH, body)
    job = both.gateway.job
    assert (len(job.prompts), job.relay.path, job.relay.body) == (1, PATH, body)
    assert job.relay.stream == stream


async def test_whole_message_is_written_by_the_server_that_generates_it(both):
    assert (await both.post(PATH, BODY)).body == ANSWER
    both.gateway.script = ours
    assert (await both.post(PATH, BODY)).json["content"] == [{"type": "text", "text": "Hello"}]


async def test_events_of_another_server_are_unchanged(both):
    reply = await streamed(both, relayed)
    assert reply.body == BEGUN + piece("Hel") + piece("lo") + b"".join(ENDED)


@pytest.mark.parametrize(("first", "second"), [(ours, relayed), (relayed, ours)])
@pytest.mark.parametrize("at", [1, 2])
async def test_message_that_another_server_continues_has_one_beginning_and_one_end(both, first, second, at):
    reply = await streamed(both, lambda job: [*first(job)[:at], *second(job)[at:]])
    message, kinds = read(without_usage(events_of(reply.body)))
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert (kinds, message["stop_reason"]) == (["text", "text_delta"], "end_turn")
    assert reply.is_complete


def without_usage(events):
    """Return the events with the same usage in all: two servers need not count alike."""
    for one in events:
        for holder in (one, one.get("message", {})):
            if "usage" in holder:
                holder["usage"] = {"output_tokens": 0}
    return events


@pytest.mark.parametrize("script", [ours, relayed])
async def test_message_that_nobody_continues_ends_with_an_error(both, script):
    reply = await streamed(both, lambda job: [script(job)[0], NodeFailed("gone")])
    last = events_of(reply.body)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert not reply.is_complete
